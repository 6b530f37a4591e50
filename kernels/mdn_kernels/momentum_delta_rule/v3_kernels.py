# mypy: ignore-errors
"""Triton kernels of v3_triton; README.md derives the forward, the comments below say what a backward line is.

C tokens of a chunk, rows i and r, columns j · K key · V value · H heads · tokens: all of a batch in one row.
Q, K, V, O are [tokens, H, ·] and gates [tokens, H]; what is formed for a chunk and head is [chunks, H, C, ·].
Rows behind a sequence's end are loaded as zeros, which is neutral: log gates of 0, no key, no step. What is
formed for a chunk is zero there too.

The backward goes through long sequences in spans, last one first, so that chunk states exist for one span at
a time, in `slots`. Tables say where a span is (chunked.Chunks): `owner` [slots], the sequence of a slot (N:
the slot is not used); `slots`, `first`, `begin`, `end` [N], of each sequence its first slot, its first chunk
among those of all spans, its first token, and the token behind its last.
"""

import triton
import triton.language as tl

from mdn_kernels.common.tiles import (
    C,
    as_first_column,
    first_column,
    last_row,
    load_gate,
    load_state,
    load_tokens,
    pick,
    running_sums,
    segment_decay,
    segment_gradient,
    store_gate,
    store_state,
    store_tokens,
    unit_lower_inverse,
)

# Rows of `coefficients` [chunks, H, 6, C] and `sums` [slots, H, K blocks, 5, C].
A, B, B_READ, TO_S, TO_M, U = (tl.constexpr(i) for i in range(6))
D_A, D_B, D_B_READ, D_TO_S, D_TO_M = (tl.constexpr(i) for i in range(5))


@triton.jit
def locate(slot, owner, slots, first, begin, end):
    """A slot's first token, how many tokens of its span there are from it on, and its chunk."""
    n = tl.load(owner + slot)
    i = slot - tl.load(slots + n)
    start = tl.load(begin + n) + i * C
    return start.to(tl.int64), tl.load(end + n) - start, (tl.load(first + n) + i).to(tl.int64)


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
def decays(log_alpha, beta, log_mu, rows, row, column, H: tl.constexpr, PRECISION: tl.constexpr):
    """Of the tokens that the gates' pointers are at: a, u, L_α, L_α − I, L_μ, B = diag(β) L_μ and Γ'."""
    alpha_sum, alpha_rest = running_sums(load_gate(log_alpha, rows, H))
    mu_sum, mu_rest = running_sums(load_gate(log_mu, rows, H))
    L_alpha = segment_decay(alpha_sum, alpha_rest, row, column)
    L_mu = segment_decay(mu_sum, mu_rest, row, column)
    written = load_gate(beta, rows, H)[:, None] * L_mu
    later = tl.where(row[:, None] > column[None, :], L_alpha, 0.0)
    gamma_read = tl.dot(later, written, input_precision=PRECISION)
    a, u = tl.exp2(alpha_sum + alpha_rest), tl.exp2(mu_sum + mu_rest)
    return a, u, L_alpha, later, L_mu, written, gamma_read


