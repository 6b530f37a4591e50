# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton does not unpack tuples)
"""The scans of v4_hopper in Gluon: the recurrence over chunks with both states in registers.

Same letters and workspaces as v3_kernels. A program keeps BV value channels of both states, transposed, as
one matrix Z [2 BV, K]: a warp has all key channels of eight value channels of S and, in the same threads, of
M. So whatever multiplies K, Q, T⁻¹ or the scores (states, residuals, gradients) is the left operand of a
product, which the tensor cores read from registers: no state passes through shared memory, S and M share each
product, and no warp needs what another one computed. Tiles of tokens are transposed too, [BV, C], and as
operands they have the rows of both: those of M hold what half precision rounds off in those of S. `halves`,
`joined` and `tiles` only rename registers.

The right operands come by bulk copies (TMA) into one of two slots of shared memory while the step before
computes. Rows behind a sequence's end are another sequence's tokens there; they meet only zeros of the
workspaces. What leaves in rows of tokens passes through shared memory once a step; the barrier before it is
read there also stands between a step's last reads of a slot and the copies that the next step starts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mdn_kernels.momentum_delta_rule.v4_kernels import (
    B_READ,
    TO_M,
    TO_S,
    A,
    B,
    C,
    U,
    copy_in,
    ring,
    wait,
)

# Triton 3.9 has other names for them.
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

W = gl.constexpr(64)  # columns of a tile


@gluon.constexpr_function
def both_layout(columns, warps):
    """Of a matrix [2 BV, columns]: each warp has eight value channels of S, then the same of M."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.constexpr_function
