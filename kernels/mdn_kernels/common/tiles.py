# mypy: ignore-errors
"""What the chunked delta rules in Triton share: tiles of tokens and states, decays, the triangular inverse.

C tokens of a chunk, rows i and r, columns j · K key · V value · H heads. Rows behind a sequence's end are
loaded as zeros, which is neutral: log gates of 0, no key, no step.
"""

import triton
import triton.language as tl

from mdn_kernels.common.chunk_tables import CHUNK

C = tl.constexpr(CHUNK)
LEVELS = tl.constexpr(CHUNK.bit_length() - 1)


@triton.jit
def inside(column, columns: tl.constexpr):
    """Which columns of a block exist; known when compiled if its width, a power of two, divides them."""
    if (column.shape[0] - 1) & columns == 0:
        return tl.full(column.shape, True, tl.int1)
    return column < columns


@triton.jit
def load_tokens(x, column, rows, columns: tl.constexpr, stride: tl.constexpr):
    """x[row, column] [C, ·] of the tokens from x on, of which there are `rows`; zeros outside."""
    row = tl.arange(0, C)
    mask = (row < rows)[:, None] & inside(column, columns)[None, :]
    return tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_tokens(x, tile, column, rows, columns: tl.constexpr, stride: tl.constexpr):
    row = tl.arange(0, C)
    mask = (row < rows)[:, None] & inside(column, columns)[None, :]
    tl.store(x + row[:, None] * stride + column[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_state(x, channel, value, K: tl.constexpr, V: tl.constexpr):
    """x[channel, value] of a state [K, V]; zeros outside."""
    mask = inside(channel, K)[:, None] & inside(value, V)[None, :]
    return tl.load(x + channel[:, None] * V + value[None, :], mask=mask, other=0.0)


@triton.jit
def store_state(x, tile, channel, value, K: tl.constexpr, V: tl.constexpr):
    mask = inside(channel, K)[:, None] & inside(value, V)[None, :]
    tl.store(x + channel[:, None] * V + value[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(x, rows, stride: tl.constexpr = 1):
    """x[row] [C] of the tokens from x on, of which there are `rows`; zeros outside."""
    row = tl.arange(0, C)
    return tl.load(x + row * stride, mask=row < rows, other=0.0)


@triton.jit
def store_gate(x, values, rows, stride: tl.constexpr = 1):
    row = tl.arange(0, C)
    tl.store(x + row * stride, values, mask=row < rows)


@triton.jit
def pick(x, i: tl.constexpr, row):
    """x[i] of x [C]."""
    return tl.sum(tl.where(row == i, x, 0.0), 0)


@triton.jit
def first_column(x, column):
    return tl.sum(tl.where(column[None, :] == 0, x, 0.0), 1)


@triton.jit
def last_row(x, row):
    return tl.sum(tl.where(row[:, None] == C - 1, x, 0.0), 0)


@triton.jit
def as_first_column(x, column):
    """[C, C] with x [C] as its first column and zeros elsewhere."""
    return tl.where(column[None, :] == 0, x[:, None], 0.0)


@triton.jit
def running_sums(log_gate):
    """Σ_{s≤i} log₂ gate_s as two numbers: of multiples of 1/256, whose sums are exact, and of the small rest.

    So the difference of two of them keeps the digits of the segment between, however large both are. Gates
    below 2⁻²⁵⁶ count as 2⁻²⁵⁶, closed ones too: exp2 is 0 for all of them.
    """
    x = log_gate * 1.4426950408889634
    x = tl.where(x < -256.0, -256.0, x)
    coarse = tl.floor(x * 256.0 + 0.5) / 256.0
    return tl.cumsum(coarse, 0), tl.cumsum(x - coarse, 0)


@triton.jit
def segment_decay(coarse, fine, row, column):
    """L[i, r] = exp(Σ_{r<s≤i} log_gate_s), lower triangular, of the gates' running sums."""
    segment = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.where(row[:, None] >= column[None, :], tl.exp2(segment), 0.0)


@triton.jit
def segment_gradient(dL, L, row, column, PRECISION: tl.constexpr):
    """The gradient of log_gate_t through segment_decay: Σ dL[i, r] L[i, r] over i ≥ t > r."""
    crossing = tl.where(row[:, None] > column[None, :], dL * L, 0.0)
    later = tl.where(row[:, None] <= column[None, :], 1.0, 0.0)
    summed = tl.dot(later, crossing, input_precision=PRECISION)
    return tl.sum(tl.where(row[:, None] > column[None, :], summed, 0.0), 1)


@triton.jit
def unit_lower_inverse(N, row, column, PRECISION: tl.constexpr):
    """(I + N)⁻¹ of a strictly lower triangular N [C, C].

    X is the inverse of the blocks on the diagonal, from one to all rows. Two neighbours and what N has below
    the first, E, make a block of twice the size: [[A, 0], [E, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ E A⁻¹, B⁻¹]].
    """
    dtype: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16
    level = row[:, None] ^ column[None, :]
    X = tl.where(level == 0, 1.0, tl.where(level == 1, -N, 0.0))
    for doubling in tl.static_range(1, LEVELS):
        E = tl.where((level >> doubling) == 1, N, 0.0).to(dtype)
        EX = tl.dot(E, X.to(dtype), input_precision=PRECISION)
        X -= tl.dot(X.to(dtype), EX.to(dtype), input_precision=PRECISION)
    return X
