# mypy: ignore-errors
"""Triton kernels of the short convolution with SiLU (convolution_triton.py launches them).

A program has BT tokens and BC channels. What it reads several times, the tokens around its own, stays in its
cache. `places` [T]: each token's place in its packed sequence; without packing a token's place is t.

T tokens · C channels · W filter width · y is contiguous, x and dy have the strides given, weights are [W, C]
"""

import triton
import triton.language as tl


@triton.jit
def _tile(T, C, BT: tl.constexpr, BC: tl.constexpr):
    """A program's tokens [BT, 1], channels [1, BC], and sequence."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)[None, :]
    return t, c, tl.program_id(2).to(tl.int64)


@triton.jit
def _place(places, t, T, PACKED: tl.constexpr):
    return tl.load(places + t, mask=t < T, other=0) if PACKED else t


@triton.jit
def _input(x, t, c, lag, place, T, C, x_t, x_c):
    """x of `lag` tokens before t, 0 before the sequence."""
    inside = (t < T) & (c < C) & (place >= lag)
    return tl.load(x + (t - lag) * x_t + c * x_c, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weight(weight, lag, c, C, w_w, W: tl.constexpr):
    return tl.load(weight + (W - 1 - lag) * w_w + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _convolved(
    x, weight, bias, t, c, place, T, C, x_t, x_c, w_w, W: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Σ_lag weight[W − 1 − lag] ⊙ x_{t − lag} + bias."""
    total = _weight(weight, 0, c, C, w_w, W) * _input(x, t, c, 0, place, T, C, x_t, x_c)
    for lag in tl.static_range(1, W):
        total += _weight(weight, lag, c, C, w_w, W) * _input(x, t, c, lag, place, T, C, x_t, x_c)
    if BIAS:
        total += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    return total


@triton.jit
def forward(
    x, weight, bias, places, y, T, C, x_b, x_t, x_c, w_w,
    W: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t, c, b = _tile(T, C, BT, BC)
    place = _place(places, t, T, PACKED)
    z = _convolved(x + b * x_b, weight, bias, t, c, place, T, C, x_t, x_c, w_w, W, BIAS)
    tl.store(y + (b * T + t) * C + c, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=(t < T) & (c < C))


@triton.jit
def backward(
    x, weight, bias, places, dy, dx, sums, T, C, x_b, x_t, x_c, w_w, dy_b, dy_t, dy_c, dx_t, s_w,
    W: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx, and a program's share of the gradients of weight and bias: sums [P, W + BIAS, …], rows s_w apart.

    Token t is in the outputs of t … t + W − 1, whose dz = dy silu'(z) are computed again by each reader.
    """
    t, c, b = _tile(T, C, BT, BC)
    x, dy = x + b * x_b, dy + b * dy_b
    sums += (b * tl.num_programs(0) + tl.program_id(0)) * (W + BIAS) * s_w
    total = tl.zeros([BT, BC], tl.float32)
    for ahead in tl.static_range(W):
        place = _place(places, t + ahead, T, PACKED)
        z = _convolved(x, weight, bias, t + ahead, c, place, T, C, x_t, x_c, w_w, W, BIAS)
        inside = (t + ahead < T) & (c < C) & (place >= ahead)
        dz = tl.load(dy + (t + ahead) * dy_t + c * dy_c, mask=inside, other=0.0).to(tl.float32)
        rate = tl.sigmoid(z)
        dz *= rate * (1 + z * (1 - rate))
        total += _weight(weight, ahead, c, C, w_w, W) * dz
        if ahead == 0:
            for lag in tl.static_range(W):
                dw = tl.sum(dz * _input(x, t, c, lag, place, T, C, x_t, x_c), 0, keep_dims=True)
                tl.store(sums + (W - 1 - lag) * s_w + c, dw, mask=c < C)
            if BIAS:
                tl.store(sums + W * s_w + c, tl.sum(dz, 0, keep_dims=True), mask=c < C)
    tl.store(dx + (b * T + t) * dx_t + c, total.to(dx.dtype.element_ty), mask=(t < T) & (c < C))
