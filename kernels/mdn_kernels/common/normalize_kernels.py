# mypy: ignore-errors
"""Triton kernels of the L2 norm (normalize_triton.py launches them).

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
def forward(x, y, r, x_b, x_t, x_h, x_k, H, T, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """y = r x with r = 1 / sqrt(|x|² + eps) [B, T, H]."""
    b, t, h, channel, there = _tile(H, T, K, BT, BK)
    row = (b * T + t) * H + h
    values = tl.load(x + b * x_b + t * x_t + h * x_h + channel * x_k, mask=there, other=0.0).to(tl.float32)
    rates = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) + EPS)
    tl.store(r + row, rates, mask=t < T)
    tl.store(y + row * K + channel, (values * rates).to(y.dtype.element_ty), mask=there)


@triton.jit
def backward(
    y, r, dy, dx, dy_b, dy_t, dy_h, dy_k, H, T, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """dx = r (dy − y (y · dy)), which holds with eps too."""
    b, t, h, channel, there = _tile(H, T, K, BT, BK)
    row = (b * T + t) * H + h
    values = tl.load(y + row * K + channel, mask=there, other=0.0).to(tl.float32)
    rates = tl.load(r + row, mask=t < T, other=0.0)
    given = tl.load(dy + b * dy_b + t * dy_t + h * dy_h + channel * dy_k, mask=there, other=0.0)
    given = given.to(tl.float32)
    along = tl.sum(values * given, 1, keep_dims=True)
    tl.store(dx + row * K + channel, (rates * (given - values * along)).to(dx.dtype.element_ty), mask=there)
