# mypy: ignore-errors
"""Triton kernels of the L2 norm, and of the output correction before it (normalize_triton.py launches them).

B batch · T tokens · H heads · K key channels; y, r and dx are contiguous, x and dy have the strides given.
"""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)  # of l2norm


@triton.jit
def _tile(H, T, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """A program's sequence, tokens [BT, 1], head and channels [1, BK], and which of them there are."""
    blocks = tl.cdiv(T, BT)
    b, h = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1).to(tl.int64)
    t = (tl.program_id(0) % blocks * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    channel = tl.arange(0, BK).to(tl.int64)[None, :]
    return b, t, h, channel, (t < T) & (channel < K)


@triton.jit
def _load(x, at, there):
    return tl.load(x + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _store(y, at, values, there):
    tl.store(y + at, values.to(y.dtype.element_ty), mask=there)


@triton.jit
def _rates(x):
    return tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + EPS)


@triton.jit
def _gradient(y, rates, dy):
    """dx = r (dy − y (y · dy)), which holds with eps too."""
    return rates * (dy - y * tl.sum(y * dy, 1, keep_dims=True))


@triton.jit
def forward(x, y, r, x_b, x_t, x_h, x_k, H, T, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """y = r x with r = 1 / sqrt(|x|² + eps) [B, T, H]."""
    b, t, h, channel, there = _tile(H, T, K, BT, BK)
    row = (b * T + t) * H + h
    values = _load(x, b * x_b + t * x_t + h * x_h + channel * x_k, there)
    rates = _rates(values)
    tl.store(r + row, rates, mask=t < T)
    _store(y, row * K + channel, values * rates, there)


@triton.jit
def backward(
    y, r, dy, dx, dy_b, dy_t, dy_h, dy_k, H, T, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    b, t, h, channel, there = _tile(H, T, K, BT, BK)
    row = (b * T + t) * H + h
    values = _load(y, row * K + channel, there)
    rates = tl.load(r + row, mask=t < T, other=0.0)
    given = _load(dy, b * dy_b + t * dy_t + h * dy_h + channel * dy_k, there)
    _store(dx, row * K + channel, _gradient(values, rates, given), there)


@triton.jit
def corrected_forward(
    q, k, d, y_q, y_k, r_q, r_k, q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, H, T,
    K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`forward` of q − d k and of k, with d [H] in float32."""
    b, t, h, channel, there = _tile(H, T, K, BT, BK)
    row = (b * T + t) * H + h
    keys = _load(k, b * k_b + t * k_t + h * k_h + channel * k_k, there)
    queries = _load(q, b * q_b + t * q_t + h * q_h + channel * q_k, there) - tl.load(d + h) * keys
    rates = _rates(keys)
    tl.store(r_k + row, rates, mask=t < T)
    _store(y_k, row * K + channel, keys * rates, there)
    rates = _rates(queries)
    tl.store(r_q + row, rates, mask=t < T)
    _store(y_q, row * K + channel, queries * rates, there)


@triton.jit
def corrected_backward(
    y_q, y_k, r_q, r_k, d, dy_q, dy_k, dq, dk, dd, q_b, q_t, q_h, q_k, k_b, k_t, k_h, k_k, H, T,
    K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dq = du, the gradient of u = q − d k; dk = that of l2norm(k) less d du; dd [programs, H] = −Σ du · k.

    That sum reads k as y_k / r_k, so that k need not be kept. It is as exact as du, which has y_q in it: both
    are rounded once. r_k, at most 1 / sqrt(eps), is 0 only where |k|² is infinite.
    """
    b, t, h, channel, there = _tile(H, T, K, BT, BK)
    row = (b * T + t) * H + h
    rates = tl.load(r_q + row, mask=t < T, other=0.0)
    given = _load(dy_q, b * q_b + t * q_t + h * q_h + channel * q_k, there)
    du = _gradient(_load(y_q, row * K + channel, there), rates, given)
    _store(dq, row * K + channel, du, there)
    keys = _load(y_k, row * K + channel, there)
    rates = tl.load(r_k + row, mask=t < T, other=1.0)
    along = tl.sum(du * keys, 1, keep_dims=True) / rates
    tl.store(dd + tl.program_id(0).to(tl.int64) * H + h, -tl.sum(along))
    given = _load(dy_k, b * k_b + t * k_t + h * k_h + channel * k_k, there)
    _store(dk, row * K + channel, _gradient(keys, rates, given) - tl.load(d + h) * du, there)