def one_layout(columns, warps):
    """Of the rows of S, or of M, alone [BV, columns]: in the same threads."""
    registers = [[0, 1]] + [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    bases = [[8 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, bases, [], [8 * warps, columns])


@gluon.jit
def halves(z, warps: gl.constexpr):
    """The rows of S and of M [BV, columns] of a matrix in `both_layout`; only registers are renamed."""
    BV: gl.constexpr = 8 * warps
    N: gl.constexpr = z.shape[1]
    layout: gl.constexpr = one_layout(N, warps)
    S, M = gl.split(gl.permute(gl.reshape(z, [warps, 2, 8, N]), (0, 2, 3, 1)))
    S, M = gl.reshape(S, [BV, N]), gl.reshape(M, [BV, N])
    S = gl.convert_layout(S, layout, assert_trivial=True)
    return S, gl.convert_layout(M, layout, assert_trivial=True)


@gluon.jit
def joined(S, M, warps: gl.constexpr):
    """The reverse of `halves`, [2 BV, columns]."""
    N: gl.constexpr = S.shape[1]
    z = gl.permute(gl.join(gl.reshape(S, [warps, 8, N]), gl.reshape(M, [warps, 8, N])), (0, 3, 1, 2))
    z = gl.reshape(z, [16 * warps, N])
    return gl.convert_layout(z, both_layout(N, warps), assert_trivial=True)


@gluon.jit
def tiles(z, warps: gl.constexpr):
    """Its blocks of W columns; only registers are renamed."""
    N: gl.constexpr = z.shape[1]
    if N == W:
        return (gl.convert_layout(z, both_layout(W, warps), assert_trivial=True),)
    else:
        left, right = gl.split(gl.permute(gl.reshape(z, [16 * warps, 2, N // 2]), (0, 2, 1)))
        return tiles(left, warps) + tiles(right, warps)


@gluon.jit
def operand(z, columns: gl.constexpr, warps: gl.constexpr):
    """A tile [2 BV, 64] of half precision as left operand of a product with so many columns."""
    layout: gl.constexpr = gl.DotOperandLayout(0, both_layout(columns, warps), 2)
    return gl.convert_layout(z, layout, assert_trivial=True)


@gluon.jit
def in_two(x, dtype: gl.constexpr, warps: gl.constexpr):
    """A tile of tokens [BV, C] as left operand: what half precision keeps of it in the rows of S, the rest in
    those of M, so that nothing is lost for a product of which `summed` adds the two."""
    kept = x.to(dtype)
    rest = (x - kept.to(gl.float32)).to(dtype)
    return operand(joined(kept, rest, warps), C, warps)


@gluon.jit
def summed(z, warps: gl.constexpr):
    """[BV, C]"""
    kept, rest = halves(z, warps)
    return kept + rest


@gluon.jit
def spread(to_S, to_M, dtype: gl.constexpr, K: gl.constexpr, warps: gl.constexpr):
    """What enters S and M [BV, C], as left operand of a product with K or Q."""
    return operand(joined(to_S.to(dtype), to_M.to(dtype), warps), K, warps)


@gluon.jit
def channels(x, i: gl.constexpr):
    """The i-th W key channels of K or Q [C, K] in shared memory, transposed."""
    return x.slice(W * i, W, dim=1).permute((1, 0))


@gluon.jit
def state_pointers(x, K: gl.constexpr, V: gl.constexpr, warps: gl.constexpr):
    """Of a state in memory, x being at its first value channel."""
    layout: gl.constexpr = one_layout(K, warps)
    value = gl.arange(0, 8 * warps, gl.SliceLayout(1, layout))
    return x + value[:, None] + V * gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def load_states(S, M, K: gl.constexpr, V: gl.constexpr, warps: gl.constexpr):
    S, M = gl.load(state_pointers(S, K, V, warps)), gl.load(state_pointers(M, K, V, warps))
    return joined(S, M, warps)


@gluon.jit
def store_states(Z, S, M, K: gl.constexpr, V: gl.constexpr, warps: gl.constexpr):
    z_S, z_M = halves(Z, warps)
    gl.store(state_pointers(S, K, V, warps), z_S)
    gl.store(state_pointers(M, K, V, warps), z_M)


@gluon.jit
def outlets(states_tma, K: gl.constexpr):
    """Where chunk states leave from: shared memory for each W key channels, [W, 2 BV]."""
    Z_s = ()
    for i in gl.static_range(K // W):  # noqa: B007
        room = gl.allocate_shared_memory(states_tma.dtype, states_tma.block_type.shape, states_tma.layout)
        Z_s = Z_s + (room,)
    return Z_s


@gluon.jit
def put_state(z, Z_s):
    """16 columns of S, the same 16 of M, the next 16 of S, and so on."""
    BV: gl.constexpr = z.shape[0] // 2
    z = gl.permute(gl.reshape(z, [BV // 16, 2, 2, 8, 64]), (0, 2, 1, 3, 4))
    Z_s.permute((1, 0)).store(gl.reshape(z, [2 * BV, 64]))


@gluon.jit
def send_states(states_tma, Z_s, row, column, K: gl.constexpr):
    """Starts their way to memory. Each thread's fence comes after what it has put and before the barrier;
    left to itself, Triton 3.7 starts the first copy before it."""
    fence_async_shared()
    barrier()
    for i in gl.static_range(K // W):
        copy_out(states_tma, [row + W * i, column], Z_s[i])


@gluon.jit
def load_coefficients(coefficients, at, rows, warps: gl.constexpr):
    """Of a chunk and head: all [8 C], in a layout for `put`, and a, b and u after the last of its `rows`."""
    x = coefficients + at.to(gl.int64) * 6 * C
    element = gl.arange(0, 8 * C, gl.BlockedLayout([16 // warps], [32], [warps], [0]))
    last = x + gl.maximum(gl.minimum(rows, C), 1) - 1
    everything = gl.load(x + gl.minimum(element, 6 * C - 1))
    return everything, gl.load(last + A * C), gl.load(last + B * C), gl.load(last + U * C)


@gluon.jit
def coefficient(c_s, row: gl.constexpr, warps: gl.constexpr):
    return c_s.slice(row * C, C).load(gl.SliceLayout(0, one_layout(C, warps)))[None, :]


@gluon.jit
def store_rows(x, x_s, rows, stride: gl.constexpr, warps: gl.constexpr):
    """The first `rows` rows of a tile of tokens [C, BV]."""
    BV: gl.constexpr = x_s.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [warps, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, BV, gl.SliceLayout(0, layout))[None, :]
    gl.store(x + row * stride + column, x_s.load(layout), mask=row < rows)


@gluon.jit(do_not_specialize=["span"])
def scan(
    q_tma, k_tma, v_tma, inverse_tma, scores_tma, coefficients, residual, o,
    initial_S, initial_M, final_S, final_M, marks_S, marks_M, span, first, begin, end, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Residuals and outputs of all chunks, and the states before each span but the first and at the end.

    R = V − a ⊙ K S + b' ⊙ K M, Ṽ = T⁻¹ R, O = a ⊙ Q S − b ⊙ Q M + [(Q Kᵀ) ⊙ Γ ⊙ η] Ṽ.
    """
    block, n, h = gl.program_id(0), gl.program_id(1) // H, gl.program_id(1) % H
    token_0, chunk_0 = gl.load(begin + n), gl.load(first + n)
    length = gl.load(end + n) - token_0
    count = (length + C - 1) // C
    tile: gl.constexpr = one_layout(C, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    own = (n.to(gl.int64) * H + h) * K * V + block * BV
    if initial_S is not None:
        Z = load_states(initial_S + own, initial_M + own, K, V, num_warps)
    else:
        Z = gl.zeros([2 * BV, K], gl.float32, both_layout(K, num_warps))
    q_s, q_arrived = ring(q_tma)
    k_s, k_arrived = ring(k_tma)
    v_s, v_arrived = ring(v_tma)
    inverse_s, inverse_arrived = ring(inverse_tma)
    scores_s, scores_arrived = ring(scores_tma)
    x_s = gl.allocate_shared_memory(dtype, [C, BV], v_tma.layout)
    o_s = gl.allocate_shared_memory(dtype, [C, BV], v_tma.layout)
    c_s = gl.allocate_shared_memory(gl.float32, [8 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    nothing = gl.zeros([2 * BV, C], gl.float32, both_layout(C, num_warps))
    value = h * V + block * BV
    c, a_C, b_C, u_C = load_coefficients(coefficients, chunk_0 * H + h, length, num_warps)

    for step in range(-1, count):
        ahead = step + 1  # its operands start on their way
        go = ahead < count
        square = ((chunk_0 + ahead) * H + h) * C
        token = token_0 + ahead * C
        if step >= 0:
            c_s.store(c)
        barrier()
        slot = ahead % 2
        mbarrier.expect(k_arrived.index(slot), 2 * C * K, pred=go)
        mbarrier.expect(q_arrived.index(slot), 2 * C * K, pred=go)
        mbarrier.expect(v_arrived.index(slot), 2 * C * BV, pred=go)
        mbarrier.expect(inverse_arrived.index(slot), 2 * C * C, pred=go)
        mbarrier.expect(scores_arrived.index(slot), 2 * C * C, pred=go)
        copy_in(k_tma, [token, h * K], k_arrived.index(slot), k_s.index(slot), pred=go)
        copy_in(q_tma, [token, h * K], q_arrived.index(slot), q_s.index(slot), pred=go)
        copy_in(v_tma, [token, value], v_arrived.index(slot), v_s.index(slot), pred=go)
        copy_in(inverse_tma, [square, 0], inverse_arrived.index(slot), inverse_s.index(slot), pred=go)
        copy_in(scores_tma, [square, 0], scores_arrived.index(slot), scores_s.index(slot), pred=go)
        if step >= 0:
            if (step > 0) & (step % span == 0):
                mark = (step // span - 1) * gl.num_programs(1).to(gl.int64) * K * V + own
                store_states(Z, marks_S + mark, marks_M + mark, K, V, num_warps)
            slot = step % 2
            k_i, q_i = k_s.index(slot), q_s.index(slot)
            wait(k_arrived, step)
            wait(q_arrived, step)
            KZ, QZ = nothing, nothing
            parts = tiles(Z, num_warps)
            for i in gl.static_range(K // W):
                z = operand(parts[i].to(dtype), C, num_warps)
                KZ = warpgroup_mma(z, channels(k_i, i), KZ, use_acc=i > 0, is_async=True)
                QZ = warpgroup_mma(z, channels(q_i, i), QZ, use_acc=i > 0, is_async=True)
                KZ, QZ = warpgroup_mma_wait(2, deps=[KZ, QZ])  # so that two operands need registers
            S, M = halves(Z, num_warps)
            Z = joined(a_C * S - b_C * M, u_C * M, num_warps)
            next_i = gl.minimum(ahead, count - 1)
            c, a_C, b_C, u_C = load_coefficients(
                coefficients, (chunk_0 + next_i) * H + h, length - next_i * C, num_warps
            )
            wait(v_arrived, step)
            v_i = v_s.index(slot).permute((1, 0)).load(tile).to(gl.float32)
            KZ, QZ = warpgroup_mma_wait(0, deps=[KZ, QZ])
            KS, KM = halves(KZ, num_warps)
            a, b_read = coefficient(c_s, A, num_warps), coefficient(c_s, B_READ, num_warps)
            R = v_i - a * KS + b_read * KM
            wait(inverse_arrived, step)
            x = warpgroup_mma(
                in_two(R, dtype, num_warps), inverse_s.index(slot).permute((1, 0)), nothing,
                use_acc=False, is_async=True,
            )  # fmt: skip
            QS, QM = halves(QZ, num_warps)
            o_i = scale * (coefficient(c_s, A, num_warps) * QS - coefficient(c_s, B, num_warps) * QM)
            o_i = joined(o_i, gl.zeros([BV, C], gl.float32, tile), num_warps)
            x = warpgroup_mma_wait(0, deps=[x])
            x_i = summed(x, num_warps)
            to_S, to_M = coefficient(c_s, TO_S, num_warps) * x_i, -coefficient(c_s, TO_M, num_warps) * x_i
            into = spread(to_S, to_M, dtype, K, num_warps)
            Z = warpgroup_mma(into, k_i, Z, is_async=True)
            wait(scores_arrived, step)
            o_i = warpgroup_mma(
                in_two(x_i, dtype, num_warps), scores_s.index(slot).permute((1, 0)), o_i, is_async=True
            )
            x_s.permute((1, 0)).store(x_i.to(dtype))
            Z, o_i = warpgroup_mma_wait(0, deps=[Z, o_i])
            o_s.permute((1, 0)).store(summed(o_i, num_warps).to(dtype))
            at_V = (token_0 + step * C).to(gl.int64) * H * V + value
            store_rows(residual + at_V, x_s, length - step * C, H * V, num_warps)
            store_rows(o + at_V, o_s, length - step * C, H * V, num_warps)
    store_states(Z, final_S + own, final_M + own, K, V, num_warps)


@gluon.jit
def restore(
    k_tma, residual_tma, states_tma, coefficients, initial_S, initial_M, slots, first, begin, end,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The states before each chunk, from the residuals."""
    block, n, h = gl.program_id(0), gl.program_id(1) // H, gl.program_id(1) % H
    token_0, chunk_0 = gl.load(begin + n), gl.load(first + n)
    length, slot_0 = gl.load(end + n) - token_0, gl.load(slots + n)
    count = (length + C - 1) // C
    tile: gl.constexpr = one_layout(C, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    if initial_S is not None:
        own = (n.to(gl.int64) * H + h) * K * V + block * BV
        Z = load_states(initial_S + own, initial_M + own, K, V, num_warps)
    else:
        Z = gl.zeros([2 * BV, K], gl.float32, both_layout(K, num_warps))
    k_s, k_arrived = ring(k_tma)
    x_s, x_arrived = ring(residual_tma)
    Z_s = outlets(states_tma, K)
    c_s = gl.allocate_shared_memory(gl.float32, [8 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    c, a_C, b_C, u_C = load_coefficients(coefficients, chunk_0 * H + h, length, num_warps)

    for step in range(-1, count):
        ahead = step + 1
        go = ahead < count
        if step >= 0:
            tma.store_wait(0)  # of the step before
            c_s.store(c)
        slot, token = ahead % 2, token_0 + ahead * C
        mbarrier.expect(k_arrived.index(slot), 2 * C * K, pred=go)
        mbarrier.expect(x_arrived.index(slot), 2 * C * BV, pred=go)
        copy_in(k_tma, [token, h * K], k_arrived.index(slot), k_s.index(slot), pred=go)
        copy_in(residual_tma, [token, h * V + block * BV], x_arrived.index(slot), x_s.index(slot), pred=go)
        if step >= 0:
            slot = step % 2
            parts = tiles(Z, num_warps)
            for i in gl.static_range(K // W):
                put_state(parts[i].to(dtype), Z_s[i])
            send_states(states_tma, Z_s, ((slot_0 + step) * H + h) * K, 2 * block * BV, K)
            wait(x_arrived, step)
            exists = gl.arange(0, C, gl.SliceLayout(0, tile))[None, :] < length - step * C
            x = gl.where(exists, x_s.index(slot).permute((1, 0)).load(tile).to(gl.float32), 0.0)
            to_S, to_M = coefficient(c_s, TO_S, num_warps) * x, -coefficient(c_s, TO_M, num_warps) * x
            into = spread(to_S, to_M, dtype, K, num_warps)
            S, M = halves(Z, num_warps)
            Z = joined(a_C * S - b_C * M, u_C * M, num_warps)
            wait(k_arrived, step)
            Z = warpgroup_mma(into, k_s.index(slot), Z, is_async=True)
            next_i = gl.minimum(ahead, count - 1)
            c, a_C, b_C, u_C = load_coefficients(
                coefficients, (chunk_0 + next_i) * H + h, length - next_i * C, num_warps
            )
            Z = warpgroup_mma_wait(0, deps=[Z])
    tma.store_wait(0)


@gluon.jit
def reverse_scan(
    q_tma, k_tma, do_tma, inverse_tma, scores_tma, states_tma, coefficients, dr,
    final_dS, final_dM, initial_dS, initial_dM, slots, first, begin, end, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Carries dS and dM backwards over a sequence's chunks; stores them as they are after each chunk, and dR.

    dR = T⁻ᵀ dṼ is the gradient of V too. Q is needed last in a step, so its copy need not start a step ahead:
    one slot is enough.
    """
    block, n, h = gl.program_id(0), gl.program_id(1) // H, gl.program_id(1) % H
    token_0, chunk_0 = gl.load(begin + n), gl.load(first + n)
    length, slot_0 = gl.load(end + n) - token_0, gl.load(slots + n)
    count = (length + C - 1) // C
    tile: gl.constexpr = one_layout(C, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    own = (n.to(gl.int64) * H + h) * K * V + block * BV
    if final_dS is not None:
        dZ = load_states(final_dS + own, final_dM + own, K, V, num_warps)
    else:
        dZ = gl.zeros([2 * BV, K], gl.float32, both_layout(K, num_warps))
    q_s, q_arrived = ring(q_tma, 1)
    k_s, k_arrived = ring(k_tma)
    do_s, do_arrived = ring(do_tma)
    inverse_s, inverse_arrived = ring(inverse_tma)
    scores_s, scores_arrived = ring(scores_tma)
    dZ_s = outlets(states_tma, K)
    dr_s = gl.allocate_shared_memory(dtype, [C, BV], do_tma.layout)
    c_s = gl.allocate_shared_memory(gl.float32, [8 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    nothing = gl.zeros([2 * BV, C], gl.float32, both_layout(C, num_warps))
    value = h * V + block * BV
    last_i = gl.maximum(count - 1, 0)
    c, a_C, b_C, u_C = load_coefficients(
        coefficients, (chunk_0 + last_i) * H + h, length - last_i * C, num_warps
    )

    for step in range(-1, count):
        ahead = step + 1
        go = ahead < count
        i_ahead = count - 1 - ahead
        square = ((chunk_0 + i_ahead) * H + h) * C
        token = token_0 + i_ahead * C
        if step >= 0:
            tma.store_wait(0)  # of the step before
            c_s.store(c)
        slot = ahead % 2
        mbarrier.expect(k_arrived.index(slot), 2 * C * K, pred=go)
        mbarrier.expect(do_arrived.index(slot), 2 * C * BV, pred=go)
        mbarrier.expect(scores_arrived.index(slot), 2 * C * C, pred=go)
        mbarrier.expect(inverse_arrived.index(slot), 2 * C * C, pred=go)
        mbarrier.expect(q_arrived.index(0), 2 * C * K, pred=step >= 0)
        copy_in(q_tma, [token + C, h * K], q_arrived.index(0), q_s.index(0), pred=step >= 0)
        copy_in(k_tma, [token, h * K], k_arrived.index(slot), k_s.index(slot), pred=go)
        copy_in(do_tma, [token, value], do_arrived.index(slot), do_s.index(slot), pred=go)
        copy_in(scores_tma, [square, 0], scores_arrived.index(slot), scores_s.index(slot), pred=go)
        copy_in(inverse_tma, [square, 0], inverse_arrived.index(slot), inverse_s.index(slot), pred=go)
        if step >= 0:
            slot = step % 2
            i_now = count - 1 - step
            k_i = k_s.index(slot)
            wait(k_arrived, step)
            KdZ = nothing
            parts = tiles(dZ, num_warps)
            for i in gl.static_range(K // W):
                z = parts[i].to(dtype)
                put_state(z, dZ_s[i])
                KdZ = warpgroup_mma(
                    operand(z, C, num_warps), channels(k_i, i), KdZ, use_acc=i > 0, is_async=True
                )
                KdZ = warpgroup_mma_wait(1, deps=[KdZ])  # so that two operands need registers
            wait(do_arrived, step)
            do_i = do_s.index(slot).permute((1, 0)).load(tile).to(gl.float32)
            wait(scores_arrived, step)
            dx = warpgroup_mma(
                in_two(do_i, dtype, num_warps),
                scores_s.index(slot),
                nothing,
                use_acc=False,
                is_async=True,
            )
            send_states(states_tma, dZ_s, ((slot_0 + i_now) * H + h) * K, 2 * block * BV, K)
            dS, dM = halves(dZ, num_warps)
            dZ = joined(a_C * dS, u_C * dM - b_C * dS, num_warps)
            next_i = gl.maximum(i_now - 1, 0)
            c, a_C, b_C, u_C = load_coefficients(
                coefficients, (chunk_0 + next_i) * H + h, length - next_i * C, num_warps
            )
            dx, KdZ = warpgroup_mma_wait(0, deps=[dx, KdZ])
            dx_i = summed(dx, num_warps)
            KdS, KdM = halves(KdZ, num_warps)
            dx_i += coefficient(c_s, TO_S, num_warps) * KdS - coefficient(c_s, TO_M, num_warps) * KdM
            wait(inverse_arrived, step)
            dr_i = warpgroup_mma(
                in_two(dx_i, dtype, num_warps),
                inverse_s.index(slot),
                nothing,
                use_acc=False,
                is_async=True,
            )
            do_i = scale * do_s.index(slot).permute((1, 0)).load(tile).to(gl.float32)
            out_S, out_M = coefficient(c_s, A, num_warps) * do_i, -coefficient(c_s, B, num_warps) * do_i
            out = spread(out_S, out_M, dtype, K, num_warps)
            dr_i = warpgroup_mma_wait(0, deps=[dr_i])
            dr_i = summed(dr_i, num_warps)
            a, b_read = coefficient(c_s, A, num_warps), coefficient(c_s, B_READ, num_warps)
            read = spread(-a * dr_i, b_read * dr_i, dtype, K, num_warps)
            wait(q_arrived, step, 1)
            dZ = warpgroup_mma(read, k_i, dZ, is_async=True)
            dZ = warpgroup_mma(out, q_s.index(0), dZ, is_async=True)
            dr_s.permute((1, 0)).store(dr_i.to(dtype))
            dZ = warpgroup_mma_wait(0, deps=[dZ])
            at_V = (token_0 + i_now * C).to(gl.int64) * H * V + value
            store_rows(dr + at_V, dr_s, length - i_now * C, H * V, num_warps)
    if initial_dS is not None:
        store_states(dZ, initial_dS + own, initial_dM + own, K, V, num_warps)
    tma.store_wait(0)
