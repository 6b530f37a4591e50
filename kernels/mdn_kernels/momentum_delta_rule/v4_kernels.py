# mypy: ignore-errors
"""What the kernels of v4_hopper in Gluon share, and the one that is parallel over chunks.

Same letters and workspaces as v3_kernels. Operands come by bulk copies (TMA) into slots of shared memory some
steps ahead, and products that do not wait for each other are in flight together. Rows behind a sequence's end
are another sequence's tokens here; they meet only zeros of the workspaces. Chunk states in memory are
[chunks, H, K, 2 V]: 16 columns of S, the same 16 of M, the next 16 of S, and so on.
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

# Triton 3.9 has another name for it.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

C = gl.constexpr(CHUNK)
A, B, B_READ, TO_S, TO_M, U = (gl.constexpr(i) for i in range(6))  # rows of the coefficients


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
