"""The momentum delta rule in Triton, forward and backward, by the chunk form of v2_segsum.

What changed from v2_segsum: one scan carries S and M in registers and stores them before each chunk, and
the outputs follow for all chunks at once. The backward is written by hand (chunked.py): the same scan
restores the states from the residuals Ṽ, and a reverse scan carries dS and dM.
"""

import torch
import triton
from torch import Tensor

from mdn_kernels.momentum_delta_rule import v3_kernels as kernels
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
    whole,
)


def scan_tiles(dtype: torch.dtype, K: int, V: int) -> Launch:
    """Of the scans, which hold all of a key's channels."""
    BK = whole(K, dtype)
    if dtype == torch.float32:
        return tiles(dtype, K, V) | {"BK": BK, "BV": 16, "num_warps": 8 if K <= 64 else 16}
    return tiles(dtype, K, V) | {"BK": BK, "BV": min(32, whole(V, dtype)), "num_warps": 4}


def launches(dtype: torch.dtype, K: int, V: int) -> dict[str, Launch]:
    """For the record of a benchmark."""
    return {"scans": scan_tiles(dtype, K, V), "others": tiles(dtype, K, V)}


class _Scans:
    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept, initial: States, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Pair]:
        (H, K), V = q.shape[2:], v.shape[-1]
        chunks = layout.whole
        o, residual = torch.empty_like(v), torch.empty_like(v)
        final = pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
        states = self._scan(k, v, residual, kept, initial, final, chunks, layout.span, BV=16)
        options = tiles(q.dtype, K, V)
        if q.dtype != torch.float32:
            options["BV"] = min(128, whole(V, q.dtype))
        kernels.output[triton.cdiv(V, options["BV"]), chunks.count, H](
            q, kept.scores, kept.coefficients, residual, *states, o, *chunks.tables, scale,
            H=H, K=K, V=V, **options,
        )  # fmt: skip
        return o, residual, final

    def states(self, k: Tensor, residual: Tensor, kept: Kept, initial: States, chunks: Chunks) -> Pair:
        return self._scan(k, None, residual, kept, initial, (None, None), chunks, chunks.count)

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
    ) -> tuple[Pair, Pair]:
        (H, K), V = q.shape[2:], do.shape[-1]
        options = scan_tiles(q.dtype, K, V)
        states = pair(q, chunks.count, H, K, V)
        initial = pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
        kernels.reverse_scan[triton.cdiv(V, options["BV"]), chunks.sequences * H](
            q, k, do, *kept[:3], dr, *final, *states, *initial,
            chunks.slots, chunks.first, chunks.begin, chunks.end, scale, H=H, K=K, V=V, **options,
        )  # fmt: skip
        return states, initial

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
        options = tiles(q.dtype, K, V)
        if q.dtype != torch.float32:
            options["num_stages"] = 3
        blocks = triton.cdiv(K, int(options["BK"]))
        dq, dk = pair(q, chunks.count, H, CHUNK, K, dtype=torch.float32)
        sums = q.new_empty(chunks.count, H, blocks, 5, CHUNK, dtype=torch.float32)
        inner = q.new_empty(chunks.count, H, blocks, 3, dtype=torch.float32)
        kernels.outer_backward[blocks, chunks.count, H](
            q, k, do, dr, residual, kept.coefficients, *states, *states_d, dq, dk, sums, inner,
            *chunks.tables, scale, H=H, K=K, V=V, **options,
        )  # fmt: skip
        return dq, dk, sums, inner

    def _scan(
        self,
        k: Tensor,
        v: Tensor | None,
        residual: Tensor,
        kept: Kept,
        initial: States,
        final: States,
        chunks: Chunks,
        span: int,
        **changes: int,
    ) -> Pair:
        (H, K), V = k.shape[2:], residual.shape[-1]
        options = scan_tiles(k.dtype, K, V) | changes
        states = pair(k, chunks.count, H, K, V)
        kernels.scan[triton.cdiv(V, options["BV"]), chunks.sequences * H](
            k, v, kept.inverse, kept.coefficients, residual, *initial, *states, *final,
            kept.marks_S, kept.marks_M, span, chunks.slots, chunks.first, chunks.begin, chunks.end,
            H=H, K=K, V=V, SOLVE=v is not None, **options,
        )  # fmt: skip
        return states


SCANS = _Scans()
forward = operator("v3_triton")
