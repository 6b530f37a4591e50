# mypy: ignore-errors
"""Triton kernels of the delta rules with one state (delta_triton.py has the equations and launches them).

C tokens of a chunk, rows i, columns j · K key · V value · H heads · tokens: all of a batch in one row.
Q, K, P, V, O are [tokens, H, ·], gates [tokens, H]; all of C × C is [H, tokens, C], one row a token.
Rows behind a sequence's end are loaded as zeros, which is neutral: a log gate of 0, no key, no step.

p None: the residuals read α_t S_{t−1} with k_t (gated delta rule), else S_{t−1} with p_t (Comba).
"""

import triton
import triton.language as tl

from mdn_kernels.common.tiles import (
    C,
    load_gate,
    load_state,
    load_tokens,
    running_sums,
    segment_decay,
    segment_gradient,
    store_gate,
    store_state,
    store_tokens,
    unit_lower_inverse,
)

# Rows of `coefficients` [3, H, tokens].
A, READ, WRITE = (tl.constexpr(i) for i in range(3))


@triton.jit
def locate(chunk, owner, first, starts):
    """A chunk's first token, and how many tokens of its sequence there are from it on."""
    n = tl.load(owner + chunk)
    start = tl.load(starts + n) + (chunk - tl.load(first + n)) * C
    return start.to(tl.int64), tl.load(starts + n + 1) - start


@triton.jit
def load_row_before(x, rows, stride):
    """x[i − 1] [C], 0 for the first row."""
    row = tl.arange(0, C)
    return tl.load(x + (row - 1) * stride, mask=(row > 0) & (row < rows), other=0.0)


@triton.jit
def decay_before(log_gate_before, row, column):
    """L[i − 1, j] = exp(Σ_{j<s<i} log_gate_s), strictly lower triangular, from the gates one row down."""
    terms = tl.where(row[:, None] > column[None, :] + 1, log_gate_before[:, None], 0.0)
    return tl.where(row[:, None] > column[None, :], tl.exp(tl.cumsum(terms, 0)), 0.0)


@triton.jit
def gradient_before(dL, L, row, column):
    """The gradient of log_gate_before_t through decay_before: Σ dL[i, j] L[i, j] over i ≥ t > j + 1."""
    crossing = tl.where(row[:, None] > column[None, :], dL * L, 0.0)
    later = tl.cumsum(crossing, 0, reverse=True)
    return tl.sum(tl.where(row[:, None] > column[None, :] + 1, later, 0.0), 1)


