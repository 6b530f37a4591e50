"""The momentum delta rule with scans made for Hopper (compute capability 9.0), in Gluon.

What changed from v3_triton: its scans spent most of a step waiting. The operands of a step were loaded right
before they were used, its products were issued one after the other, each followed by a wait, and every access
to memory took address arithmetic of its own. Here the operands of the next step arrive by bulk copy while
this one computes, and independent products are in flight together. The forward reads S and M where the scan
holds them, so chunk states are neither written nor read there.
"""

from functools import cache
from math import ceil

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mdn_kernels.momentum_delta_rule import v4_kernels, v4_scans
from mdn_kernels.momentum_delta_rule.chunked import (
    CHUNK,
    Chunks,
    ChunkStates,
    Kept,
    Launch,
    Layout,
    Pair,
    States,
    operator,
    pair,
    tiles,
)

WARPS = 8  # of outer_backward
LANES = 8  # value channels of a warp of the scans
# Time of a step with 64 value channels in times of one with 32, as measured on an H200.
STEP = {"scan": 1.55, "reverse_scan": 1.65}


@cache
def _width(kernel: str, K: int, V: int, scans: int, device: torch.device) -> int:
    """BV, the value channels of a program of a scan. Of the two widths, 64 reads K and Q half as often, and
    32 makes twice the programs. What counts is how many follow each other on a multiprocessor, times what a
    step costs; one of them fits on it, and of the narrow ones of `reverse_scan` two where K is small.

    scans: heads of all sequences.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    resident = processors * (2 if kernel == "reverse_scan" and K <= 128 else 1)
    narrow, wide = ceil(V // 32 * scans / resident), ceil(V // 64 * scans / processors)
    return 64 if STEP[kernel] * wide <= narrow else 32


def launches(dtype: torch.dtype, K: int, V: int) -> dict[str, Launch]:
    """For the record of a benchmark."""
    return {
        "scans": {"channels_a_warp": LANES},
        "outer_backward": {"num_warps": WARPS},
        "others": tiles(dtype, K, V),
    }


class _Blocks(TensorDescriptor):
    def __post_init__(self) -> None:
        """No checks: they cost as much as a launch, and what is described here is always in order."""


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def _blocks(x: Tensor, rows: int, columns: int) -> _Blocks:
    """x, seen as a matrix with the columns `x` has last, in blocks for bulk copies."""
    return _Blocks(x, x.shape, x.stride(), [rows, columns], _layout(rows, columns, x.dtype))


def _tokens(x: Tensor, columns: int) -> _Blocks:
    """[B, T, H, channels] in blocks of a chunk by `columns` channels."""
    return _blocks(x.view(-1, x.shape[2] * x.shape[3]), CHUNK, columns)


def _squares(x: Tensor) -> _Blocks:
    return _blocks(x.view(-1, CHUNK), CHUNK, CHUNK)


def _chunk_states(k: Tensor, V: int, chunks: Chunks) -> Tensor:
    """For Z of each chunk, [slots · H · K, 2 V]."""
    H, K = k.shape[2:]
    return k.new_empty(chunks.count * H * K, 2 * V)


class _Scans:
    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept, initial: States, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Pair]:
        (H, K), V = q.shape[2:], v.shape[-1]
        o, residual = torch.empty_like(v), torch.empty_like(v)
        chunks = layout.whole
        BV = _width("scan", K, V, chunks.sequences * H, k.device)
        final = pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
        v4_scans.scan[V // BV, chunks.sequences * H](
            _tokens(q, K), _tokens(k, K), _tokens(v, BV), _squares(kept.inverse), _squares(kept.scores),
            kept.coefficients, residual, o, *initial, *final, kept.marks_S, kept.marks_M, layout.span,
            chunks.first, chunks.begin, chunks.end, scale, H=H, K=K, V=V, BV=BV, num_warps=BV // LANES,
        )  # fmt: skip
        return o, residual, final

    def states(self, k: Tensor, residual: Tensor, kept: Kept, initial: States, chunks: Chunks) -> ChunkStates:
        (H, K), V = k.shape[2:], residual.shape[-1]
        BV = 32  # writing is what takes time
        states = _chunk_states(k, V, chunks)
        v4_scans.restore[V // BV, chunks.sequences * H](
            _tokens(k, K), _tokens(residual, BV), _blocks(states, 64, 2 * BV), kept.coefficients, *initial,
            chunks.slots, chunks.first, chunks.begin, chunks.end, H=H, K=K, V=V, BV=BV, num_warps=BV // LANES,
        )  # fmt: skip
        return (states,)

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        do: Tensor,
        dr: Tensor,
        kept: Kept,
        final: States,
        chunks: Chunks,
        scale: float,
    ) -> tuple[ChunkStates, Pair]:
        (H, K), V = q.shape[2:], do.shape[-1]
        BV = _width("reverse_scan", K, V, chunks.sequences * H, k.device)
        states = _chunk_states(q, V, chunks)
        initial = pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
        v4_scans.reverse_scan[V // BV, chunks.sequences * H](
            _tokens(q, K), _tokens(k, K), _tokens(do, BV), _squares(kept.inverse), _squares(kept.scores),
            _blocks(states, 64, 2 * BV), kept.coefficients, dr, *final, *initial,
            chunks.slots, chunks.first, chunks.begin, chunks.end, scale,
            H=H, K=K, V=V, BV=BV, num_warps=BV // LANES,
        )  # fmt: skip
        return (states,), initial

    def outer(
        self,
        q: Tensor,
        k: Tensor,
        do: Tensor,
        dr: Tensor,
        residual: Tensor,
        kept: Kept,
        states: ChunkStates,
        states_d: ChunkStates,
        chunks: Chunks,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (H, K), V = q.shape[2:], do.shape[-1]
        dq, dk = pair(q, chunks.count, H, CHUNK, K, dtype=torch.float32)
        sums = q.new_empty(chunks.count, H, 1, 5, CHUNK, dtype=torch.float32)
        inner = q.new_empty(chunks.count, H, 1, 3, dtype=torch.float32)
        inputs = [_tokens(x, 64) for x in (q, k, do, dr, residual)]
        v4_kernels.outer_backward[chunks.count, H](
            *inputs, *(_blocks(x, 64, 128) for (x,) in (states, states_d)), kept.coefficients,
            dq, dk, sums, inner, *chunks.tables, scale, H=H, K=K, V=V, num_warps=WARPS,
        )  # fmt: skip
        return dq, dk, sums, inner


SCANS = _Scans()
forward = operator("v4_hopper")
