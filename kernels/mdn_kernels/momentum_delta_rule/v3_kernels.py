# mypy: ignore-errors
"""Triton kernels of v3_triton; README.md derives the forward, the comments below say what a backward line is.

C tokens of a chunk, rows i and r, columns j · K key · V value · H heads · tokens: all of a batch in one row.
Q, K, V, O are [tokens, H, ·] and gates [tokens, H]; what is formed for a chunk and head is [chunks, H, C, ·].
Rows behind a sequence's end are loaded as zeros, which is neutral: log gates of 0, no key, no step. What is
formed for a chunk is zero there too.

A program finds its chunk in three tables: `owner` [chunks], the sequence of a chunk (N: the chunk is not
used), `first` [N + 1], a sequence's first chunk, and `starts` [N + 1], its first token.
"""

import triton
import triton.language as tl

C = tl.constexpr(64)
BLOCK = tl.constexpr(16)  # of the triangular inverse

# Rows of `coefficients` [6, chunks, H, C] and `sums` [5, K blocks, chunks, H, C].
A, B, B_READ, TO_S, TO_M, U = (tl.constexpr(i) for i in range(6))
D_A, D_B, D_B_READ, D_TO_S, D_TO_M = (tl.constexpr(i) for i in range(5))


@triton.jit
def locate(chunk, owner, first, starts):
    """A chunk's first token, and how many tokens of its sequence there are from it on."""
    n = tl.load(owner + chunk)
    start = tl.load(starts + n) + (chunk - tl.load(first + n)) * C
    return start.to(tl.int64), tl.load(starts + n + 1) - start


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
def load_paired(x, channel, value, K: tl.constexpr, V: tl.constexpr, PAIRED: tl.constexpr):
    """load_state; PAIRED: 16 columns of S and the same 16 of M alternate in the rows [K, 2 V]."""
    if not PAIRED:
        return load_state(x, channel, value, K, V)
    column = value // 16 * 32 + value % 16
    mask = inside(channel, K)[:, None] & inside(value, V)[None, :]
    return tl.load(x + channel[:, None] * (2 * V) + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_state(x, tile, channel, value, K: tl.constexpr, V: tl.constexpr):
    mask = inside(channel, K)[:, None] & inside(value, V)[None, :]
    tl.store(x + channel[:, None] * V + value[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(x, rows, H: tl.constexpr):
    """x[row] [C] of the tokens from x on, of which there are `rows`; zeros outside."""
    row = tl.arange(0, C)
    return tl.load(x + row * H, mask=row < rows, other=0.0)


@triton.jit
def store_gate(x, values, rows, H: tl.constexpr):
    row = tl.arange(0, C)
    tl.store(x + row * H, values, mask=row < rows)


@triton.jit
def load_row(x):
    """One number a row of a chunk: x [C]."""
    return tl.load(x + tl.arange(0, C))


@triton.jit
def store_row(x, values):
    tl.store(x + tl.arange(0, C), values)


@triton.jit
def load_square(x):
    """x [C, C] of a chunk."""
    return tl.load(x + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])


@triton.jit
def store_square(x, tile):
    tl.store(x + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :], tile.to(x.dtype.element_ty))


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


@triton.jit(do_not_specialize=["N"])
def prepare(
    q, k, log_alpha, beta, log_mu, eta,
    inverse, scores, coefficients,
    owner, first, starts, N, scale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: T⁻¹, (Q Kᵀ) ⊙ Γ ⊙ η, and the coefficients a, b, b', g = Γ_C ⊙ η, m, u."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    if tl.load(owner + chunk) >= N:
        return
    start, rows = locate(chunk, owner, first, starts)
    row, column = tl.arange(0, C), tl.arange(0, C)
    at_gate, at_chunk = start * H + h, chunk.to(tl.int64) * H + h
    at_K, square = at_gate * K, at_chunk * C * C
    log_alpha_i = load_gate(log_alpha + at_gate, rows, H)
    log_mu_i = load_gate(log_mu + at_gate, rows, H)
    beta_i = load_gate(beta + at_gate, rows, H)
    eta_j = load_gate(eta + at_gate, rows, H)

    KK = tl.zeros((C, C), tl.float32)
    QK = tl.zeros((C, C), tl.float32)
    for k0 in range(0, K, BK):
        channel = k0 + tl.arange(0, BK)
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        KK = tl.dot(k_i, tl.trans(k_i), KK, input_precision=PRECISION)
        QK = tl.dot(q_i, tl.trans(k_i), QK, input_precision=PRECISION)

    L_alpha = segment_decay(log_alpha_i, row, column)
    L_mu = segment_decay(log_mu_i, row, column)
    later = tl.where(row[:, None] > column[None, :], L_alpha, 0.0)
    written = beta_i[:, None] * L_mu
    gamma_read = tl.dot(later, written, input_precision=PRECISION)
    gamma = gamma_read + written
    a, u = tl.exp(tl.cumsum(log_alpha_i, 0)), tl.exp(tl.cumsum(log_mu_i, 0))
    beta_u = beta_i * u
    b_read = tl.sum(later * beta_u[None, :], 1)
    to_S = tl.sum(tl.where(row[:, None] == C - 1, gamma, 0.0), 0) * eta_j
    to_M = tl.sum(tl.where(row[:, None] == C - 1, L_mu, 0.0), 0) * eta_j

    exists = row < rows
    at = coefficients + at_chunk * C
    plane = tl.num_programs(0).to(tl.int64) * H * C
    store_row(at + A * plane, tl.where(exists, a, 0.0))
    store_row(at + B * plane, tl.where(exists, b_read + beta_u, 0.0))
    store_row(at + B_READ * plane, tl.where(exists, b_read, 0.0))
    store_row(at + TO_S * plane, to_S)
    store_row(at + TO_M * plane, to_M)
    store_row(at + U * plane, u)

    store_square(scores + square, scale * QK * gamma * eta_j[None, :])
    T_inverse = unit_lower_inverse(KK * gamma_read * eta_j[None, :], row, column, PRECISION)
    store_square(inverse + square, tl.where(exists[:, None], T_inverse, 0.0))


@triton.jit(do_not_specialize=["chunks"])
def scan(
    k, v, inverse, coefficients, residual,
    initial_S, initial_M, states_S, states_M, final_S, final_M,
    first, starts, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SOLVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries S and M over a sequence's chunks and stores them as they are before each chunk.

    SOLVE: the residuals Ṽ = T⁻¹ (V − a ⊙ K S + b' ⊙ K M) are computed and stored; else they are read.
    """
    block, n, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    start, length = tl.load(starts + n).to(tl.int64), tl.load(starts + n + 1) - tl.load(starts + n)
    chunk = tl.load(first + n).to(tl.int64)
    channel, value = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    own = (n.to(tl.int64) * H + h) * K * V
    S = tl.zeros((BK, BV), tl.float32)
    M = tl.zeros((BK, BV), tl.float32)
    if initial_S is not None:
        S = load_state(initial_S + own, channel, value, K, V)
        M = load_state(initial_M + own, channel, value, K, V)
    plane = chunks.to(tl.int64) * H * C
    dtype = k.dtype.element_ty
    for i in range(tl.cdiv(length, C)):
        if states_S is not None:
            state = ((chunk + i) * H + h) * K * V
            store_state(states_S + state, S, channel, value, K, V)
            store_state(states_M + state, M, channel, value, K, V)
        token, rows = start + i * C, length - i * C
        at_K, at_V = (token * H + h) * K, (token * H + h) * V
        at_chunk = (chunk + i) * H + h
        square, at = at_chunk * C * C, coefficients + at_chunk * C
        last = at + tl.minimum(rows, C) - 1
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        if SOLVE:
            a = load_row(at + A * plane)
            b_read = load_row(at + B_READ * plane)
            T_inverse = load_square(inverse + square)
            v_i = load_tokens(v + at_V, value, rows, V, H * V).to(tl.float32)
            KS = tl.dot(k_i, S.to(dtype), input_precision=PRECISION)
            KM = tl.dot(k_i, M.to(dtype), input_precision=PRECISION)
            R = v_i - a[:, None] * KS + b_read[:, None] * KM
            x = tl.dot(T_inverse, R.to(dtype), input_precision=PRECISION)
            store_tokens(residual + at_V, x, value, rows, V, H * V)
        else:
            x = load_tokens(residual + at_V, value, rows, V, H * V).to(tl.float32)
        to_S = load_row(at + TO_S * plane)
        to_M = load_row(at + TO_M * plane)
        S = tl.load(last + A * plane) * S - tl.load(last + B * plane) * M
        S = tl.dot(tl.trans(k_i), (to_S[:, None] * x).to(dtype), S, input_precision=PRECISION)
        M = tl.load(last + U * plane) * M
        M = tl.dot(tl.trans(k_i), (-to_M[:, None] * x).to(dtype), M, input_precision=PRECISION)
    if final_S is not None:
        store_state(final_S + own, S, channel, value, K, V)
        store_state(final_M + own, M, channel, value, K, V)


@triton.jit(do_not_specialize=["N"])
def output(
    q, scores, coefficients, residual, states_S, states_M, o,
    owner, first, starts, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """O = a ⊙ Q S − b ⊙ Q M + [(Q Kᵀ) ⊙ Γ ⊙ η] Ṽ."""
    block, chunk, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(owner + chunk) >= N:
        return
    start, rows = locate(chunk, owner, first, starts)
    at_K, at_V, at_chunk = (start * H + h) * K, (start * H + h) * V, chunk.to(tl.int64) * H + h
    value = block * BV + tl.arange(0, BV)
    state, square = at_chunk * K * V, at_chunk * C * C
    QS = tl.zeros((C, BV), tl.float32)
    QM = tl.zeros((C, BV), tl.float32)
    for k0 in range(0, K, BK):
        channel = k0 + tl.arange(0, BK)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        QS = tl.dot(q_i, load_state(states_S + state, channel, value, K, V), QS, input_precision=PRECISION)
        QM = tl.dot(q_i, load_state(states_M + state, channel, value, K, V), QM, input_precision=PRECISION)
    at = coefficients + at_chunk * C
    plane = tl.num_programs(1).to(tl.int64) * H * C
    a = load_row(at + A * plane)
    b = load_row(at + B * plane)
    scores_ij = load_square(scores + square)
    x = load_tokens(residual + at_V, value, rows, V, H * V)
    o_i = scale * (a[:, None] * QS - b[:, None] * QM)
    o_i = tl.dot(scores_ij, x, o_i, input_precision=PRECISION)
    store_tokens(o + at_V, o_i, value, rows, V, H * V)


@triton.jit(do_not_specialize=["chunks"])
def reverse_scan(
    q, k, do, inverse, scores, coefficients, dr,
    final_dS, final_dM, states_dS, states_dM, initial_dS, initial_dM,
    first, starts, chunks, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries dS and dM backwards over a sequence's chunks; stores them as they are after each chunk, and dR.

    dR = T⁻ᵀ dṼ is the gradient of V too.
    """
    block, n, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    start, length = tl.load(starts + n).to(tl.int64), tl.load(starts + n + 1) - tl.load(starts + n)
    chunk = tl.load(first + n).to(tl.int64)
    channel, value = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    own = (n.to(tl.int64) * H + h) * K * V
    dS = tl.zeros((BK, BV), tl.float32)
    dM = tl.zeros((BK, BV), tl.float32)
    if final_dS is not None:
        dS = load_state(final_dS + own, channel, value, K, V)
        dM = load_state(final_dM + own, channel, value, K, V)
    plane = chunks.to(tl.int64) * H * C
    dtype = k.dtype.element_ty
    count = tl.cdiv(length, C)
    for done in range(count):
        i = count - 1 - done
        state = ((chunk + i) * H + h) * K * V
        store_state(states_dS + state, dS, channel, value, K, V)
        store_state(states_dM + state, dM, channel, value, K, V)
        token, rows = start + i * C, length - i * C
        at_K, at_V = (token * H + h) * K, (token * H + h) * V
        at_chunk = (chunk + i) * H + h
        square, at = at_chunk * C * C, coefficients + at_chunk * C
        last = at + tl.minimum(rows, C) - 1
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        do_i = load_tokens(do + at_V, value, rows, V, H * V)
        scores_ij = load_square(scores + square)
        T_inverse = load_square(inverse + square)
        a = load_row(at + A * plane)
        b = load_row(at + B * plane)
        b_read = load_row(at + B_READ * plane)
        to_S = load_row(at + TO_S * plane)
        to_M = load_row(at + TO_M * plane)

        KdS = tl.dot(k_i, dS.to(dtype), input_precision=PRECISION)
        KdM = tl.dot(k_i, dM.to(dtype), input_precision=PRECISION)
        dx = to_S[:, None] * KdS - to_M[:, None] * KdM
        dx = tl.dot(tl.trans(scores_ij), do_i, dx, input_precision=PRECISION)
        dr_i = tl.dot(tl.trans(T_inverse), dx.to(dtype), input_precision=PRECISION)
        store_tokens(dr + at_V, dr_i, value, rows, V, H * V)

        do_i = scale * do_i.to(tl.float32)
        dM = tl.load(last + U * plane) * dM - tl.load(last + B * plane) * dS
        dM = tl.dot(tl.trans(q_i), (-b[:, None] * do_i).to(dtype), dM, input_precision=PRECISION)
        dM = tl.dot(tl.trans(k_i), (b_read[:, None] * dr_i).to(dtype), dM, input_precision=PRECISION)
        dS = tl.load(last + A * plane) * dS
        dS = tl.dot(tl.trans(q_i), (a[:, None] * do_i).to(dtype), dS, input_precision=PRECISION)
        dS = tl.dot(tl.trans(k_i), (-a[:, None] * dr_i).to(dtype), dS, input_precision=PRECISION)
    if initial_dS is not None:
        store_state(initial_dS + own, dS, channel, value, K, V)
        store_state(initial_dM + own, dM, channel, value, K, V)


@triton.jit(do_not_specialize=["N"])
def outer_backward(
    q, k, do, dr, residual, coefficients,
    states_S, states_M, states_dS, states_dM,
    dq, dk, sums, inner,
    owner, first, starts, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PAIRED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What dQ, dK and the coefficients get from the states before (S, M) and after (dS, dM) the chunk.

    sums [5, K blocks, chunks, H, C]: gradients of a, b and b', and the row sums of K ⊙ Ṽ dSᵀ and K ⊙ Ṽ dMᵀ.
    inner [3, K blocks, chunks, H]: ⟨dS, S⟩, ⟨dS, M⟩ and ⟨dM, M⟩.
    """
    block, chunk, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(owner + chunk) >= N:
        return
    start, rows = locate(chunk, owner, first, starts)
    at_K, at_V = (start * H + h) * K, (start * H + h) * V
    channel = block * BK + tl.arange(0, BK)
    state = (chunk.to(tl.int64) * H + h) * K * V * (2 if PAIRED else 1)
    doS = tl.zeros((C, BK), tl.float32)
    doM = tl.zeros((C, BK), tl.float32)
    drS = tl.zeros((C, BK), tl.float32)
    drM = tl.zeros((C, BK), tl.float32)
    xdS = tl.zeros((C, BK), tl.float32)
    xdM = tl.zeros((C, BK), tl.float32)
    dS_S = tl.zeros((BK,), tl.float32)
    dS_M = tl.zeros((BK,), tl.float32)
    dM_M = tl.zeros((BK,), tl.float32)
    for v0 in range(0, V, BV):
        value = v0 + tl.arange(0, BV)
        do_i = load_tokens(do + at_V, value, rows, V, H * V)
        dr_i = load_tokens(dr + at_V, value, rows, V, H * V)
        x_i = load_tokens(residual + at_V, value, rows, V, H * V)
        S = load_paired(states_S + state, channel, value, K, V, PAIRED)
        M = load_paired(states_M + state, channel, value, K, V, PAIRED)
        dS = load_paired(states_dS + state, channel, value, K, V, PAIRED)
        dM = load_paired(states_dM + state, channel, value, K, V, PAIRED)
        doS = tl.dot(do_i, tl.trans(S), doS, input_precision=PRECISION)
        doM = tl.dot(do_i, tl.trans(M), doM, input_precision=PRECISION)
        drS = tl.dot(dr_i, tl.trans(S), drS, input_precision=PRECISION)
        drM = tl.dot(dr_i, tl.trans(M), drM, input_precision=PRECISION)
        xdS = tl.dot(x_i, tl.trans(dS), xdS, input_precision=PRECISION)
        xdM = tl.dot(x_i, tl.trans(dM), xdM, input_precision=PRECISION)
        dS_S += tl.sum(dS.to(tl.float32) * S.to(tl.float32), 1)
        dS_M += tl.sum(dS.to(tl.float32) * M.to(tl.float32), 1)
        dM_M += tl.sum(dM.to(tl.float32) * M.to(tl.float32), 1)

    chunks, at_chunk = tl.num_programs(1).to(tl.int64), chunk.to(tl.int64) * H + h
    at = coefficients + at_chunk * C
    plane = chunks * H * C
    a = load_row(at + A * plane)[:, None]
    b = load_row(at + B * plane)[:, None]
    b_read = load_row(at + B_READ * plane)[:, None]
    to_S = load_row(at + TO_S * plane)[:, None]
    to_M = load_row(at + TO_M * plane)[:, None]
    q_i = load_tokens(q + at_K, channel, rows, K, H * K).to(tl.float32)
    k_i = load_tokens(k + at_K, channel, rows, K, H * K).to(tl.float32)
    store_tokens(dq + at_K, scale * (a * doS - b * doM), channel, rows, K, H * K)
    dk_i = -a * drS + b_read * drM + to_S * xdS - to_M * xdM
    store_tokens(dk + at_K, dk_i, channel, rows, K, H * K)

    blocks = tl.num_programs(0)
    at = sums + (block * chunks * H + at_chunk) * C
    plane = blocks * chunks * H * C
    store_row(at + D_A * plane, tl.sum(scale * q_i * doS - k_i * drS, 1))
    store_row(at + D_B * plane, tl.sum(-scale * q_i * doM, 1))
    store_row(at + D_B_READ * plane, tl.sum(k_i * drM, 1))
    store_row(at + D_TO_S * plane, tl.sum(k_i * xdS, 1))
    store_row(at + D_TO_M * plane, tl.sum(k_i * xdM, 1))
    at = inner + block * chunks * H + at_chunk
    tl.store(at, tl.sum(dS_S, 0))
    tl.store(at + blocks * chunks * H, tl.sum(dS_M, 0))
    tl.store(at + 2 * blocks * chunks * H, tl.sum(dM_M, 0))


@triton.jit(do_not_specialize=["N"])
def inner_backward(
    q, k, log_alpha, beta, log_mu, eta, do, dr, residual, sums, inner,
    dq_outer, dk_outer,
    dq, dk, dlog_alpha, dbeta, dlog_mu, deta,
    owner, first, starts, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Inside the chunk: completes dQ and dK, and the gates' gradients. BLOCKS: K blocks of sums and inner."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    if tl.load(owner + chunk) >= N:
        return
    start, rows = locate(chunk, owner, first, starts)
    row, column = tl.arange(0, C), tl.arange(0, C)
    at_gate = start * H + h
    at_K, at_V = at_gate * K, at_gate * V
    log_alpha_i = load_gate(log_alpha + at_gate, rows, H)
    log_mu_i = load_gate(log_mu + at_gate, rows, H)
    beta_i = load_gate(beta + at_gate, rows, H)
    eta_j = load_gate(eta + at_gate, rows, H)
    lower = row[:, None] >= column[None, :]
    strict = row[:, None] > column[None, :]
    at_end = row[:, None] == C - 1

    L_alpha = segment_decay(log_alpha_i, row, column)
    L_mu = segment_decay(log_mu_i, row, column)
    later = tl.where(strict, L_alpha, 0.0)
    written = beta_i[:, None] * L_mu
    gamma_read = tl.dot(later, written, input_precision=PRECISION)
    gamma = gamma_read + written

    # X and Y: gradients of (Q Kᵀ) ⊙ Γ ⊙ η and of T.
    X = tl.zeros((C, C), tl.float32)
    Y = tl.zeros((C, C), tl.float32)
    for v0 in range(0, V, BV):
        value = v0 + tl.arange(0, BV)
        do_i = load_tokens(do + at_V, value, rows, V, H * V)
        dr_i = load_tokens(dr + at_V, value, rows, V, H * V)
        x_i = load_tokens(residual + at_V, value, rows, V, H * V)
        X = tl.dot(do_i, tl.trans(x_i), X, input_precision=PRECISION)
        Y = tl.dot(dr_i, tl.trans(x_i), Y, input_precision=PRECISION)
    X = tl.where(lower, scale * X, 0.0)
    Y = tl.where(strict, -Y, 0.0)

    dtype = k.dtype.element_ty
    dQK = (X * gamma * eta_j[None, :]).to(dtype)
    dKK = Y * gamma_read * eta_j[None, :]
    dKK = (dKK + tl.trans(dKK)).to(dtype)
    QK = tl.zeros((C, C), tl.float32)
    KK = tl.zeros((C, C), tl.float32)
    for k0 in range(0, K, BK):
        channel = k0 + tl.arange(0, BK)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        QK = tl.dot(q_i, tl.trans(k_i), QK, input_precision=PRECISION)
        KK = tl.dot(k_i, tl.trans(k_i), KK, input_precision=PRECISION)
        dq_i = load_tokens(dq_outer + at_K, channel, rows, K, H * K)
        dq_i = tl.dot(dQK, k_i, dq_i, input_precision=PRECISION)
        store_tokens(dq + at_K, dq_i, channel, rows, K, H * K)
        dk_i = load_tokens(dk_outer + at_K, channel, rows, K, H * K)
        dk_i = tl.dot(tl.trans(dQK), q_i, dk_i, input_precision=PRECISION)
        dk_i = tl.dot(dKK, k_i, dk_i, input_precision=PRECISION)
        store_tokens(dk + at_K, dk_i, channel, rows, K, H * K)

    da = tl.zeros((C,), tl.float32)
    db = tl.zeros((C,), tl.float32)
    db_read = tl.zeros((C,), tl.float32)
    dto_S = tl.zeros((C,), tl.float32)
    dto_M = tl.zeros((C,), tl.float32)
    dS_S = 0.0
    dS_M = 0.0
    dM_M = 0.0
    chunks, at_chunk = tl.num_programs(0).to(tl.int64), chunk.to(tl.int64) * H + h
    plane = BLOCKS * chunks * H * C
    for block in range(BLOCKS):
        at = sums + (block * chunks * H + at_chunk) * C
        da += load_row(at + D_A * plane)
        db += load_row(at + D_B * plane)
        db_read += load_row(at + D_B_READ * plane)
        dto_S += load_row(at + D_TO_S * plane)
        dto_M += load_row(at + D_TO_M * plane)
        at = inner + block * chunks * H + at_chunk
        dS_S += tl.load(at)
        dS_M += tl.load(at + BLOCKS * chunks * H)
        dM_M += tl.load(at + 2 * BLOCKS * chunks * H)
    da += tl.where(row == C - 1, dS_S, 0.0)
    db -= tl.where(row == C - 1, dS_M, 0.0)

    # Γ, Γ' and the last rows of Γ and L_μ, by which the residuals enter the states.
    X = X * QK
    Y = Y * KK
    end_S = tl.where(at_end, dto_S[None, :], 0.0)
    end_M = tl.where(at_end, -dto_M[None, :], 0.0)
    deta_j = tl.sum((X + end_S) * gamma + Y * gamma_read + end_M * L_mu, 0)
    dgamma = (X + end_S) * eta_j[None, :]
    dboth = dgamma + Y * eta_j[None, :]

    # Γ' = (L_α − I) B, Γ = Γ' + B, B = diag(β) L_μ; b' = (L_α − I) (β ⊙ u), b = b' + β ⊙ u.
    a, u = tl.exp(tl.cumsum(log_alpha_i, 0)), tl.exp(tl.cumsum(log_mu_i, 0))
    db_all = db + db_read
    dL_alpha = tl.dot(dboth, tl.trans(written), input_precision=PRECISION)
    dL_alpha += db_all[:, None] * (beta_i * u)[None, :]
    dwritten = tl.dot(tl.trans(later), dboth, dgamma, input_precision=PRECISION)
    dbeta_u = tl.sum(later * db_all[:, None], 0) + db
    dbeta_i = dbeta_u * u + tl.sum(dwritten * L_mu, 1)
    dL_mu = beta_i[:, None] * dwritten + end_M * eta_j[None, :]
    du = dbeta_u * beta_i + tl.where(row == C - 1, dM_M, 0.0)

    dlog_alpha_i = segment_gradient(dL_alpha, L_alpha, row, column) + tl.cumsum(da * a, 0, reverse=True)
    dlog_mu_i = segment_gradient(dL_mu, L_mu, row, column) + tl.cumsum(du * u, 0, reverse=True)
    store_gate(dlog_alpha + at_gate, dlog_alpha_i, rows, H)
    store_gate(dbeta + at_gate, dbeta_i, rows, H)
    store_gate(dlog_mu + at_gate, dlog_mu_i, rows, H)
    store_gate(deta + at_gate, deta_j, rows, H)
