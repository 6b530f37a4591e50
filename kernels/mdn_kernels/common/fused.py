"""What stands around the operators, in one Triton kernel each way.

On CUDA and in eager mode: elsewhere the callers' own torch says the same, and Inductor fuses that. All of
them compute in float32 and round once, at the end. Triton is imported by the first call.

B batch · T tokens · D channels · H heads · K key channels · V value channels · W convolution width
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mdn_kernels.common.check import check_cu_seqlens


def launches(*tensors: Tensor) -> bool:
    """Whether the functions here take these."""
    eager = not torch.compiler.is_compiling() and all(x.is_cuda for x in tensors)
    return eager and all(x.dtype != torch.float64 for x in tensors)


def convolution_silu(
    x_BTD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, cu_seqlens: Tensor | None, sizes: Sequence[int]
) -> list[Tensor]:
    """SiLU of `short_convolution` without a state, plus a bias, its channels in contiguous parts of `sizes`.

    Raises:
        ValueError: for invalid cu_seqlens.
    """
    from mdn_kernels.common import convolution_triton

    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, *x_BTD.shape[:2])
    return convolution_triton.convolution_silu(x_BTD, weight_DW, bias_D, cu_seqlens, sizes)


def corrected_l2norm(d_H: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, *others: Tensor) -> list[Tensor]:
    """L2 norms over the last dimension: those of q − d k, of k, and of the others."""
    from mdn_kernels.common.normalize_triton import correct_and_normalize, normalize

    return [*correct_and_normalize(q_BTHK, k_BTHK, d_H), *map(normalize, others)]


def gated_rms_norm(
    x_BTHV: Tensor, gate_BTHV: Tensor, weight_V: Tensor, activation: str, eps: float
) -> Tensor:
    """RMSNorm(x) ⊙ activation(gate), the norm over the last dimension; "sigmoid" or "silu"."""
    from mdn_kernels.common import gated_norm_triton

    return gated_norm_triton.gated_rms_norm(x_BTHV, gate_BTHV, weight_V, activation, eps)


def swiglu(x_BTC: Tensor) -> Tensor:
    """silu(gate) ⊙ up of x = [gate, up], which alone is kept for the backward."""
    from mdn_kernels.common import swiglu_triton

    return swiglu_triton.swiglu(x_BTC)