@triton.jit
def one_row_up(x, row, column):
    """x[i + 1], 0 in the last row."""
    return tl.sum(tl.where(row[:, None] == column[None, :] + 1, x[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["N", "tokens"])
def prepare(
    q, k, p, log_alpha, beta,
    inverse, scores, coefficients,
    owner, first, starts, N, tokens, scale,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: T⁻¹, the scores, and the coefficients a, r, w."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    if tl.load(owner + chunk) >= N:
        return
    start, rows = locate(chunk, owner, first, starts)
    row, column = tl.arange(0, C), tl.arange(0, C)
    at_gate, at_row = start * H + h, h * tokens.to(tl.int64) + start
    at_K, square = at_gate * K, at_row * C
    log_alpha_i = load_gate(log_alpha + at_gate, rows, H)
    beta_j = load_gate(beta + at_gate, rows, H)

    PK = tl.zeros((C, C), tl.float32)
    QK = tl.zeros((C, C), tl.float32)
    for k0 in range(0, K, BK):
        channel = k0 + tl.arange(0, BK)
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        p_i = k_i if p is None else load_tokens(p + at_K, channel, rows, K, H * K)
        PK = tl.dot(p_i, tl.trans(k_i), PK, input_precision=PRECISION)
        QK = tl.dot(q_i, tl.trans(k_i), QK, input_precision=PRECISION)

    alpha_sum, alpha_rest = running_sums(log_alpha_i)
    L = segment_decay(alpha_sum, alpha_rest, row, column)
    a = tl.exp2(alpha_sum + alpha_rest)
    if p is None:
        L_read = tl.where(row[:, None] > column[None, :], L, 0.0)
        read = a
    else:
        before = load_row_before(log_alpha + at_gate, rows, H)
        L_read = decay_before(before, row, column)
        read = tl.exp(tl.cumsum(before, 0))
    write = tl.sum(tl.where(row[:, None] == C - 1, L, 0.0), 0) * beta_j

    at = coefficients + at_row
    plane = H * tokens.to(tl.int64)
    store_gate(at + A * plane, a, rows)
    store_gate(at + READ * plane, read, rows)
    store_gate(at + WRITE * plane, write, rows)
    store_tokens(scores + square, scale * QK * L * beta_j[None, :], column, rows, C, C)
    T_inverse = unit_lower_inverse(PK * L_read * beta_j[None, :], row, column, PRECISION)
    store_tokens(inverse + square, T_inverse, column, rows, C, C)


@triton.jit(do_not_specialize=["tokens"])
def scan(
    k, p, v, inverse, coefficients, residual,
    initial, states, final,
    first, starts, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SOLVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries S over a sequence's chunks and stores it as it is before each chunk.

    SOLVE: the residuals Ṽ = T⁻¹ (V − r ⊙ P S) are computed and stored; else they are read.
    """
    block, n, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    start, length = tl.load(starts + n).to(tl.int64), tl.load(starts + n + 1) - tl.load(starts + n)
    chunk = tl.load(first + n).to(tl.int64)
    row, channel, value = tl.arange(0, C), tl.arange(0, BK), block * BV + tl.arange(0, BV)
    own = (n.to(tl.int64) * H + h) * K * V
    S = tl.zeros((BK, BV), tl.float32)
    if initial is not None:
        S = load_state(initial + own, channel, value, K, V)
    plane = H * tokens.to(tl.int64)
    dtype = k.dtype.element_ty
    for i in range(tl.cdiv(length, C)):
        state = ((chunk + i) * H + h) * K * V
        store_state(states + state, S, channel, value, K, V)
        token, rows = start + i * C, length - i * C
        at_K, at_V = (token * H + h) * K, (token * H + h) * V
        at_row = h * tokens.to(tl.int64) + token
        square, at = at_row * C, coefficients + at_row
        last = at + tl.minimum(rows, C) - 1
        k_i = load_tokens(k + at_K, channel, rows, K, H * K)
        if SOLVE:
            read = load_gate(at + READ * plane, rows)
            T_inverse = load_tokens(inverse + square, row, rows, C, C)
            v_i = load_tokens(v + at_V, value, rows, V, H * V).to(tl.float32)
            p_i = k_i if p is None else load_tokens(p + at_K, channel, rows, K, H * K)
            PS = tl.dot(p_i, S.to(dtype), input_precision=PRECISION)
            x = tl.dot(T_inverse, (v_i - read[:, None] * PS).to(dtype), input_precision=PRECISION)
            store_tokens(residual + at_V, x, value, rows, V, H * V)
        else:
            x = load_tokens(residual + at_V, value, rows, V, H * V).to(tl.float32)
        write = load_gate(at + WRITE * plane, rows)
        S = tl.load(last + A * plane) * S
        S = tl.dot(tl.trans(k_i), (write[:, None] * x).to(dtype), S, input_precision=PRECISION)
    if final is not None:
        store_state(final + own, S, channel, value, K, V)


@triton.jit(do_not_specialize=["N", "tokens"])
def output(
    q, scores, coefficients, residual, states, o,
    owner, first, starts, N, tokens, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """O = a ⊙ Q S + scores Ṽ."""
    block, chunk, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(owner + chunk) >= N:
        return
    start, rows = locate(chunk, owner, first, starts)
    at_row = h * tokens.to(tl.int64) + start
    at_K, at_V = (start * H + h) * K, (start * H + h) * V
    row, value = tl.arange(0, C), block * BV + tl.arange(0, BV)
    state = (chunk.to(tl.int64) * H + h) * K * V
    o_i = tl.zeros((C, BV), tl.float32)
    for k0 in range(0, K, BK):
        channel = k0 + tl.arange(0, BK)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        o_i = tl.dot(q_i, load_state(states + state, channel, value, K, V), o_i, input_precision=PRECISION)
    a = load_gate(coefficients + at_row + A * H * tokens.to(tl.int64), rows)
    scores_ij = load_tokens(scores + at_row * C, row, rows, C, C)
    x = load_tokens(residual + at_V, value, rows, V, H * V)
    o_i = tl.dot(scores_ij, x, scale * a[:, None] * o_i, input_precision=PRECISION)
    store_tokens(o + at_V, o_i, value, rows, V, H * V)


@triton.jit(do_not_specialize=["N", "tokens"])
def solve_transposed(
    k, do, inverse, scores, coefficients, written, dr,
    owner, first, starts, N, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """T⁻ᵀ (w ⊙ K), and T⁻ᵀ scoresᵀ dO: dR of the chunk's own outputs."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    if tl.load(owner + chunk) >= N:
        return
    start, rows = locate(chunk, owner, first, starts)
    at_row = h * tokens.to(tl.int64) + start
    at_K, at_V = (start * H + h) * K, (start * H + h) * V
    row = tl.arange(0, C)
    scores_ji = tl.trans(load_tokens(scores + at_row * C, row, rows, C, C))
    T_inverse = tl.trans(load_tokens(inverse + at_row * C, row, rows, C, C))
    write = load_gate(coefficients + at_row + WRITE * H * tokens.to(tl.int64), rows)
    dtype = k.dtype.element_ty
    for k0 in range(0, K, BK):
        channel = k0 + tl.arange(0, BK)
        k_i = load_tokens(k + at_K, channel, rows, K, H * K).to(tl.float32)
        k_i = tl.dot(T_inverse, (write[:, None] * k_i).to(dtype), input_precision=PRECISION)
        store_tokens(written + at_K, k_i, channel, rows, K, H * K)
    for v0 in range(0, V, BV):
        value = v0 + tl.arange(0, BV)
        do_i = load_tokens(do + at_V, value, rows, V, H * V)
        dx = tl.dot(scores_ji, do_i, input_precision=PRECISION)
        dr_i = tl.dot(T_inverse, dx.to(dtype), input_precision=PRECISION)
        store_tokens(dr + at_V, dr_i, value, rows, V, H * V)


@triton.jit(do_not_specialize=["tokens"])
def reverse_scan(
    q, p, written, do, coefficients, dr,
    final_d, states_d, initial_d,
    first, starts, tokens, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Carries dS backwards over a sequence's chunks; stores it as it is after each chunk, and completes dR.

    dR = T⁻ᵀ (w ⊙ K dS + scoresᵀ dO), the gradient of the system's right-hand side, is the gradient of V too.
    """
    block, n, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    start, length = tl.load(starts + n).to(tl.int64), tl.load(starts + n + 1) - tl.load(starts + n)
    chunk = tl.load(first + n).to(tl.int64)
    channel, value = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    own = (n.to(tl.int64) * H + h) * K * V
    dS = tl.zeros((BK, BV), tl.float32)
    if final_d is not None:
        dS = load_state(final_d + own, channel, value, K, V)
    plane = H * tokens.to(tl.int64)
    dtype = q.dtype.element_ty
    count = tl.cdiv(length, C)
    for done in range(count):
        i = count - 1 - done
        state = ((chunk + i) * H + h) * K * V
        store_state(states_d + state, dS, channel, value, K, V)
        token, rows = start + i * C, length - i * C
        at_K, at_V = (token * H + h) * K, (token * H + h) * V
        at = coefficients + h * tokens.to(tl.int64) + token
        last = at + tl.minimum(rows, C) - 1
        written_i = load_tokens(written + at_K, channel, rows, K, H * K)
        q_i = load_tokens(q + at_K, channel, rows, K, H * K)
        p_i = load_tokens(p + at_K, channel, rows, K, H * K)
        do_i = load_tokens(do + at_V, value, rows, V, H * V).to(tl.float32)
        dr_i = load_tokens(dr + at_V, value, rows, V, H * V).to(tl.float32)
        a = load_gate(at + A * plane, rows)
        read = load_gate(at + READ * plane, rows)

        dr_i = tl.dot(written_i, dS.to(dtype), dr_i, input_precision=PRECISION)
        store_tokens(dr + at_V, dr_i, value, rows, V, H * V)
        dS = tl.load(last + A * plane) * dS
        dS = tl.dot(tl.trans(q_i), (scale * a[:, None] * do_i).to(dtype), dS, input_precision=PRECISION)
        dS = tl.dot(tl.trans(p_i), (-read[:, None] * dr_i).to(dtype), dS, input_precision=PRECISION)
    if initial_d is not None:
        store_state(initial_d + own, dS, channel, value, K, V)


@triton.jit(do_not_specialize=["N", "tokens"])
def backward(
    q, k, p, log_alpha, beta, do, dr, residual, states, states_d,
    dq, dk, dp, dlog_alpha, dbeta,
    owner, first, starts, N, tokens, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dP of a block of key channels, and that block's share of the gates' gradients.

    All that the gates' gradients are made of is a sum over key channels, so each block gives a term of
    dlog_alpha and dbeta [K blocks, tokens, H]. The C × C gradients X and Y are formed again in each block.
    """
    block, chunk, h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(owner + chunk) >= N:
        return
    start, rows = locate(chunk, owner, first, starts)
    row, column = tl.arange(0, C), tl.arange(0, C)
    at_gate = start * H + h
    at_K, at_V = at_gate * K, at_gate * V
    channel = block * BK + tl.arange(0, BK)
    state = (chunk.to(tl.int64) * H + h) * K * V
    X = tl.zeros((C, C), tl.float32)
    Y = tl.zeros((C, C), tl.float32)
    doS = tl.zeros((C, BK), tl.float32)
    drS = tl.zeros((C, BK), tl.float32)
    xdS = tl.zeros((C, BK), tl.float32)
    dS_S = tl.zeros((BK,), tl.float32)
    for v0 in range(0, V, BV):
        value = v0 + tl.arange(0, BV)
        do_i = load_tokens(do + at_V, value, rows, V, H * V)
        dr_i = load_tokens(dr + at_V, value, rows, V, H * V)
        x_i = load_tokens(residual + at_V, value, rows, V, H * V)
        S = load_state(states + state, channel, value, K, V)
        dS = load_state(states_d + state, channel, value, K, V)
        X = tl.dot(do_i, tl.trans(x_i), X, input_precision=PRECISION)
        Y = tl.dot(dr_i, tl.trans(x_i), Y, input_precision=PRECISION)
        doS = tl.dot(do_i, tl.trans(S), doS, input_precision=PRECISION)
        drS = tl.dot(dr_i, tl.trans(S), drS, input_precision=PRECISION)
        xdS = tl.dot(x_i, tl.trans(dS), xdS, input_precision=PRECISION)
        dS_S += tl.sum(dS.to(tl.float32) * S.to(tl.float32), 1)

    log_alpha_i = load_gate(log_alpha + at_gate, rows, H)
    beta_j = load_gate(beta + at_gate, rows, H)
    lower = row[:, None] >= column[None, :]
    strict = row[:, None] > column[None, :]
    alpha_sum, alpha_rest = running_sums(log_alpha_i)
    L = segment_decay(alpha_sum, alpha_rest, row, column)
    a = tl.exp2(alpha_sum + alpha_rest)
    if p is None:
        L_read = tl.where(strict, L, 0.0)
        read = a
    else:
        before = load_row_before(log_alpha + at_gate, rows, H)
        L_read = decay_before(before, row, column)
        read = tl.exp(tl.cumsum(before, 0))
    write = tl.sum(tl.where(row[:, None] == C - 1, L, 0.0), 0) * beta_j

    # X and Y: gradients of (Q Kᵀ) ⊙ L ⊙ β and of (P Kᵀ) ⊙ L' ⊙ β.
    X = tl.where(lower, scale * X, 0.0)
    Y = tl.where(strict, -Y, 0.0)
    doS = scale * doS
    q_i = load_tokens(q + at_K, channel, rows, K, H * K)
    k_i = load_tokens(k + at_K, channel, rows, K, H * K)
    p_i = k_i if p is None else load_tokens(p + at_K, channel, rows, K, H * K)
    dtype = k.dtype.element_ty
    dQK = (X * L * beta_j[None, :]).to(dtype)
    dPK = (Y * L_read * beta_j[None, :]).to(dtype)
    dq_i = tl.dot(dQK, k_i, a[:, None] * doS, input_precision=PRECISION)
    store_tokens(dq + at_K, dq_i, channel, rows, K, H * K)
    dp_i = tl.dot(dPK, k_i, -read[:, None] * drS, input_precision=PRECISION)
    dk_i = tl.dot(tl.trans(dQK), q_i, write[:, None] * xdS, input_precision=PRECISION)
    dk_i = tl.dot(tl.trans(dPK), p_i, dk_i, input_precision=PRECISION)
    if p is None:
        dk_i += dp_i
    else:
        store_tokens(dp + at_K, dp_i, channel, rows, K, H * K)
    store_tokens(dk + at_K, dk_i, channel, rows, K, H * K)

    X *= tl.dot(q_i, tl.trans(k_i), input_precision=PRECISION)
    Y *= tl.dot(p_i, tl.trans(k_i), input_precision=PRECISION)
    # The last row of L ⊙ β, by which the residuals enter the state, is in the gradient of X's row.
    dwrite = tl.sum(k_i.to(tl.float32) * xdS, 1)
    X += tl.where(row[:, None] == C - 1, dwrite[None, :], 0.0)
    dbeta_j = tl.sum(X * L + Y * L_read, 0)
    X *= beta_j[None, :]
    Y *= beta_j[None, :]
    da = tl.sum(q_i.to(tl.float32) * doS, 1) + tl.where(row == C - 1, tl.sum(dS_S, 0), 0.0)
    dread = -tl.sum(p_i.to(tl.float32) * drS, 1)
    if p is None:
        dlog_alpha_i = segment_gradient(X + Y, L, row, column, PRECISION) + tl.cumsum(
            (da + dread) * a, 0, reverse=True
        )
    else:
        dbefore = gradient_before(Y, L_read, row, column) + tl.cumsum(dread * read, 0, reverse=True)
        dlog_alpha_i = segment_gradient(X, L, row, column, PRECISION) + tl.cumsum(da * a, 0, reverse=True)
        dlog_alpha_i += one_row_up(dbefore, row, column)
    at = (block * tokens.to(tl.int64) + start) * H + h
    store_gate(dlog_alpha + at, dlog_alpha_i, rows, H)
    store_gate(dbeta + at, dbeta_j, rows, H)
