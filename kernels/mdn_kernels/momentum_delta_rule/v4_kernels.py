# mypy: ignore-errors
"""The scans of v4_hopper in Gluon: the recurrence over chunks with both states in registers.

Same letters and workspaces as v3_kernels. Each step's operands come by bulk copies (TMA) into one of two
slots of shared memory while the step before computes, products that do not wait for each other are in flight
together, and chunk states leave by bulk copies. Rows behind a sequence's end are another sequence's tokens
here; they meet only zeros of the workspaces. What one warp group stores, another one's products read: buffers
are written once a step, and a fence stands between the stores and the barrier that the compiler adds before
the products.

A program keeps BV value channels of both states as one matrix Z [K, 2 BV], so that S and M share every
product: 16 columns of S, the same 16 of M, the next 16 of S, and so on. `halves` and `joined` only rename
registers. The chunk states in memory have the same columns, [chunks, H, K, 2 V].
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

from mdn_kernels.common.chunk_tables import CHUNK

# Triton 3.9 has other names for them.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

C = gl.constexpr(CHUNK)
A, B, B_READ, TO_S, TO_M, U = (gl.constexpr(i) for i in range(6))  # rows of the coefficients


@gluon.constexpr_function
def tile_layout(BV, warps):
    """Of a matrix [C, BV] with a row for each token: the warp groups share the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 4 * BV // warps, 16])


