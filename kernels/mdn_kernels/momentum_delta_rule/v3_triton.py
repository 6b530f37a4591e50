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
    Chunks,
    Launch,
    Pair,
    Prepared,
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


class _Scans:
    paired = False

    def outputs(self, q, k, v, prepared: Prepared, initial, chunks: Chunks, scale):
        (H, K), V = q.shape[2:], v.shape[-1]
        final = pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
        residual, states = self._scan(k, v, True, prepared, initial, final, chunks, BV=16)
        o, options = torch.empty_like(v), tiles(q.dtype, K, V)
        if q.dtype != torch.float32:
            options["BV"] = min(128, whole(V, q.dtype))
        kernels.output[triton.cdiv(V, options["BV"]), chunks.count, H](
            q, prepared.scores, prepared.coefficients, residual, *states, o, *chunks.tables, scale,
            H=H, K=K, V=V, **options,
        )  # fmt: skip
        return o, residual, final

    def states(self, k, values, solve: bool, prepared: Prepared, initial, chunks: Chunks):
        return self._scan(k, values, solve, prepared, initial, (None, None), chunks)

    def gradients(self, q, k, do, prepared: Prepared, final, chunks: Chunks, scale):
        (H, K), V = q.shape[2:], do.shape[-1]
        options = scan_tiles(q.dtype, K, V)
        dr, states = torch.empty_like(do), pair(q, chunks.count, H, K, V)
        initial = pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
        kernels.reverse_scan[triton.cdiv(V, options["BV"]), chunks.sequences * H](
            q, k, do, *prepared, dr, *final, *states, *initial,
            chunks.first, chunks.starts, chunks.count, scale, H=H, K=K, V=V, **options,
        )  # fmt: skip
        return dr, states, initial

    def _scan(
        self, k, values, solve: bool, prepared: Prepared, initial, final, chunks: Chunks, **changes
    ) -> tuple[Tensor, Pair]:
        (H, K), V = k.shape[2:], values.shape[-1]
        options = scan_tiles(k.dtype, K, V) | changes
        residual = torch.empty_like(values) if solve else values
        states = pair(k, chunks.count, H, K, V)
        kernels.scan[triton.cdiv(V, options["BV"]), chunks.sequences * H](
            k, values if solve else None, prepared.inverse, prepared.coefficients, residual,
            *initial, *states, *final, chunks.first, chunks.starts, chunks.count,
            H=H, K=K, V=V, SOLVE=solve, **options,
        )  # fmt: skip
        return residual, states


SCANS = _Scans()
forward = operator("v3_triton")
