"""The momentum delta rule with scans made for Hopper (compute capability 9.0), in Gluon.

What changed from v3_triton: its scans spent most of a step waiting. The operands of a step were loaded right
before they were used, its products were issued one after the other, each followed by a wait, and every access
to memory took address arithmetic of its own. Here the operands of the next step arrive by bulk copy while
this one computes, and independent products are in flight together. The forward reads S and M where the scan
holds them, so chunk states are neither written nor read there.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mdn_kernels.momentum_delta_rule import v4_kernels as kernels
from mdn_kernels.momentum_delta_rule.chunked import CHUNK, Chunks, Pair, Prepared, operator, pair

WARPS = 8


def _width(K: int, V: int) -> int:
    """BV, the value channels of a program: what shared memory holds."""
    return 64 if K <= 128 and V % 64 == 0 else 32


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def _blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """x, seen as a matrix with the columns `x` has last, in blocks for bulk copies."""
    return TensorDescriptor.from_tensor(x, [rows, columns], _layout(rows, columns, x.dtype))


def _tokens(x: Tensor, columns: int) -> TensorDescriptor:
    """[B, T, H, channels] in blocks of a chunk by `columns` channels."""
    return _blocks(x.view(-1, x.shape[2] * x.shape[3]), CHUNK, columns)


def _squares(x: Tensor) -> TensorDescriptor:
    return _blocks(x.view(-1, CHUNK), CHUNK, CHUNK)


def _chunk_states(k: Tensor, V: int, chunks: Chunks, BV: int) -> tuple[Pair, TensorDescriptor]:
    """Where S and M begin in one new tensor, and its blocks."""
    H, K = k.shape[2:]
    states = k.new_empty(chunks.count * H * K, 2 * V)
    return (states, states.flatten()[16:]), _blocks(states, K, 2 * BV)


class _Scans:
    paired = True

    def outputs(self, q, k, v, prepared: Prepared, initial, chunks: Chunks, scale):
        (H, K), V = q.shape[2:], v.shape[-1]
        BV = _width(K, V)
        final = pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
        o, residual = torch.empty_like(v), torch.empty_like(v)
        kernels.scan[V // BV, chunks.sequences * H](
            _tokens(q, K), _tokens(k, K), _tokens(v, BV),
            _squares(prepared.inverse), _squares(prepared.scores), prepared.coefficients,
            residual, o, *initial, *final, chunks.first, chunks.starts, chunks.count, scale,
            H=H, K=K, V=V, BV=BV, num_warps=WARPS,
        )  # fmt: skip
        return o, residual, final

    def states(self, k, values, solve: bool, prepared: Prepared, initial, chunks: Chunks):
        (H, K), V = k.shape[2:], values.shape[-1]
        BV = _width(K, V)
        if solve:
            _, values, _ = self.outputs(k, k, values, prepared, initial, chunks, 1.0)
        states, blocks = _chunk_states(k, V, chunks, BV)
        kernels.restore[V // BV, chunks.sequences * H](
            _tokens(k, K), _tokens(values, BV), blocks,
            prepared.coefficients, *initial, chunks.first, chunks.starts, chunks.count,
            H=H, K=K, V=V, BV=BV, num_warps=WARPS,
        )  # fmt: skip
        return values, states

    def gradients(self, q, k, do, prepared: Prepared, final, chunks: Chunks, scale):
        (H, K), V = q.shape[2:], do.shape[-1]
        BV = _width(K, V)
        dr = torch.empty_like(do)
        states, blocks = _chunk_states(q, V, chunks, BV)
        initial: Pair = pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
        kernels.reverse_scan[V // BV, chunks.sequences * H](
            _tokens(q, K), _tokens(k, K), _tokens(do, BV),
            _squares(prepared.inverse), _squares(prepared.scores),
            blocks, prepared.coefficients, dr, *final, *initial,
            chunks.first, chunks.starts, chunks.count, scale,
            H=H, K=K, V=V, BV=BV, num_warps=WARPS,
        )  # fmt: skip
        return dr, states, initial


SCANS = _Scans()
forward = operator("v4_hopper")
