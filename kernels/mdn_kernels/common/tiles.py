# mypy: ignore-errors
"""What the chunked delta rules in Triton share: tiles of tokens and states, decays, the triangular inverse.

C tokens of a chunk, rows i and r, columns j · K key · V value · H heads. Rows behind a sequence's end are
loaded as zeros, which is neutral: log gates of 0, no key, no step.
"""

import triton
import triton.language as tl

from mdn_kernels.common.chunk_tables import CHUNK

C = tl.constexpr(CHUNK)
BLOCK = tl.constexpr(16)  # of the triangular inverse


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
def segment_decay(log_gate, row, column):
    """L[i, r] = exp(Σ_{r<s≤i} log_gate_s), lower triangular; each segment is summed by itself."""
    terms = tl.where(row[:, None] > column[None, :], log_gate[:, None], 0.0)
    return tl.where(row[:, None] >= column[None, :], tl.exp(tl.cumsum(terms, 0)), 0.0)


@triton.jit
def segment_gradient(dL, L, row, column):
    """The gradient of log_gate_t through segment_decay: Σ dL[i, r] L[i, r] over i ≥ t > r."""
    crossing = tl.where(row[:, None] > column[None, :], dL * L, 0.0)
    later = tl.cumsum(crossing, 0, reverse=True)
    return tl.sum(tl.where(row[:, None] > column[None, :], later, 0.0), 1)


@triton.jit
def unit_lower_inverse(N, row, column, PRECISION: tl.constexpr):
    """(I + N)⁻¹ of a strictly lower triangular N [C, C].

    Rows are substituted inside the diagonal blocks, in all of them at once; then, with X the inverse of the
    diagonal blocks and E the rest of N, (I + N)⁻¹ = (I + X E)⁻¹ X, and the fourth power of X E is zero.
    """
    same = (row[:, None] // BLOCK) == (column[None, :] // BLOCK)
    identity = tl.where(row[:, None] == column[None, :], 1.0, 0.0)
    diagonal = tl.where(same, N, 0.0)
    X = identity
    for i in range(1, BLOCK):
        new = (row[:, None] % BLOCK) == i
        coefficient = tl.sum(tl.where(new, diagonal, 0.0), 0)
        known = tl.sum(coefficient[:, None] * X, 0)
        X = tl.where(new & same, identity - known[None, :], X)
    F = tl.dot(X, N - diagonal, input_precision=PRECISION)
    F2 = tl.dot(F, F, input_precision=PRECISION)
    return tl.dot(identity - F + F2 - tl.dot(F, F2, input_precision=PRECISION), X, input_precision=PRECISION)
