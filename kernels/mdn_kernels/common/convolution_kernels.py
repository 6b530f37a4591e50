# mypy: ignore-errors
"""Triton kernels of the short convolution with SiLU (convolution_triton.py launches them).

A program has BT tokens and BC channels of a sequence. What it reads several times, the tokens around its own,
stays in its cache. `places` [T]: each token's place in its packed sequence; without packing a token's is t.

T tokens · C channels · W filter width · z what SiLU is given · weights are [W, …], rows w_w apart · others
have the strides given, those of y and dz end in C, 1, those of dx in 1
"""

import triton
import triton.language as tl


@triton.jit
def _tile(T, C, BT: tl.constexpr, BC: tl.constexpr):
    """A program's tokens [BT, 1] and channels [1, BC], and which of both there are."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)[:, None]
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    return t, c, (t < T) & (c < C)


@triton.jit
def _at(x, x_b, x_t, x_c, BT: tl.constexpr, BC: tl.constexpr):
    """Where a program's tile lies: its first element as a pointer, the others as offsets that fit 32 bits."""
    first = tl.program_id(0).to(tl.int64) * BT * x_t + tl.program_id(1).to(tl.int64) * BC * x_c
    x += tl.program_id(2).to(tl.int64) * x_b + first
    return x + tl.arange(0, BT)[:, None] * x_t + tl.arange(0, BC)[None, :] * x_c


@triton.jit
def _place(places, t, T, PACKED: tl.constexpr):
    return tl.load(places + t, mask=t < T, other=0) if PACKED else t


@triton.jit
def _weight(weight, lag, c, C, w_w, W: tl.constexpr):
    return tl.load(weight + (W - 1 - lag) * w_w + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _before(at, lag, place, there, x_t):
    """The tile of `lag` tokens before, 0 before the sequence."""
    return tl.load(at - lag * x_t, mask=there & (place >= lag), other=0.0).to(tl.float32)


@triton.jit
def _convolved(at, weight, bias, c, place, there, C, x_t, w_w, W: tl.constexpr, BIAS: tl.constexpr):
    """z_t = Σ_lag weight[W − 1 − lag] ⊙ x_{t − lag} + bias."""
    z = _weight(weight, 0, c, C, w_w, W) * _before(at, 0, place, there, x_t)
    for lag in tl.static_range(1, W):
        z += _weight(weight, lag, c, C, w_w, W) * _before(at, lag, place, there, x_t)
    if BIAS:
        z += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    return z


@triton.jit
def forward(
    x, weight, bias, places, y, T, C, x_b, x_t, x_c, w_w, y_b,
    W: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = silu(z)."""
    t, c, there = _tile(T, C, BT, BC)
    place = _place(places, t, T, PACKED)
    at = _at(x, x_b, x_t, x_c, BT, BC)
    z = _convolved(at, weight, bias, c, place, there, C, x_t, w_w, W, BIAS)
    tl.store(_at(y, y_b, C, 1, BT, BC), (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask=there)


@triton.jit
def backward_silu(
    x, weight, bias, places, dy, dz, sums, T, C, x_b, x_t, x_c, w_w, dy_b, dy_t, dy_c, dz_b, s_w,
    W: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dz = dy silu'(z), and a program's share of the gradients of weight and bias: sums [P, W + BIAS, …], its
    rows s_w apart."""
    t, c, there = _tile(T, C, BT, BC)
    place = _place(places, t, T, PACKED)
    at = _at(x, x_b, x_t, x_c, BT, BC)
    z = _convolved(at, weight, bias, c, place, there, C, x_t, w_w, W, BIAS)
    given = tl.load(_at(dy, dy_b, dy_t, dy_c, BT, BC), mask=there, other=0.0).to(tl.float32)
    rate = tl.sigmoid(z)
    slope = given * rate * (1 + z * (1 - rate))
    tl.store(_at(dz, dz_b, C, 1, BT, BC), slope.to(dz.dtype.element_ty), mask=there)
    program = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    sums += program * (W + BIAS) * s_w
    for lag in tl.static_range(W):
        dw = tl.sum(slope * _before(at, lag, place, there, x_t), 0, keep_dims=True)
        tl.store(sums + (W - 1 - lag) * s_w + c, dw, mask=c < C)
    if BIAS:
        tl.store(sums + W * s_w + c, tl.sum(slope, 0, keep_dims=True), mask=c < C)


@triton.jit
def backward_input(
    weight, places, dz, dx, T, C, w_w, dz_b, dx_b, dx_t,
    W: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx_t = Σ_ahead weight[W − 1 − ahead] ⊙ dz_{t + ahead}, of the tokens ahead in the same sequence."""
    t, c, there = _tile(T, C, BT, BC)
    at = _at(dz, dz_b, C, 1, BT, BC)
    total = tl.zeros([BT, BC], tl.float32)
    for ahead in tl.static_range(W):
        inside = there & (t + ahead < T) & (_place(places, t + ahead, T, PACKED) >= ahead)
        given = tl.load(at + ahead * C, mask=inside, other=0.0).to(tl.float32)
        total += _weight(weight, ahead, c, C, w_w, W) * given
    tl.store(_at(dx, dx_b, dx_t, 1, BT, BC), total.to(dx.dtype.element_ty), mask=there)