@triton.jit(do_not_specialize=["N"])
def prepare(
    q, k, log_alpha, beta, log_mu, eta,
    inverse, scores, coefficients,
    owner, slots, first, begin, end, N, scale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: T⁻¹, (Q Kᵀ) ⊙ Γ ⊙ η, and the coefficients a, b, b', g = Γ_C ⊙ η, m, u."""
    slot, h = tl.program_id(0), tl.program_id(1)
    if tl.load(owner + slot) >= N:
        return
    start, rows, chunk = locate(slot, owner, slots, first, begin, end)
    row, column = tl.arange(0, C), tl.arange(0, C)
    at_gate, at_chunk = start * H + h, chunk * H + h
    at_K, square = at_gate * K, at_chunk * C * C
    beta_i = load_gate(beta + at_gate, rows, H)
    eta_j = load_gate(eta + at_gate, rows, H)

    a, u, _, _, L_mu, written, gamma_read = decays(
        log_alpha + at_gate, beta + at_gate, log_mu + at_gate, rows, row, column, H, PRECISION
    )
    gamma = gamma_read + written
    b_read = pick(u, 0, row) * first_column(gamma_read, column)  # as u = μ_0 L_μ[:, 0]

    exists = row < rows
    into = coefficients + at_chunk * 6 * C
    store_row(into + A * C, tl.where(exists, a, 0.0))
    store_row(into + B * C, tl.where(exists, b_read + beta_i * u, 0.0))
    store_row(into + B_READ * C, tl.where(exists, b_read, 0.0))
    store_row(into + TO_S * C, last_row(gamma, row) * eta_j)
    store_row(into + TO_M * C, last_row(L_mu, row) * eta_j)
    store_row(into + U * C, u)

    KK = tl.zeros((C, C), tl.float32)
    QK = tl.zeros((C, C), tl.float32)
    for k0 in range(0, K, BK):
        channel = k0 + tl.arange(0, BK)
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        KK = tl.dot(k_i, tl.trans(k_i), KK, input_precision=PRECISION)
        QK = tl.dot(q_i, tl.trans(k_i), QK, input_precision=PRECISION)
    store_square(scores + square, scale * QK * gamma * eta_j[None, :])
    T_inverse = unit_lower_inverse(KK * gamma_read * eta_j[None, :], row, column, PRECISION)
    store_square(inverse + square, tl.where(exists[:, None], T_inverse, 0.0))


@triton.jit(do_not_specialize=["span"])
def scan(
    k, v, inverse, coefficients, residual,
    initial_S, initial_M, states_S, states_M, final_S, final_M,
    marks_S, marks_M, span, slots, first, begin, end,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SOLVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries S and M over a sequence's chunks and stores them as they are before each chunk, in `marks`
    [spans − 1, N, H, K, V] before each span but the first.

    SOLVE: the residuals Ṽ = T⁻¹ (V − a ⊙ K S + b' ⊙ K M) are computed and stored; else they are read.
    """
    block, n, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    start, length = tl.load(begin + n).to(tl.int64), tl.load(end + n) - tl.load(begin + n)
    chunk, slot = tl.load(first + n).to(tl.int64), tl.load(slots + n).to(tl.int64)
    channel, value = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    own = (n.to(tl.int64) * H + h) * K * V
    S = tl.zeros((BK, BV), tl.float32)
    M = tl.zeros((BK, BV), tl.float32)
    if initial_S is not None:
        S = load_state(initial_S + own, channel, value, K, V)
        M = load_state(initial_M + own, channel, value, K, V)
    dtype = k.dtype.element_ty
    for i in range(tl.cdiv(length, C)):
        if (i > 0) & (i % span == 0):
            mark = (i // span - 1) * tl.num_programs(1).to(tl.int64) * K * V + own
            store_state(marks_S + mark, S, channel, value, K, V)
            store_state(marks_M + mark, M, channel, value, K, V)
        if states_S is not None:
            state = ((slot + i) * H + h) * K * V
            store_state(states_S + state, S, channel, value, K, V)
            store_state(states_M + state, M, channel, value, K, V)
        token, rows = start + i * C, length - i * C
        at_K, at_V = (token * H + h) * K, (token * H + h) * V
        at_chunk = (chunk + i) * H + h
        square, at = at_chunk * C * C, coefficients + at_chunk * 6 * C
        last = at + tl.minimum(rows, C) - 1
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        if SOLVE:
            a = load_row(at + A * C)
            b_read = load_row(at + B_READ * C)
            T_inverse = load_square(inverse + square)
            v_i = load_tokens(v + at_V, value, rows, V, H * V).to(tl.float32)
            KS = tl.dot(k_i, S.to(dtype), input_precision=PRECISION)
            KM = tl.dot(k_i, M.to(dtype), input_precision=PRECISION)
            R = v_i - a[:, None] * KS + b_read[:, None] * KM
            x = tl.dot(T_inverse, R.to(dtype), input_precision=PRECISION)
            store_tokens(residual + at_V, x, value, rows, V, H * V)
        else:
            x = load_tokens(residual + at_V, value, rows, V, H * V).to(tl.float32)
        to_S = load_row(at + TO_S * C)
        to_M = load_row(at + TO_M * C)
        S = tl.load(last + A * C) * S - tl.load(last + B * C) * M
        S = tl.dot(tl.trans(k_i), (to_S[:, None] * x).to(dtype), S, input_precision=PRECISION)
        M = tl.load(last + U * C) * M
        M = tl.dot(tl.trans(k_i), (-to_M[:, None] * x).to(dtype), M, input_precision=PRECISION)
    if final_S is not None:
        store_state(final_S + own, S, channel, value, K, V)
        store_state(final_M + own, M, channel, value, K, V)


@triton.jit(do_not_specialize=["N"])
def output(
    q, scores, coefficients, residual, states_S, states_M, o,
    owner, slots, first, begin, end, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """O = a ⊙ Q S − b ⊙ Q M + [(Q Kᵀ) ⊙ Γ ⊙ η] Ṽ."""
    block, slot, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(owner + slot) >= N:
        return
    start, rows, chunk = locate(slot, owner, slots, first, begin, end)
    at_K, at_V, at_chunk = (start * H + h) * K, (start * H + h) * V, chunk * H + h
    value = block * BV + tl.arange(0, BV)
    state, square = (slot.to(tl.int64) * H + h) * K * V, at_chunk * C * C
    QS = tl.zeros((C, BV), tl.float32)
    QM = tl.zeros((C, BV), tl.float32)
    for k0 in range(0, K, BK):
        channel = k0 + tl.arange(0, BK)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        QS = tl.dot(q_i, load_state(states_S + state, channel, value, K, V), QS, input_precision=PRECISION)
        QM = tl.dot(q_i, load_state(states_M + state, channel, value, K, V), QM, input_precision=PRECISION)
    at = coefficients + at_chunk * 6 * C
    a = load_row(at + A * C)
    b = load_row(at + B * C)
    scores_ij = load_square(scores + square)
    x = load_tokens(residual + at_V, value, rows, V, H * V)
    o_i = scale * (a[:, None] * QS - b[:, None] * QM)
    o_i = tl.dot(scores_ij, x, o_i, input_precision=PRECISION)
    store_tokens(o + at_V, o_i, value, rows, V, H * V)


@triton.jit
def reverse_scan(
    q, k, do, inverse, scores, coefficients, dr,
    final_dS, final_dM, states_dS, states_dM, initial_dS, initial_dM,
    slots, first, begin, end, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries dS and dM backwards over a sequence's chunks; stores them as they are after each chunk, and dR.

    dR = T⁻ᵀ dṼ is the gradient of V too.
    """
    block, n, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    start, length = tl.load(begin + n).to(tl.int64), tl.load(end + n) - tl.load(begin + n)
    chunk, slot = tl.load(first + n).to(tl.int64), tl.load(slots + n).to(tl.int64)
    channel, value = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    own = (n.to(tl.int64) * H + h) * K * V
    dS = tl.zeros((BK, BV), tl.float32)
    dM = tl.zeros((BK, BV), tl.float32)
    if final_dS is not None:
        dS = load_state(final_dS + own, channel, value, K, V)
        dM = load_state(final_dM + own, channel, value, K, V)
    dtype = k.dtype.element_ty
    count = tl.cdiv(length, C)
    for done in range(count):
        i = count - 1 - done
        state = ((slot + i) * H + h) * K * V
        store_state(states_dS + state, dS, channel, value, K, V)
        store_state(states_dM + state, dM, channel, value, K, V)
        token, rows = start + i * C, length - i * C
        at_K, at_V = (token * H + h) * K, (token * H + h) * V
        at_chunk = (chunk + i) * H + h
        square, at = at_chunk * C * C, coefficients + at_chunk * 6 * C
        last = at + tl.minimum(rows, C) - 1
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        do_i = load_tokens(do + at_V, value, rows, V, H * V)
        scores_ij = load_square(scores + square)
        T_inverse = load_square(inverse + square)
        a = load_row(at + A * C)
        b = load_row(at + B * C)
        b_read = load_row(at + B_READ * C)
        to_S = load_row(at + TO_S * C)
        to_M = load_row(at + TO_M * C)

        KdS = tl.dot(k_i, dS.to(dtype), input_precision=PRECISION)
        KdM = tl.dot(k_i, dM.to(dtype), input_precision=PRECISION)
        dx = to_S[:, None] * KdS - to_M[:, None] * KdM
        dx = tl.dot(tl.trans(scores_ij), do_i, dx, input_precision=PRECISION)
        dr_i = tl.dot(tl.trans(T_inverse), dx.to(dtype), input_precision=PRECISION)
        store_tokens(dr + at_V, dr_i, value, rows, V, H * V)

        do_i = scale * do_i.to(tl.float32)
        dM = tl.load(last + U * C) * dM - tl.load(last + B * C) * dS
        dM = tl.dot(tl.trans(q_i), (-b[:, None] * do_i).to(dtype), dM, input_precision=PRECISION)
        dM = tl.dot(tl.trans(k_i), (b_read[:, None] * dr_i).to(dtype), dM, input_precision=PRECISION)
        dS = tl.load(last + A * C) * dS
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
    owner, slots, first, begin, end, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What dQ, dK and the coefficients get from the states before (S, M) and after (dS, dM) the chunk.

    sums [slots, H, K blocks, 5, C]: gradients of a, b and b', and the row sums of K ⊙ Ṽ dSᵀ and K ⊙ Ṽ dMᵀ.
    inner [slots, H, K blocks, 3]: ⟨dS, S⟩, ⟨dS, M⟩ and ⟨dM, M⟩.
    """
    block, slot, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(owner + slot) >= N:
        return
    start, rows, chunk = locate(slot, owner, slots, first, begin, end)
    at_K, at_V = (start * H + h) * K, (start * H + h) * V
    channel = block * BK + tl.arange(0, BK)
    at_slot = slot.to(tl.int64) * H + h
    state = at_slot * K * V
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
        S = load_state(states_S + state, channel, value, K, V)
        M = load_state(states_M + state, channel, value, K, V)
        dS = load_state(states_dS + state, channel, value, K, V)
        dM = load_state(states_dM + state, channel, value, K, V)
        doS = tl.dot(do_i, tl.trans(S), doS, input_precision=PRECISION)
        doM = tl.dot(do_i, tl.trans(M), doM, input_precision=PRECISION)
        drS = tl.dot(dr_i, tl.trans(S), drS, input_precision=PRECISION)
        drM = tl.dot(dr_i, tl.trans(M), drM, input_precision=PRECISION)
        xdS = tl.dot(x_i, tl.trans(dS), xdS, input_precision=PRECISION)
        xdM = tl.dot(x_i, tl.trans(dM), xdM, input_precision=PRECISION)
        dS_S += tl.sum(dS.to(tl.float32) * S.to(tl.float32), 1)
        dS_M += tl.sum(dS.to(tl.float32) * M.to(tl.float32), 1)
        dM_M += tl.sum(dM.to(tl.float32) * M.to(tl.float32), 1)

    at = coefficients + (chunk * H + h) * 6 * C
    a = load_row(at + A * C)[:, None]
    b = load_row(at + B * C)[:, None]
    b_read = load_row(at + B_READ * C)[:, None]
    to_S = load_row(at + TO_S * C)[:, None]
    to_M = load_row(at + TO_M * C)[:, None]
    q_i = load_tokens(q + at_K, channel, rows, K, H * K).to(tl.float32)
    k_i = load_tokens(k + at_K, channel, rows, K, H * K).to(tl.float32)
    at = at_slot * C * K
    store_tokens(dq + at, scale * (a * doS - b * doM), channel, C, K, K)
    dk_i = -a * drS + b_read * drM + to_S * xdS - to_M * xdM
    store_tokens(dk + at, dk_i, channel, C, K, K)

    at_block = at_slot * tl.num_programs(0) + block
    at = sums + at_block * 5 * C
    store_row(at + D_A * C, tl.sum(scale * q_i * doS - k_i * drS, 1))
    store_row(at + D_B * C, tl.sum(-scale * q_i * doM, 1))
    store_row(at + D_B_READ * C, tl.sum(k_i * drM, 1))
    store_row(at + D_TO_S * C, tl.sum(k_i * xdS, 1))
    store_row(at + D_TO_M * C, tl.sum(k_i * xdM, 1))
    tl.store(inner + at_block * 3, tl.sum(dS_S, 0))
    tl.store(inner + at_block * 3 + 1, tl.sum(dS_M, 0))
    tl.store(inner + at_block * 3 + 2, tl.sum(dM_M, 0))


@triton.jit(do_not_specialize=["N"])
def inner_backward(
    q, k, log_alpha, beta, log_mu, eta, do, dr, residual, sums, inner,
    dq_outer, dk_outer,
    dq, dk, dlog_alpha, dbeta, dlog_mu, deta,
    owner, slots, first, begin, end, N, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Inside the chunk: completes dQ and dK, and the gates' gradients. BLOCKS: K blocks of sums and inner."""
    slot, h = tl.program_id(0), tl.program_id(1)
    if tl.load(owner + slot) >= N:
        return
    start, rows, _ = locate(slot, owner, slots, first, begin, end)
    at_slot = slot.to(tl.int64) * H + h
    row, column = tl.arange(0, C), tl.arange(0, C)
    at_gate = start * H + h
    at_K, at_V = at_gate * K, at_gate * V
    eta_j = load_gate(eta + at_gate, rows, H)
    lower = row[:, None] >= column[None, :]
    strict = row[:, None] > column[None, :]
    at_end = row[:, None] == C - 1

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

    _, _, _, _, _, written, gamma_read = decays(
        log_alpha + at_gate, beta + at_gate, log_mu + at_gate, rows, row, column, H, PRECISION
    )
    dtype = k.dtype.element_ty
    dQK = (X * (gamma_read + written) * eta_j[None, :]).to(dtype)
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
        dq_i = load_tokens(dq_outer + at_slot * C * K, channel, C, K, K)
        dq_i = tl.dot(dQK, k_i, dq_i, input_precision=PRECISION)
        store_tokens(dq + at_K, dq_i, channel, rows, K, H * K)
        dk_i = load_tokens(dk_outer + at_slot * C * K, channel, C, K, K)
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
    for block in range(BLOCKS):
        at = sums + (at_slot * BLOCKS + block) * 5 * C
        da += load_row(at + D_A * C)
        db += load_row(at + D_B * C)
        db_read += load_row(at + D_B_READ * C)
        dto_S += load_row(at + D_TO_S * C)
        dto_M += load_row(at + D_TO_M * C)
        at = inner + (at_slot * BLOCKS + block) * 3
        dS_S += tl.load(at)
        dS_M += tl.load(at + 1)
        dM_M += tl.load(at + 2)
    da += tl.where(row == C - 1, dS_S, 0.0)
    db -= tl.where(row == C - 1, dS_M, 0.0)

    # Once more rather than in registers all the time.
    a, u, L_alpha, later, L_mu, written, gamma_read = decays(
        log_alpha + at_gate, beta + at_gate, log_mu + at_gate, rows, row, column, H, PRECISION
    )
    gamma = gamma_read + written
    beta_i = load_gate(beta + at_gate, rows, H)

    # Γ, Γ' and the last rows of Γ and L_μ, by which the residuals enter the states; their first columns, as
    # u = μ_0 L_μ[:, 0], so that b = μ_0 Γ[:, 0] and b' = μ_0 Γ'[:, 0].
    X = X * QK
    Y = Y * KK
    end_S = tl.where(at_end, dto_S[None, :], 0.0)
    end_M = tl.where(at_end, -dto_M[None, :], 0.0)
    deta_j = tl.sum((X + end_S) * gamma + Y * gamma_read + end_M * L_mu, 0)
    alpha_0, mu_0 = pick(a, 0, row), pick(u, 0, row)
    dmu_0 = tl.sum(db * first_column(gamma, column) + db_read * first_column(gamma_read, column), 0)
    dgamma = (X + end_S) * eta_j[None, :] + as_first_column(mu_0 * db, column)
    dboth = dgamma + Y * eta_j[None, :] + as_first_column(mu_0 * db_read, column)

    # Γ' = (L_α − I) B, Γ = Γ' + B, B = diag(β) L_μ; a = α_0 L_α[:, 0], u_C = μ_0 L_μ[C, 0].
    dL_alpha = tl.dot(dboth, tl.trans(written), input_precision=PRECISION)
    dL_alpha += as_first_column(alpha_0 * da, column)
    dwritten = tl.dot(tl.trans(later), dboth, dgamma, input_precision=PRECISION)
    dbeta_i = tl.sum(dwritten * L_mu, 1)
    du_C = tl.where(row == C - 1, dM_M, 0.0)
    dL_mu = beta_i[:, None] * dwritten + end_M * eta_j[None, :] + as_first_column(mu_0 * du_C, column)

    dlog_alpha_i = segment_gradient(dL_alpha, L_alpha, row, column, PRECISION)
    dlog_alpha_i += tl.where(row == 0, tl.sum(da * a, 0), 0.0)
    dlog_mu_i = segment_gradient(dL_mu, L_mu, row, column, PRECISION)
    dlog_mu_i += tl.where(row == 0, mu_0 * dmu_0 + dM_M * pick(u, C - 1, row), 0.0)
    store_gate(dlog_alpha + at_gate, dlog_alpha_i, rows, H)
    store_gate(dbeta + at_gate, dbeta_i, rows, H)
    store_gate(dlog_mu + at_gate, dlog_mu_i, rows, H)
    store_gate(deta + at_gate, deta_j, rows, H)
