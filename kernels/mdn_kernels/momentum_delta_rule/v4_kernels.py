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
def tile_layout(BV, warps):
    """Of a matrix [C, BV] with a row for each token: the warp groups share the columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 4 * BV // warps, 16])


@gluon.jit
def halves(z, layout: gl.constexpr):
    """The columns of S and of M [rows, BV]."""
    rows: gl.constexpr = z.shape[0]
    BV: gl.constexpr = z.shape[1] // 2
    S, M = gl.split(gl.permute(gl.reshape(z, [rows, BV // 16, 2, 16]), (0, 1, 3, 2)))
    S, M = gl.reshape(S, [rows, BV]), gl.reshape(M, [rows, BV])
    return gl.convert_layout(S, layout), gl.convert_layout(M, layout)


@gluon.jit
def token_pointers(x, V: gl.constexpr, H: gl.constexpr, BV: gl.constexpr, block, layout: gl.constexpr):
    row = gl.arange(0, C, gl.SliceLayout(1, layout))
    value = block * BV + gl.arange(0, BV, gl.SliceLayout(0, layout))
    return x + row[:, None] * (H * V) + value[None, :]


@gluon.jit
def load_row(x, layout: gl.constexpr):
    return gl.load(x + gl.arange(0, C, gl.SliceLayout(1, layout)))[:, None]


@gluon.jit
def ring(x_tma, count: gl.constexpr = 2):
    """Room for some blocks, and what tells when each has arrived."""
    room = gl.allocate_shared_memory(x_tma.dtype, [count] + x_tma.block_type.shape, x_tma.layout)  # noqa: RUF005
    arrived = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(count):
        mbarrier.init(arrived.index(slot), count=1)
    return room, arrived


@gluon.jit
def wait(arrived, step, count: gl.constexpr = 2):
    mbarrier.wait(arrived.index(step % count), (step // count) % 2)


@gluon.jit
def folded(x):
    """Sums pairs of columns that one thread holds; what is left is summed at the end."""
    W: gl.constexpr = x.shape[1]
    return gl.sum(gl.reshape(x, [x.shape[0], W // 32, 2, 16]), 2)


@gluon.jit
def total(x):
    return gl.sum(gl.sum(gl.sum(x, 2), 1), 0)


@gluon.jit(do_not_specialize=["N"])
def outer_backward(
    q_tma, k_tma, do_tma, dr_tma, residual_tma, states_tma, states_d_tma, coefficients,
    dq, dk, sums, inner, owner, slots, first, begin, end, N, scale,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """What dQ, dK and the coefficients get from the states before (S, M) and after (dS, dM) the chunk; as in
    v3_kernels, but one program for all of a chunk's key channels, so that there is one K block of sums."""
    W: gl.constexpr = 64  # channels of a tile, of keys and of values
    DEPTH: gl.constexpr = 3
    slot, h = gl.program_id(0), gl.program_id(1)
    n = gl.load(owner + slot)
    if n >= N:
        return
    i = slot - gl.load(slots + n)
    token = gl.load(begin + n) + i * C
    chunk = gl.load(first + n) + i
    tile: gl.constexpr = tile_layout(W, num_warps)
    wide: gl.constexpr = tile_layout(2 * W, num_warps)
    q_s, q_arrived = ring(q_tma, 1)
    k_s, k_arrived = ring(k_tma, 1)
    do_s, do_arrived = ring(do_tma, DEPTH)
    dr_s, dr_arrived = ring(dr_tma, DEPTH)
    x_s, x_arrived = ring(residual_tma, DEPTH)
    Z_s, Z_arrived = ring(states_tma, DEPTH)
    dZ_s, dZ_arrived = ring(states_d_tma, DEPTH)
    fence_async_shared()
    at_slot = slot.to(gl.int64) * H + h
    state = (slot * H + h) * K
    at = coefficients + (chunk * H + h).to(gl.int64) * 6 * C
    a, b = load_row(at + A * C, tile), load_row(at + B * C, tile)
    b_read = load_row(at + B_READ * C, tile)
    to_S, to_M = load_row(at + TO_S * C, tile), load_row(at + TO_M * C, tile)
    zero_row = gl.zeros([C], gl.float32, gl.SliceLayout(1, tile))
    D_a, D_b, D_b_read, D_to_S, D_to_M = zero_row, zero_row, zero_row, zero_row, zero_row
    zero = gl.zeros([C, W], gl.float32, tile)
    doS, doM, drS, drM, xdS, xdM = zero, zero, zero, zero, zero, zero
    dS_S, dS_M, dM_M = folded(zero), folded(zero), folded(zero)
    tiles: gl.constexpr = V // W
    count: gl.constexpr = K // W * tiles

    for step in range(1 - DEPTH, count):
        ahead = step + DEPTH - 1  # its operands start on their way
        go = ahead < count
        place = ahead % DEPTH
        channel, value = ahead // tiles * W, ahead % tiles * W
        mbarrier.expect(do_arrived.index(place), 2 * C * W, pred=go)
        mbarrier.expect(dr_arrived.index(place), 2 * C * W, pred=go)
        mbarrier.expect(x_arrived.index(place), 2 * C * W, pred=go)
        mbarrier.expect(Z_arrived.index(place), 4 * W * W, pred=go)
        mbarrier.expect(dZ_arrived.index(place), 4 * W * W, pred=go)
        copy_in(do_tma, [token, h * V + value], do_arrived.index(place), do_s.index(place), pred=go)
        copy_in(dr_tma, [token, h * V + value], dr_arrived.index(place), dr_s.index(place), pred=go)
        copy_in(residual_tma, [token, h * V + value], x_arrived.index(place), x_s.index(place), pred=go)
        copy_in(states_tma, [state + channel, 2 * value], Z_arrived.index(place), Z_s.index(place), pred=go)
        copy_in(
            states_d_tma, [state + channel, 2 * value], dZ_arrived.index(place), dZ_s.index(place), pred=go
        )
        if step >= 0:
            place = step % DEPTH
            channel = step // tiles * W
            fresh = step % tiles == 0
            mbarrier.expect(q_arrived.index(0), 2 * C * W, pred=fresh)
            mbarrier.expect(k_arrived.index(0), 2 * C * W, pred=fresh)
            copy_in(q_tma, [token, h * K + channel], q_arrived.index(0), q_s.index(0), pred=fresh)
            copy_in(k_tma, [token, h * K + channel], k_arrived.index(0), k_s.index(0), pred=fresh)
            wait(Z_arrived, step, DEPTH)
            wait(dZ_arrived, step, DEPTH)
            wait(do_arrived, step, DEPTH)
            wait(dr_arrived, step, DEPTH)
            wait(x_arrived, step, DEPTH)
            Z_i, dZ_i = Z_s.index(place), dZ_s.index(place)
            for j in gl.static_range(W // 16):
                S_j = Z_i.slice(32 * j, 16, dim=1).permute((1, 0))
                M_j = Z_i.slice(32 * j + 16, 16, dim=1).permute((1, 0))
                dS_j = dZ_i.slice(32 * j, 16, dim=1).permute((1, 0))
                dM_j = dZ_i.slice(32 * j + 16, 16, dim=1).permute((1, 0))
                do_j = do_s.index(place).slice(16 * j, 16, dim=1)
                dr_j = dr_s.index(place).slice(16 * j, 16, dim=1)
                x_j = x_s.index(place).slice(16 * j, 16, dim=1)
                doS = warpgroup_mma(do_j, S_j, doS, is_async=True)
                doM = warpgroup_mma(do_j, M_j, doM, is_async=True)
                drS = warpgroup_mma(dr_j, S_j, drS, is_async=True)
                drM = warpgroup_mma(dr_j, M_j, drM, is_async=True)
                xdS = warpgroup_mma(x_j, dS_j, xdS, is_async=True)
                xdM = warpgroup_mma(x_j, dM_j, xdM, is_async=True)
            S, M = halves(Z_i.load(wide), tile)
            dS, dM = halves(dZ_i.load(wide), tile)
            S, M, dS, dM = S.to(gl.float32), M.to(gl.float32), dS.to(gl.float32), dM.to(gl.float32)
            dS_S += folded(dS * S)
            dS_M += folded(dS * M)
            dM_M += folded(dM * M)
            doS, doM, drS, drM, xdS, xdM = warpgroup_mma_wait(0, deps=[doS, doM, drS, drM, xdS, xdM])
            if step % tiles == tiles - 1:
                wait(q_arrived, step // tiles, 1)
                wait(k_arrived, step // tiles, 1)
                q_i = q_s.index(0).load(tile).to(gl.float32)
                k_i = k_s.index(0).load(tile).to(gl.float32)
                out = at_slot * C * K + channel
                gl.store(token_pointers(dq + out, K, 1, W, 0, tile), scale * (a * doS - b * doM))
                gl.store(
                    token_pointers(dk + out, K, 1, W, 0, tile),
                    b_read * drM - a * drS + to_S * xdS - to_M * xdM,
                )
                D_a += gl.sum(scale * q_i * doS - k_i * drS, 1)
                D_b -= gl.sum(scale * q_i * doM, 1)
                D_b_read += gl.sum(k_i * drM, 1)
                D_to_S += gl.sum(k_i * xdS, 1)
                D_to_M += gl.sum(k_i * xdM, 1)
                doS, doM, drS, drM, xdS, xdM = zero, zero, zero, zero, zero, zero

    row = gl.arange(0, C, gl.SliceLayout(1, tile))
    exists = row < gl.load(end + n) - token
    at = sums + at_slot * 5 * C + row
    gl.store(at, gl.where(exists, D_a, 0.0))
    gl.store(at + C, gl.where(exists, D_b, 0.0))
    gl.store(at + 2 * C, gl.where(exists, D_b_read, 0.0))
    gl.store(at + 3 * C, gl.where(exists, D_to_S, 0.0))
    gl.store(at + 4 * C, gl.where(exists, D_to_M, 0.0))
    gl.store(inner + at_slot * 3, total(dS_S))
    gl.store(inner + at_slot * 3 + 1, total(dS_M))
    gl.store(inner + at_slot * 3 + 2, total(dM_M))
