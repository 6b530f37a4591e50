"""The short convolution without a state, SiLU and the split of its channels, a Triton kernel a part each way.

Each part is contiguous, as the operators want it, and its gradient is read as it lies in memory: nothing is
copied or put together around it. The backward keeps the inputs alone. It has two kernels, between which the
gradient of what SiLU was given is rounded once: one that computes it anew for each token that reads it took
twice as long as FLA's on an H200.

B batch · T tokens · C channels · W filter width · P programs
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from mdn_kernels.common import convolution_kernels as kernels

BT, BC = 64, 64  # tokens and channels of a program, 16 elements a thread


class _ConvolutionSiLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        places: Tensor | None,
        sizes: list[int],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_BTC, weight_CW, bias_C, places)
        ctx.sizes = sizes
        B, T, _ = x_BTC.shape
        weight_WC = weight_CW.T.contiguous()
        outputs = tuple(x_BTC.new_empty(B, T, size) for size in sizes)
        with torch.cuda.device_of(x_BTC):
            for y, at in zip(outputs, _parts(sizes), strict=True):
                kernels.forward[_grid(y)](
                    *(x_BTC[..., at], weight_WC[:, at], _part(bias_C, at), places, y, *y.shape[1:]),
                    *(*x_BTC.stride(), weight_WC.stride(0), y.stride(0)),
                    BIAS=bias_C is not None,
                    **_options(weight_CW, places),
                )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_BTC, weight_CW, bias_C, places = ctx.saved_tensors
        (B, T, C), W = x_BTC.shape, weight_CW.shape[1]
        weight_WC = weight_CW.T.contiguous()
        dx = x_BTC.new_empty(B, T, C)
        rows = W + (bias_C is not None)
        sums = torch.empty(B * triton.cdiv(T, BT), rows, C, dtype=torch.float32, device=x_BTC.device)
        options = _options(weight_CW, places)
        with torch.cuda.device_of(x_BTC):
            for dy, at in zip(dys, _parts(ctx.sizes), strict=True):
                dz = x_BTC.new_empty(dy.shape)
                kernels.backward_silu[_grid(dy)](
                    *(x_BTC[..., at], weight_WC[:, at], _part(bias_C, at), places, dy, dz, sums[..., at]),
                    *(*dy.shape[1:], *x_BTC.stride(), weight_WC.stride(0), *dy.stride(), dz.stride(0), C),
                    BIAS=bias_C is not None,
                    **options,
                )
                kernels.backward_input[_grid(dy)](
                    *(weight_WC[:, at], places, dz, dx[..., at], *dy.shape[1:]),
                    *(weight_WC.stride(0), dz.stride(0), *dx.stride()[:2]),
                    **options,
                )
        total = sums.sum(0)
        dbias = None if bias_C is None else total[W].to(bias_C.dtype)
        return dx, total[:W].T.to(weight_CW.dtype), dbias, None, None


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size


def _part(bias_C: Tensor | None, at: slice) -> Tensor | None:
    return None if bias_C is None else bias_C[at]


def _grid(y_BTC: Tensor) -> tuple[int, int, int]:
    B, T, C = y_BTC.shape
    return triton.cdiv(T, BT), triton.cdiv(C, BC), B


def _options(weight_CW: Tensor, places: Tensor | None) -> dict[str, Any]:
    return {"W": weight_CW.shape[1], "PACKED": places is not None, "BT": BT, "BC": BC, "num_warps": 8}


def convolution_silu(
    x_BTC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    cu_seqlens: Tensor | None,
    sizes: Sequence[int],
) -> list[Tensor]:
    """SiLU of `short_convolution` plus a bias, its channels in parts of `sizes`: [B, T, size] each.

    Computed in float32 and rounded once. x may lie in memory as it likes; cu_seqlens are valid offsets.
    """
    places = None
    if cu_seqlens is not None:
        cu_seqlens, T = cu_seqlens.to(x_BTC.device), x_BTC.shape[1]
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=T)
        places = (torch.arange(T, device=x_BTC.device) - starts).int()
    return list(_ConvolutionSiLU.apply(x_BTC, weight_CW, bias_C, places, list(sizes)))
