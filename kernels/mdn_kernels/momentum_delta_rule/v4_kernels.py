# mypy: ignore-errors
"""The scans of v4_hopper in Gluon: the recurrence over chunks with both states in registers.

Same letters and workspaces as v3_kernels. Each step's operands come by bulk copies (TMA) into one of two
slots of shared memory while the step before computes, products that do not wait for each other are in flight
together, and chunk states leave by bulk copies. Rows behind a sequence's end are another sequence's tokens
here; they meet only zeros of the workspaces. A program keeps BV value channels; warps share the rows of the
states. What one warp group stores, another one's products read: buffers are written once a step, and a fence
stands between the stores and the barrier that the compiler adds before the products.
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

# Triton 3.9 has other names for them.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

C = gl.constexpr(64)
A, B, B_READ, TO_S, TO_M, U = (gl.constexpr(i) for i in range(6))  # rows of the coefficients


@gluon.constexpr_function
def tile_layout(BV, warps):
    """Of a product [C, BV]: the warp groups share the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 4 * BV // warps, 16])


@gluon.constexpr_function
def state_layout(K, BV, warps):
    """Of a state [K, BV]: the warps share the rows, if there are enough for all."""
    rows = min(warps, K // 16)
    return gl.NVMMADistributedLayout([3, 0], [rows, warps // rows], [16, BV * rows // warps, 16])


@gluon.jit
def state_pointers(x, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, block, layout: gl.constexpr):
    channel = gl.arange(0, K, gl.SliceLayout(1, layout))
    value = block * BV + gl.arange(0, BV, gl.SliceLayout(0, layout))
    return x + channel[:, None] * V + value[None, :]


@gluon.jit
def token_pointers(x, V: gl.constexpr, H: gl.constexpr, BV: gl.constexpr, block, layout: gl.constexpr):
    row = gl.arange(0, C, gl.SliceLayout(1, layout))
    value = block * BV + gl.arange(0, BV, gl.SliceLayout(0, layout))
    return x + row[:, None] * (H * V) + value[None, :]


@gluon.jit
def load_row(x, layout: gl.constexpr):
    return gl.load(x + gl.arange(0, C, gl.SliceLayout(1, layout)))[:, None]


@gluon.jit
def slots(x_tma, count: gl.constexpr):
    return gl.allocate_shared_memory(x_tma.dtype, [count] + x_tma.block_type.shape, x_tma.layout)  # noqa: RUF005


@gluon.jit
def new_barriers():
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(barriers.index(slot), count=1)
    fence_async_shared()
    return barriers


@gluon.jit(do_not_specialize=["chunks"])
def scan(
    q_tma, k_tma, v_tma, inverse_tma, scores_tma, coefficients, residual, o,
    initial_S, initial_M, final_S, final_M, first, starts, chunks, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Residuals and outputs of all chunks, and the final states.

    R = V − a ⊙ K S + b' ⊙ K M, Ṽ = T⁻¹ R, O = a ⊙ Q S − b ⊙ Q M + [(Q Kᵀ) ⊙ Γ ⊙ η] Ṽ.
    """
    block, n, h = gl.program_id(0), gl.program_id(1) // H, gl.program_id(1) % H
    begin = gl.load(starts + n)
    length = gl.load(starts + n + 1) - begin
    chunk = gl.load(first + n)
    count = (length + C - 1) // C
    tile: gl.constexpr = tile_layout(BV, num_warps)
    whole: gl.constexpr = state_layout(K, BV, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    S = gl.zeros([K, BV], gl.float32, whole)
    M = gl.zeros([K, BV], gl.float32, whole)
    own = (n.to(gl.int64) * H + h) * K * V
    if initial_S is not None:
        S = gl.load(state_pointers(initial_S + own, K, V, BV, block, whole))
        M = gl.load(state_pointers(initial_M + own, K, V, BV, block, whole))
    q_s, k_s, v_s = slots(q_tma, 2), slots(k_tma, 2), slots(v_tma, 2)
    inverse_s, scores_s = slots(inverse_tma, 2), slots(scores_tma, 2)
    state_smem: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, BV], dtype)
    S_s = gl.allocate_shared_memory(dtype, [K, BV], state_smem)
    M_s = gl.allocate_shared_memory(dtype, [K, BV], state_smem)
    R_s = gl.allocate_shared_memory(dtype, [C, BV], v_tma.layout)
    x_s = gl.allocate_shared_memory(dtype, [C, BV], v_tma.layout)
    xS_s = gl.allocate_shared_memory(dtype, [C, BV], v_tma.layout)
    xM_s = gl.allocate_shared_memory(dtype, [C, BV], v_tma.layout)
    arrived = new_barriers()
    size: gl.constexpr = 2 * (2 * C * K + C * BV + 2 * C * C)
    plane = chunks.to(gl.int64) * H * C
    nothing = gl.zeros([C, BV], gl.float32, tile)

    for step in range(-1, count):
        ahead = step + 1  # its operands start on their way
        go = ahead < count
        slot = ahead % 2
        square = ((chunk + ahead) * H + h) * C
        token = begin + ahead * C
        ready = arrived.index(slot)
        mbarrier.expect(ready, size, pred=go)
        copy_in(k_tma, [token, h * K], ready, k_s.index(slot), pred=go)
        copy_in(q_tma, [token, h * K], ready, q_s.index(slot), pred=go)
        copy_in(v_tma, [token, h * V + block * BV], ready, v_s.index(slot), pred=go)
        copy_in(inverse_tma, [square, 0], ready, inverse_s.index(slot), pred=go)
        copy_in(scores_tma, [square, 0], ready, scores_s.index(slot), pred=go)
        if step >= 0:
            slot = step % 2
            at = coefficients + ((chunk + step) * H + h).to(gl.int64) * C
            rows = length - step * C
            last = at + gl.minimum(rows, C) - 1
            a, b = load_row(at + A * plane, tile), load_row(at + B * plane, tile)
            b_read = load_row(at + B_READ * plane, tile)
            to_S, to_M = load_row(at + TO_S * plane, tile), load_row(at + TO_M * plane, tile)
            a_C, b_C = gl.load(last + A * plane), gl.load(last + B * plane)
            u_C = gl.load(last + U * plane)
            S_s.store(S.to(dtype))
            M_s.store(M.to(dtype))
            fence_async_shared()
            mbarrier.wait(arrived.index(slot), (step // 2) % 2)
            q_i, k_i = q_s.index(slot), k_s.index(slot)
            KS = warpgroup_mma(k_i, S_s, nothing, use_acc=False, is_async=True)
            KM = warpgroup_mma(k_i, M_s, nothing, use_acc=False, is_async=True)
            QS = warpgroup_mma(q_i, S_s, nothing, use_acc=False, is_async=True)
            QM = warpgroup_mma(q_i, M_s, nothing, use_acc=False, is_async=True)
            v_i = v_s.index(slot).load(tile).to(gl.float32)
            KS, KM = warpgroup_mma_wait(2, deps=[KS, KM])
            R_s.store((v_i - a * KS + b_read * KM).to(dtype))
            fence_async_shared()
            x = warpgroup_mma(inverse_s.index(slot), R_s, nothing, use_acc=False, is_async=True)
            S = a_C * S - b_C * M
            M = u_C * M
            QS, QM, x = warpgroup_mma_wait(0, deps=[QS, QM, x])
            xS_s.store((to_S * x).to(dtype))
            xM_s.store((-to_M * x).to(dtype))
            x_s.store(x.to(dtype))
            fence_async_shared()
            S = warpgroup_mma(k_i.permute((1, 0)), xS_s, S, is_async=True)
            M = warpgroup_mma(k_i.permute((1, 0)), xM_s, M, is_async=True)
            o_i = scale * (a * QS - b * QM)
            o_i = warpgroup_mma(scores_s.index(slot), x_s, o_i, is_async=True)
            at_V = ((begin + step * C).to(gl.int64) * H + h) * V
            mask = (gl.arange(0, C, gl.SliceLayout(1, tile)) < rows)[:, None]
            gl.store(token_pointers(residual + at_V, V, H, BV, block, tile), x.to(dtype), mask=mask)
            S, M, o_i = warpgroup_mma_wait(0, deps=[S, M, o_i])
            gl.store(token_pointers(o + at_V, V, H, BV, block, tile), o_i.to(dtype), mask=mask)
    gl.store(state_pointers(final_S + own, K, V, BV, block, whole), S)
    gl.store(state_pointers(final_M + own, K, V, BV, block, whole), M)
    for slot in gl.static_range(2):
        mbarrier.invalidate(arrived.index(slot))


@gluon.jit(do_not_specialize=["chunks"])
def restore(
    k_tma, residual_tma, states_S_tma, states_M_tma, coefficients, initial_S, initial_M,
    first, starts, chunks,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The states before each chunk, from the residuals."""
    block, n, h = gl.program_id(0), gl.program_id(1) // H, gl.program_id(1) % H
    begin = gl.load(starts + n)
    length = gl.load(starts + n + 1) - begin
    chunk = gl.load(first + n)
    count = (length + C - 1) // C
    tile: gl.constexpr = tile_layout(BV, num_warps)
    whole: gl.constexpr = state_layout(K, BV, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    S = gl.zeros([K, BV], gl.float32, whole)
    M = gl.zeros([K, BV], gl.float32, whole)
    if initial_S is not None:
        own = (n.to(gl.int64) * H + h) * K * V
        S = gl.load(state_pointers(initial_S + own, K, V, BV, block, whole))
        M = gl.load(state_pointers(initial_M + own, K, V, BV, block, whole))
    k_s, x_s = slots(k_tma, 2), slots(residual_tma, 2)
    S_s = gl.allocate_shared_memory(dtype, [K, BV], states_S_tma.layout)
    M_s = gl.allocate_shared_memory(dtype, [K, BV], states_S_tma.layout)
    xS_s = gl.allocate_shared_memory(dtype, [C, BV], residual_tma.layout)
    xM_s = gl.allocate_shared_memory(dtype, [C, BV], residual_tma.layout)
    arrived = new_barriers()
    size: gl.constexpr = 2 * (C * K + C * BV)
    plane = chunks.to(gl.int64) * H * C

    for step in range(-1, count):
        ahead = step + 1
        go = ahead < count
        token = begin + ahead * C
        ready = arrived.index(ahead % 2)
        mbarrier.expect(ready, size, pred=go)
        copy_in(k_tma, [token, h * K], ready, k_s.index(ahead % 2), pred=go)
        copy_in(residual_tma, [token, h * V + block * BV], ready, x_s.index(ahead % 2), pred=go)
        if step >= 0:
            slot = step % 2
            at = coefficients + ((chunk + step) * H + h).to(gl.int64) * C
            last = at + gl.minimum(length - step * C, C) - 1
            to_S, to_M = load_row(at + TO_S * plane, tile), load_row(at + TO_M * plane, tile)
            a_C, b_C = gl.load(last + A * plane), gl.load(last + B * plane)
            u_C = gl.load(last + U * plane)
            tma.store_wait(0)  # of the step before
            S_s.store(S.to(dtype))
            M_s.store(M.to(dtype))
            mbarrier.wait(arrived.index(slot), (step // 2) % 2)
            x = x_s.index(slot).load(tile).to(gl.float32)
            xS_s.store((to_S * x).to(dtype))
            xM_s.store((-to_M * x).to(dtype))
            fence_async_shared()
            at_state = ((chunk + step) * H + h) * K
            copy_out(states_S_tma, [at_state, block * BV], S_s)
            copy_out(states_M_tma, [at_state, block * BV], M_s)
            k_i = k_s.index(slot).permute((1, 0))
            S = warpgroup_mma(k_i, xS_s, a_C * S - b_C * M, is_async=True)
            M = warpgroup_mma(k_i, xM_s, u_C * M, is_async=True)
            S, M = warpgroup_mma_wait(0, deps=[S, M])
    tma.store_wait(0)
    for slot in gl.static_range(2):
        mbarrier.invalidate(arrived.index(slot))


@gluon.jit(do_not_specialize=["chunks"])
def reverse_scan(
    q_tma, k_tma, do_tma, inverse_tma, scores_tma, states_S_tma, states_M_tma, coefficients, dr,
    final_dS, final_dM, initial_dS, initial_dM, first, starts, chunks, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Carries dS and dM backwards over a sequence's chunks; stores them as they are after each chunk, and dR.

    dR = T⁻ᵀ dṼ is the gradient of V too.
    """
    block, n, h = gl.program_id(0), gl.program_id(1) // H, gl.program_id(1) % H
    begin = gl.load(starts + n)
    length = gl.load(starts + n + 1) - begin
    chunk = gl.load(first + n)
    count = (length + C - 1) // C
    tile: gl.constexpr = tile_layout(BV, num_warps)
    whole: gl.constexpr = state_layout(K, BV, num_warps)
    dtype: gl.constexpr = k_tma.dtype
    dS = gl.zeros([K, BV], gl.float32, whole)
    dM = gl.zeros([K, BV], gl.float32, whole)
    own = (n.to(gl.int64) * H + h) * K * V
    if final_dS is not None:
        dS = gl.load(state_pointers(final_dS + own, K, V, BV, block, whole))
        dM = gl.load(state_pointers(final_dM + own, K, V, BV, block, whole))
    q_s, k_s, do_s = slots(q_tma, 2), slots(k_tma, 2), slots(do_tma, 2)
    inverse_s, scores_s = slots(inverse_tma, 2), slots(scores_tma, 2)
    dS_s = gl.allocate_shared_memory(dtype, [K, BV], states_S_tma.layout)
    dM_s = gl.allocate_shared_memory(dtype, [K, BV], states_S_tma.layout)
    # The gradient of the residuals, and what enters dS and dM from the outputs and from the readings.
    dx_s = gl.allocate_shared_memory(dtype, [C, BV], do_tma.layout)
    outS_s = gl.allocate_shared_memory(dtype, [C, BV], do_tma.layout)
    outM_s = gl.allocate_shared_memory(dtype, [C, BV], do_tma.layout)
    readS_s = gl.allocate_shared_memory(dtype, [C, BV], do_tma.layout)
    readM_s = gl.allocate_shared_memory(dtype, [C, BV], do_tma.layout)
    arrived = new_barriers()
    size: gl.constexpr = 2 * (2 * C * K + C * BV + 2 * C * C)
    plane = chunks.to(gl.int64) * H * C
    nothing = gl.zeros([C, BV], gl.float32, tile)

    for step in range(-1, count):
        ahead = step + 1
        go = ahead < count
        slot = ahead % 2
        i = count - 1 - ahead
        square = ((chunk + i) * H + h) * C
        token = begin + i * C
        ready = arrived.index(slot)
        mbarrier.expect(ready, size, pred=go)
        copy_in(k_tma, [token, h * K], ready, k_s.index(slot), pred=go)
        copy_in(q_tma, [token, h * K], ready, q_s.index(slot), pred=go)
        copy_in(do_tma, [token, h * V + block * BV], ready, do_s.index(slot), pred=go)
        copy_in(inverse_tma, [square, 0], ready, inverse_s.index(slot), pred=go)
        copy_in(scores_tma, [square, 0], ready, scores_s.index(slot), pred=go)
        if step >= 0:
            slot = step % 2
            i = count - 1 - step
            at = coefficients + ((chunk + i) * H + h).to(gl.int64) * C
            rows = length - i * C
            last = at + gl.minimum(rows, C) - 1
            a, b = load_row(at + A * plane, tile), load_row(at + B * plane, tile)
            b_read = load_row(at + B_READ * plane, tile)
            to_S, to_M = load_row(at + TO_S * plane, tile), load_row(at + TO_M * plane, tile)
            a_C, b_C = gl.load(last + A * plane), gl.load(last + B * plane)
            u_C = gl.load(last + U * plane)
            tma.store_wait(0)  # of the step before
            dS_s.store(dS.to(dtype))
            dM_s.store(dM.to(dtype))
            mbarrier.wait(arrived.index(slot), (step // 2) % 2)
            do_i = scale * do_s.index(slot).load(tile).to(gl.float32)
            outS_s.store((a * do_i).to(dtype))
            outM_s.store((-b * do_i).to(dtype))
            fence_async_shared()
            at_state = ((chunk + i) * H + h) * K
            copy_out(states_S_tma, [at_state, block * BV], dS_s)
            copy_out(states_M_tma, [at_state, block * BV], dM_s)
            q_i, k_i = q_s.index(slot).permute((1, 0)), k_s.index(slot)
            KdS = warpgroup_mma(k_i, dS_s, nothing, use_acc=False, is_async=True)
            KdM = warpgroup_mma(k_i, dM_s, nothing, use_acc=False, is_async=True)
            dx = warpgroup_mma(
                scores_s.index(slot).permute((1, 0)), do_s.index(slot), nothing, use_acc=False, is_async=True
            )
            dM = warpgroup_mma(q_i, outM_s, u_C * dM - b_C * dS, is_async=True)
            dS = warpgroup_mma(q_i, outS_s, a_C * dS, is_async=True)
            KdS, KdM, dx = warpgroup_mma_wait(2, deps=[KdS, KdM, dx])
            dx_s.store((dx + to_S * KdS - to_M * KdM).to(dtype))
            fence_async_shared()
            dr_i = warpgroup_mma(
                inverse_s.index(slot).permute((1, 0)), dx_s, nothing, use_acc=False, is_async=True
            )
            dM, dS, dr_i = warpgroup_mma_wait(0, deps=[dM, dS, dr_i])
            readS_s.store((-a * dr_i).to(dtype))
            readM_s.store((b_read * dr_i).to(dtype))
            fence_async_shared()
            k_i = k_i.permute((1, 0))
            dM = warpgroup_mma(k_i, readM_s, dM, is_async=True)
            dS = warpgroup_mma(k_i, readS_s, dS, is_async=True)
            at_V = ((begin + i * C).to(gl.int64) * H + h) * V
            mask = (gl.arange(0, C, gl.SliceLayout(1, tile)) < rows)[:, None]
            gl.store(token_pointers(dr + at_V, V, H, BV, block, tile), dr_i.to(dtype), mask=mask)
            dM, dS = warpgroup_mma_wait(0, deps=[dM, dS])
    if initial_dS is not None:
        gl.store(state_pointers(initial_dS + own, K, V, BV, block, whole), dS)
        gl.store(state_pointers(initial_dM + own, K, V, BV, block, whole), dM)
    tma.store_wait(0)
    for slot in gl.static_range(2):
        mbarrier.invalidate(arrived.index(slot))