@gluon.constexpr_function
def state_layout(K, width, warps):
    """Of a matrix [K, width]: the warps share the rows, if there are enough for all."""
    rows = min(warps, K // 16)
    return gl.NVMMADistributedLayout([3, 0], [rows, warps // rows], [16, width * rows // warps, 16])


@gluon.jit
def halves(z, layout: gl.constexpr):
    """The columns of S and of M [rows, BV]."""
    rows: gl.constexpr = z.shape[0]
    BV: gl.constexpr = z.shape[1] // 2
    S, M = gl.split(gl.permute(gl.reshape(z, [rows, BV // 16, 2, 16]), (0, 1, 3, 2)))
    S, M = gl.reshape(S, [rows, BV]), gl.reshape(M, [rows, BV])
    return gl.convert_layout(S, layout), gl.convert_layout(M, layout)


@gluon.jit
def joined(S, M, layout: gl.constexpr):
    """The reverse of `halves`, [rows, 2 BV]."""
    rows: gl.constexpr = S.shape[0]
    BV: gl.constexpr = S.shape[1]
    z = gl.join(gl.reshape(S, [rows, BV // 16, 16]), gl.reshape(M, [rows, BV // 16, 16]))
    return gl.convert_layout(gl.reshape(gl.permute(z, (0, 1, 3, 2)), [rows, 2 * BV]), layout)


@gluon.jit
def state_pointers(x, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, block, layout: gl.constexpr):
    channel = gl.arange(0, K, gl.SliceLayout(1, layout))
    value = block * BV + gl.arange(0, BV, gl.SliceLayout(0, layout))
    return x + channel[:, None] * V + value[None, :]


@gluon.jit
def load_states(S, M, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, block, warps: gl.constexpr):
    """Z [K, 2 BV] from states in memory; zeros if there are none."""
    half: gl.constexpr = state_layout(K, BV, warps)
    both: gl.constexpr = state_layout(K, 2 * BV, warps)
    z = gl.zeros([K, 2 * BV], gl.float32, both)
    if S is not None:
        z = joined(
            gl.load(state_pointers(S, K, V, BV, block, half)),
            gl.load(state_pointers(M, K, V, BV, block, half)),
            both,
        )
    return z


@gluon.jit
def store_states(z, S, M, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, block, warps: gl.constexpr):
    half: gl.constexpr = state_layout(K, BV, warps)
    z_S, z_M = halves(z, half)
    gl.store(state_pointers(S, K, V, BV, block, half), z_S)
    gl.store(state_pointers(M, K, V, BV, block, half), z_M)


@gluon.jit
def token_pointers(x, V: gl.constexpr, H: gl.constexpr, BV: gl.constexpr, block, layout: gl.constexpr):
    row = gl.arange(0, C, gl.SliceLayout(1, layout))
    value = block * BV + gl.arange(0, BV, gl.SliceLayout(0, layout))
    return x + row[:, None] * (H * V) + value[None, :]


@gluon.jit
def load_row(x, layout: gl.constexpr):
    return gl.load(x + gl.arange(0, C, gl.SliceLayout(1, layout)))[:, None]


@gluon.jit
def room(x_tma, count: gl.constexpr):
    """Shared memory for some blocks."""
    return gl.allocate_shared_memory(x_tma.dtype, [count] + x_tma.block_type.shape, x_tma.layout)  # noqa: RUF005


@gluon.jit
def barriers(count: gl.constexpr):
    """What tells when a block has arrived."""
    arrived = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(count):
        mbarrier.init(arrived.index(slot), count=1)
    return arrived


@gluon.jit
def ring(x_tma, count: gl.constexpr = 2):
    return room(x_tma, count), barriers(count)


@gluon.jit
def wait(arrived, step, count: gl.constexpr = 2):
    mbarrier.wait(arrived.index(step % count), (step // count) % 2)


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
    tile: gl.constexpr = tile_layout(BV, num_warps)
    wide: gl.constexpr = tile_layout(2 * BV, num_warps)
    half: gl.constexpr = state_layout(K, BV, num_warps)
    both: gl.constexpr = state_layout(K, 2 * BV, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    own = (n.to(gl.int64) * H + h) * K * V
    if initial_S is not None:
        Z = load_states(initial_S + own, initial_M + own, K, V, BV, block, num_warps)
    else:
        Z = load_states(None, None, K, V, BV, block, num_warps)
    q_s, q_arrived = ring(q_tma)
    k_s, k_arrived = ring(k_tma)
    v_s, v_arrived = ring(v_tma)
    inverse_s, inverse_arrived = ring(inverse_tma)
    scores_s, scores_arrived = ring(scores_tma)
    Z_s = gl.allocate_shared_memory(
        dtype, [K, 2 * BV], gl.NVMMASharedLayout.get_default_for([K, 2 * BV], dtype)
    )
    R_s = gl.allocate_shared_memory(dtype, [C, BV], v_tma.layout)
    x_s = gl.allocate_shared_memory(dtype, [C, BV], v_tma.layout)
    into_s = gl.allocate_shared_memory(
        dtype, [C, 2 * BV], gl.NVMMASharedLayout.get_default_for([C, 2 * BV], dtype)
    )
    fence_async_shared()
    nothing = gl.zeros([C, BV], gl.float32, tile)
    nothing_wide = gl.zeros([C, 2 * BV], gl.float32, wide)

    for part in range((count + span - 1) // span):
        if part > 0:
            mark = (part - 1) * gl.num_programs(1).to(gl.int64) * K * V + own
            store_states(Z, marks_S + mark, marks_M + mark, K, V, BV, block, num_warps)
        for step in range(gl.where(part > 0, part * span, -1), gl.minimum((part + 1) * span, count)):
            ahead = step + 1  # its operands start on their way
            go = ahead < count
            slot = ahead % 2
            square = ((chunk_0 + ahead) * H + h) * C
            token = token_0 + ahead * C
            mbarrier.expect(k_arrived.index(slot), 2 * C * K, pred=go)
            mbarrier.expect(q_arrived.index(slot), 2 * C * K, pred=go)
            mbarrier.expect(v_arrived.index(slot), 2 * C * BV, pred=go)
            mbarrier.expect(inverse_arrived.index(slot), 2 * C * C, pred=go)
            mbarrier.expect(scores_arrived.index(slot), 2 * C * C, pred=go)
            copy_in(k_tma, [token, h * K], k_arrived.index(slot), k_s.index(slot), pred=go)
            copy_in(v_tma, [token, h * V + block * BV], v_arrived.index(slot), v_s.index(slot), pred=go)
            copy_in(inverse_tma, [square, 0], inverse_arrived.index(slot), inverse_s.index(slot), pred=go)
            copy_in(q_tma, [token, h * K], q_arrived.index(slot), q_s.index(slot), pred=go)
            copy_in(scores_tma, [square, 0], scores_arrived.index(slot), scores_s.index(slot), pred=go)
            if step >= 0:
                slot = step % 2
                at = coefficients + ((chunk_0 + step) * H + h).to(gl.int64) * 6 * C
                rows = length - step * C
                last = at + gl.minimum(rows, C) - 1
                a, b = load_row(at + A * C, tile), load_row(at + B * C, tile)
                b_read = load_row(at + B_READ * C, tile)
                to_S, to_M = load_row(at + TO_S * C, tile), load_row(at + TO_M * C, tile)
                a_C, b_C = gl.load(last + A * C), gl.load(last + B * C)
                u_C = gl.load(last + U * C)
                Z_s.store(Z.to(dtype))
                fence_async_shared()
                wait(k_arrived, step)
                k_i = k_s.index(slot)
                KZ = warpgroup_mma(k_i, Z_s, nothing_wide, use_acc=False, is_async=True)
                wait(v_arrived, step)
                v_i = v_s.index(slot).load(tile).to(gl.float32)
                S, M = halves(Z, half)
                Z = joined(a_C * S - b_C * M, u_C * M, both)
                KZ = warpgroup_mma_wait(0, deps=[KZ])
                KS, KM = halves(KZ, tile)
                R_s.store((v_i - a * KS + b_read * KM).to(dtype))
                fence_async_shared()
                wait(inverse_arrived, step)
                x = warpgroup_mma(inverse_s.index(slot), R_s, nothing, use_acc=False, is_async=True)
                wait(q_arrived, step)
                QZ = warpgroup_mma(q_s.index(slot), Z_s, nothing_wide, use_acc=False, is_async=True)
                x = warpgroup_mma_wait(1, deps=[x])
                into_s.store(joined((to_S * x).to(dtype), (-to_M * x).to(dtype), wide))
                x_s.store(x.to(dtype))
                fence_async_shared()
                Z = warpgroup_mma(k_i.permute((1, 0)), into_s, Z, is_async=True)
                at_V = ((token_0 + step * C).to(gl.int64) * H + h) * V
                mask = (gl.arange(0, C, gl.SliceLayout(1, tile)) < rows)[:, None]
                gl.store(token_pointers(residual + at_V, V, H, BV, block, tile), x.to(dtype), mask=mask)
                QZ = warpgroup_mma_wait(1, deps=[QZ])
                QS, QM = halves(QZ, tile)
                wait(scores_arrived, step)
                o_i = warpgroup_mma(scores_s.index(slot), x_s, scale * (a * QS - b * QM), is_async=True)
                Z, o_i = warpgroup_mma_wait(0, deps=[Z, o_i])
                gl.store(token_pointers(o + at_V, V, H, BV, block, tile), o_i.to(dtype), mask=mask)
    store_states(Z, final_S + own, final_M + own, K, V, BV, block, num_warps)


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
    tile: gl.constexpr = tile_layout(BV, num_warps)
    wide: gl.constexpr = tile_layout(2 * BV, num_warps)
    half: gl.constexpr = state_layout(K, BV, num_warps)
    both: gl.constexpr = state_layout(K, 2 * BV, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    if initial_S is not None:
        own = (n.to(gl.int64) * H + h) * K * V
        Z = load_states(initial_S + own, initial_M + own, K, V, BV, block, num_warps)
    else:
        Z = load_states(None, None, K, V, BV, block, num_warps)
    k_s, k_arrived = ring(k_tma)
    x_s, x_arrived = ring(residual_tma)
    Z_s = gl.allocate_shared_memory(dtype, [K, 2 * BV], states_tma.layout)
    into_s = gl.allocate_shared_memory(
        dtype, [C, 2 * BV], gl.NVMMASharedLayout.get_default_for([C, 2 * BV], dtype)
    )
    fence_async_shared()

    for step in range(-1, count):
        ahead = step + 1
        go = ahead < count
        slot = ahead % 2
        token = token_0 + ahead * C
        mbarrier.expect(k_arrived.index(slot), 2 * C * K, pred=go)
        mbarrier.expect(x_arrived.index(slot), 2 * C * BV, pred=go)
        copy_in(k_tma, [token, h * K], k_arrived.index(slot), k_s.index(slot), pred=go)
        copy_in(residual_tma, [token, h * V + block * BV], x_arrived.index(slot), x_s.index(slot), pred=go)
        if step >= 0:
            slot = step % 2
            at = coefficients + ((chunk_0 + step) * H + h).to(gl.int64) * 6 * C
            last = at + gl.minimum(length - step * C, C) - 1
            to_S, to_M = load_row(at + TO_S * C, tile), load_row(at + TO_M * C, tile)
            a_C, b_C = gl.load(last + A * C), gl.load(last + B * C)
            u_C = gl.load(last + U * C)
            tma.store_wait(0)  # of the step before
            Z_s.store(Z.to(dtype))
            wait(x_arrived, step)
            exists = (gl.arange(0, C, gl.SliceLayout(1, tile)) < length - step * C)[:, None]
            x = gl.where(exists, x_s.index(slot).load(tile).to(gl.float32), 0.0)
            into_s.store(joined((to_S * x).to(dtype), (-to_M * x).to(dtype), wide))
            fence_async_shared()
            copy_out(states_tma, [((slot_0 + step) * H + h) * K, 2 * block * BV], Z_s)
            S, M = halves(Z, half)
            Z = joined(a_C * S - b_C * M, u_C * M, both)
            wait(k_arrived, step)
            Z = warpgroup_mma(k_s.index(slot).permute((1, 0)), into_s, Z, is_async=True)
            Z = warpgroup_mma_wait(0, deps=[Z])
    tma.store_wait(0)


@gluon.jit
def reverse_scan(
    q_tma, k_tma, do_tma, inverse_tma, scores_tma, states_tma, coefficients, dr,
    final_dS, final_dM, initial_dS, initial_dM, slots, first, begin, end, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Carries dS and dM backwards over a sequence's chunks; stores them as they are after each chunk, and dR.

    dR = T⁻ᵀ dṼ is the gradient of V too.
    """
    block, n, h = gl.program_id(0), gl.program_id(1) // H, gl.program_id(1) % H
    token_0, chunk_0 = gl.load(begin + n), gl.load(first + n)
    length, slot_0 = gl.load(end + n) - token_0, gl.load(slots + n)
    count = (length + C - 1) // C
    tile: gl.constexpr = tile_layout(BV, num_warps)
    wide: gl.constexpr = tile_layout(2 * BV, num_warps)
    half: gl.constexpr = state_layout(K, BV, num_warps)
    both: gl.constexpr = state_layout(K, 2 * BV, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    own = (n.to(gl.int64) * H + h) * K * V
    if final_dS is not None:
        dZ = load_states(final_dS + own, final_dM + own, K, V, BV, block, num_warps)
    else:
        dZ = load_states(None, None, K, V, BV, block, num_warps)
    q_s, q_arrived = ring(q_tma)
    k_s, k_arrived = ring(k_tma)
    do_s, do_arrived = ring(do_tma)
    inverse_s, inverse_arrived = ring(inverse_tma)
    scores_s, scores_arrived = ring(scores_tma)
    # What enters dS and dM from the outputs and from the residuals.
    into: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, 2 * BV], dtype)
    dZ_s = gl.allocate_shared_memory(dtype, [K, 2 * BV], states_tma.layout)
    dx_s = gl.allocate_shared_memory(dtype, [C, BV], do_tma.layout)
    out_s = gl.allocate_shared_memory(dtype, [C, 2 * BV], into)
    read_s = gl.allocate_shared_memory(dtype, [C, 2 * BV], into)
    fence_async_shared()
    nothing = gl.zeros([C, BV], gl.float32, tile)
    nothing_wide = gl.zeros([C, 2 * BV], gl.float32, wide)

    for step in range(-1, count):
        ahead = step + 1
        go = ahead < count
        slot = ahead % 2
        i = count - 1 - ahead
        square = ((chunk_0 + i) * H + h) * C
        token = token_0 + i * C
        mbarrier.expect(k_arrived.index(slot), 2 * C * K, pred=go)
        mbarrier.expect(q_arrived.index(slot), 2 * C * K, pred=go)
        mbarrier.expect(do_arrived.index(slot), 2 * C * BV, pred=go)
        mbarrier.expect(inverse_arrived.index(slot), 2 * C * C, pred=go)
        mbarrier.expect(scores_arrived.index(slot), 2 * C * C, pred=go)
        copy_in(do_tma, [token, h * V + block * BV], do_arrived.index(slot), do_s.index(slot), pred=go)
        copy_in(k_tma, [token, h * K], k_arrived.index(slot), k_s.index(slot), pred=go)
        copy_in(scores_tma, [square, 0], scores_arrived.index(slot), scores_s.index(slot), pred=go)
        copy_in(q_tma, [token, h * K], q_arrived.index(slot), q_s.index(slot), pred=go)
        copy_in(inverse_tma, [square, 0], inverse_arrived.index(slot), inverse_s.index(slot), pred=go)
        if step >= 0:
            slot = step % 2
            i = count - 1 - step
            at = coefficients + ((chunk_0 + i) * H + h).to(gl.int64) * 6 * C
            rows = length - i * C
            last = at + gl.minimum(rows, C) - 1
            a, b = load_row(at + A * C, tile), load_row(at + B * C, tile)
            b_read = load_row(at + B_READ * C, tile)
            to_S, to_M = load_row(at + TO_S * C, tile), load_row(at + TO_M * C, tile)
            a_C, b_C = gl.load(last + A * C), gl.load(last + B * C)
            u_C = gl.load(last + U * C)
            tma.store_wait(0)  # of the step before
            dZ_s.store(dZ.to(dtype))
            wait(do_arrived, step)
            do_i = scale * do_s.index(slot).load(tile).to(gl.float32)
            out_s.store(joined((a * do_i).to(dtype), (-b * do_i).to(dtype), wide))
            fence_async_shared()
            copy_out(states_tma, [((slot_0 + i) * H + h) * K, 2 * block * BV], dZ_s)
            wait(k_arrived, step)
            k_i = k_s.index(slot)
            KdZ = warpgroup_mma(k_i, dZ_s, nothing_wide, use_acc=False, is_async=True)
            wait(scores_arrived, step)
            dx = warpgroup_mma(
                scores_s.index(slot).permute((1, 0)), do_s.index(slot), nothing, use_acc=False, is_async=True
            )
            dS, dM = halves(dZ, half)
            dZ = joined(a_C * dS, u_C * dM - b_C * dS, both)
            wait(q_arrived, step)
            dZ = warpgroup_mma(q_s.index(slot).permute((1, 0)), out_s, dZ, is_async=True)
            KdZ, dx = warpgroup_mma_wait(1, deps=[KdZ, dx])
            KdS, KdM = halves(KdZ, tile)
            dx_s.store((dx + to_S * KdS - to_M * KdM).to(dtype))
            fence_async_shared()
            wait(inverse_arrived, step)
            dr_i = warpgroup_mma(
                inverse_s.index(slot).permute((1, 0)), dx_s, nothing, use_acc=False, is_async=True
            )
            dZ, dr_i = warpgroup_mma_wait(0, deps=[dZ, dr_i])
            read_s.store(joined((-a * dr_i).to(dtype), (b_read * dr_i).to(dtype), wide))
            fence_async_shared()
            dZ = warpgroup_mma(k_i.permute((1, 0)), read_s, dZ, is_async=True)
            at_V = ((token_0 + i * C).to(gl.int64) * H + h) * V
            mask = (gl.arange(0, C, gl.SliceLayout(1, tile)) < rows)[:, None]
            gl.store(token_pointers(dr + at_V, V, H, BV, block, tile), dr_i.to(dtype), mask=mask)
            dZ = warpgroup_mma_wait(0, deps=[dZ])
    if initial_dS is not None:
        store_states(dZ, initial_dS + own, initial_dM + own, K, V, BV, block, num_warps)
    tma.store_wait(0)


@gluon.jit
def load_column(x, layout: gl.constexpr):
    return gl.load(x + gl.arange(0, C, gl.SliceLayout(0, layout)))[None, :]


@gluon.jit(do_not_specialize=["N"])
def outer_backward(
    q_tma, k_tma, do_tma, dr_tma, residual_tma, states_tma, states_d_tma, coefficients,
    dq, dk, sums, inner, owner, slots, first, begin, end, N, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """What dQ, dK and the coefficients get from the states before (S, M) and after (dS, dM) the chunk; as in
    v3_kernels, but one program for all of a chunk's key channels, so that there is one K block of sums.

    Products are transposed, [key channels, C]: so each warp group reads states that no other one reads.
    """
    BK: gl.constexpr = states_tma.block_type.shape[0]  # channels of a tile, of keys and of values
    BV: gl.constexpr = do_tma.block_type.shape[1]
    DEPTH: gl.constexpr = 4
    slot, h = gl.program_id(0), gl.program_id(1)
    n = gl.load(owner + slot)
    if n >= N:
        return
    i = slot - gl.load(slots + n)
    token = gl.load(begin + n) + i * C
    chunk = gl.load(first + n) + i
    tile: gl.constexpr = state_layout(BK, C, num_warps)
    half: gl.constexpr = state_layout(BK, BV, num_warps)
    both: gl.constexpr = state_layout(BK, 2 * BV, num_warps)
    q_s, k_s, keys_arrived = room(q_tma, 1), room(k_tma, 1), barriers(1)
    do_s, dr_s, x_s = room(do_tma, DEPTH), room(dr_tma, DEPTH), room(residual_tma, DEPTH)
    Z_s, dZ_s, values_arrived = room(states_tma, DEPTH), room(states_d_tma, DEPTH), barriers(DEPTH)
    fence_async_shared()
    at_slot = slot.to(gl.int64) * H + h
    state = (slot * H + h) * K
    at = coefficients + (chunk * H + h).to(gl.int64) * 6 * C
    zero_row = gl.zeros([C], gl.float32, gl.SliceLayout(0, tile))
    D_a, D_b, D_b_read, D_to_S, D_to_M = zero_row, zero_row, zero_row, zero_row, zero_row
    zero = gl.zeros([BK, C], gl.float32, tile)
    doS, doM, drS, drM, xdS, xdM = zero, zero, zero, zero, zero, zero
    zero_column = gl.zeros([BK], gl.float32, gl.SliceLayout(1, half))
    dS_S, dS_M, dM_M = zero_column, zero_column, zero_column
    tiles: gl.constexpr = V // BV
    count: gl.constexpr = K // BK * tiles

    for step in range(1 - DEPTH, count):
        ahead = step + DEPTH - 1  # its operands start on their way
        go = ahead < count
        place = ahead % DEPTH
        channel, value = ahead // tiles * BK, ahead % tiles * BV
        arrived = values_arrived.index(place)
        mbarrier.expect(arrived, 6 * C * BV + 8 * BK * BV, pred=go)
        copy_in(states_tma, [state + channel, 2 * value], arrived, Z_s.index(place), pred=go)
        copy_in(states_d_tma, [state + channel, 2 * value], arrived, dZ_s.index(place), pred=go)
        copy_in(do_tma, [token, h * V + value], arrived, do_s.index(place), pred=go)
        copy_in(dr_tma, [token, h * V + value], arrived, dr_s.index(place), pred=go)
        copy_in(residual_tma, [token, h * V + value], arrived, x_s.index(place), pred=go)
        if step >= 0:
            place = step % DEPTH
            channel = step // tiles * BK
            fresh = step % tiles == 0
            mbarrier.expect(keys_arrived.index(0), 4 * C * BK, pred=fresh)
            copy_in(q_tma, [token, h * K + channel], keys_arrived.index(0), q_s.index(0), pred=fresh)
            copy_in(k_tma, [token, h * K + channel], keys_arrived.index(0), k_s.index(0), pred=fresh)
            wait(values_arrived, step, DEPTH)
            Z_i, dZ_i = Z_s.index(place), dZ_s.index(place)
            do_i, dr_i = do_s.index(place).permute((1, 0)), dr_s.index(place).permute((1, 0))
            x_i = x_s.index(place).permute((1, 0))
            for j in gl.static_range(BV // 16):
                S_j, M_j = Z_i.slice(32 * j, 16, dim=1), Z_i.slice(32 * j + 16, 16, dim=1)
                dS_j, dM_j = dZ_i.slice(32 * j, 16, dim=1), dZ_i.slice(32 * j + 16, 16, dim=1)
                do_j, dr_j = do_i.slice(16 * j, 16, dim=0), dr_i.slice(16 * j, 16, dim=0)
                x_j = x_i.slice(16 * j, 16, dim=0)
                doS = warpgroup_mma(S_j, do_j, doS, is_async=True)
                doM = warpgroup_mma(M_j, do_j, doM, is_async=True)
                drS = warpgroup_mma(S_j, dr_j, drS, is_async=True)
                drM = warpgroup_mma(M_j, dr_j, drM, is_async=True)
                xdS = warpgroup_mma(dS_j, x_j, xdS, is_async=True)
                xdM = warpgroup_mma(dM_j, x_j, xdM, is_async=True)
            S, M = halves(Z_i.load(both), half)
            dS, dM = halves(dZ_i.load(both), half)
            S, M, dS, dM = S.to(gl.float32), M.to(gl.float32), dS.to(gl.float32), dM.to(gl.float32)
            dS_S += gl.sum(dS * S, 1)
            dS_M += gl.sum(dS * M, 1)
            dM_M += gl.sum(dM * M, 1)
            doS, doM, drS, drM, xdS, xdM = warpgroup_mma_wait(0, deps=[doS, doM, drS, drM, xdS, xdM])
            if step % tiles == tiles - 1:
                wait(keys_arrived, step // tiles, 1)
                key = channel + gl.arange(0, BK, gl.SliceLayout(1, tile))
                out = at_slot * C * K + key[:, None] + gl.arange(0, C, gl.SliceLayout(0, tile))[None, :] * K
                a, b = load_column(at + A * C, tile), load_column(at + B * C, tile)
                gl.store(dq + out, scale * (a * doS - b * doM))
                to_S, to_M = load_column(at + TO_S * C, tile), load_column(at + TO_M * C, tile)
                b_read = load_column(at + B_READ * C, tile)
                gl.store(dk + out, b_read * drM - a * drS + to_S * xdS - to_M * xdM)
                q_i = scale * q_s.index(0).permute((1, 0)).load(tile).to(gl.float32)
                D_a += gl.sum(q_i * doS, 0)
                D_b -= gl.sum(q_i * doM, 0)
                k_i = k_s.index(0).permute((1, 0)).load(tile).to(gl.float32)
                D_a -= gl.sum(k_i * drS, 0)
                D_b_read += gl.sum(k_i * drM, 0)
                D_to_S += gl.sum(k_i * xdS, 0)
                D_to_M += gl.sum(k_i * xdM, 0)
                doS, doM, drS, drM, xdS, xdM = zero, zero, zero, zero, zero, zero

    row = gl.arange(0, C, gl.SliceLayout(0, tile))
    exists = row < gl.load(end + n) - token
    at = sums + at_slot * 5 * C + row
    gl.store(at, gl.where(exists, D_a, 0.0))
    gl.store(at + C, gl.where(exists, D_b, 0.0))
    gl.store(at + 2 * C, gl.where(exists, D_b_read, 0.0))
    gl.store(at + 3 * C, gl.where(exists, D_to_S, 0.0))
    gl.store(at + 4 * C, gl.where(exists, D_to_M, 0.0))
    gl.store(inner + at_slot * 3, gl.sum(dS_S, 0))
    gl.store(inner + at_slot * 3 + 1, gl.sum(dS_M, 0))
    gl.store(inner + at_slot * 3 + 2, gl.sum(dM_M, 0))
