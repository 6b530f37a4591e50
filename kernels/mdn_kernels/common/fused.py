"""What stands around the operators in one kernel each way: our own, or flash-linear-attention's where it is
trusted.

Only on CUDA and in eager mode: elsewhere the callers' own torch says the same, and Inductor fuses that. All
of them compute in float32 and round once, at the end.

B batch · T tokens · D channels · H heads · V value channels · W convolution width · N sequences
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from mdn_kernels.common.check import check_cu_seqlens
from mdn_kernels.common.fla import INSTALL, trusted

# FLA's kernels tune themselves on their first call, whatever its length: neither a prompt of a few tokens
# is to decide for those after it, nor one token of decoding, which is captured in a CUDA graph.
ENOUGH_TOKENS = 2048


def launches(*tensors: Tensor) -> bool:
    """Whether kernels of our own take these."""
    eager = not torch.compiler.is_compiling() and all(x.is_cuda for x in tensors)
    return eager and all(x.dtype != torch.float64 for x in tensors)


def fuses(*tensors: Tensor) -> bool:
    """Whether FLA's kernels take these, [B, T, ...] each. Imports FLA when it first matters."""
    if not launches(*tensors):
        return False
    if {x.dtype for x in tensors} not in ({torch.bfloat16}, {torch.float16}) or not _modules():
        return False
    B, T = tensors[0].shape[:2]
    return T > 1 and B * T >= ENOUGH_TOKENS


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


def gated_rms_norm(x_BTHV: Tensor, gate_BTHV: Tensor, weight_V: Tensor, gate: str, eps: float) -> Tensor:
    """RMSNorm(x) ⊙ gate(gate_BTHV), the norm over the last dimension; `gate` is "sigmoid" or "silu"."""
    return _modules()["norm"](x_BTHV, gate_BTHV, weight_V, None, activation=gate, eps=eps)


def swiglu(gate_BTD: Tensor, up_BTD: Tensor) -> Tensor:
    """silu(gate) ⊙ up, of which only the two inputs are kept for the backward."""
    return _modules()["swiglu"](gate_BTD, up_BTD)


@cache
def _modules() -> dict[str, Callable]:
    """FLA's gated norm and SwiGLU, or nothing where it is not trusted."""
    if not trusted():
        return {}
    try:
        return {
            "norm": import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated,
            "swiglu": import_module("fla.modules.activations").swiglu,
        }
    except ImportError as error:  # another version of FLA, or a part of it
        slower = "gated norm and SwiGLU stay in torch, which is slower"
        warnings.warn(f"{slower}: {error}; {INSTALL}", stacklevel=3)
        return {}
