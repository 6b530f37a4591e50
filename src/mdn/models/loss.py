"""Cross-entropy of the next token, from hidden states and head, a chunk of tokens at a time.

The logits of all tokens would be the largest tensor of a training step ([65536, 50257] in float32: 13 GB).
The total is a plain sum over tokens, so each chunk's gradient is known as soon as its logits are: the forward
pass computes the gradients of hidden states and head chunk by chunk, in place of the logits, and keeps those.

N tokens · C tokens of a chunk · D model width · V vocabulary · W rows of the head as it is multiplied, W ≥ V
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mdn.mixers.base import precise
from mdn_kernels.common import fused

IGNORED = -100
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**29}  # of a chunk's logits; on a CPU they stay in its cache
# W is a multiple of it. Tensor cores take rows of whole 16 bytes: with GPT-2's odd 50257 tokens cuBLAS falls
# back to kernels of two generations ago, which made the head a fifth of a 1.3B training step on an H200.
ALIGNMENT = {"cpu": 1, "cuda": 64}


def cross_entropy(
    hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, reduction: str = "mean"
) -> Tensor:
    """−log softmax(W h)[label], in nats and float32; a label of −100 is left out.

    reduction: mean over the labels that count (0 if none does), sum, or none: [B, T], without a gradient.

    Raises:
        ValueError: for another reduction, or labels of another shape.
    """
    if labels_BT.shape != hidden_BTD.shape[:-1]:
        raise ValueError(
            f"labels: {list(labels_BT.shape)} do not match hidden states {list(hidden_BTD.shape)}"
        )
    hidden_ND, labels_N = hidden_BTD.flatten(0, -2), labels_BT.flatten()
    if reduction == "none":
        return _token_losses(hidden_ND, weight_VD, labels_N).view_as(labels_BT)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: {reduction!r} is unknown; use mean, sum or none")
    total: Tensor = _SummedLoss.apply(hidden_ND, weight_VD, labels_N)
    return total if reduction == "sum" else total / (labels_N != IGNORED).sum().clamp(min=1)


def _chunks(hidden_ND: Tensor, weight_WD: Tensor, labels_N: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(where, logits [C, W], labels [C]) of each chunk."""
    budget = CHUNK_BYTES.get(hidden_ND.device.type, CHUNK_BYTES["cuda"])
    size = max(1, budget // (hidden_ND.element_size() * len(weight_WD)))
    for start in range(0, len(hidden_ND), size):
        at = slice(start, start + size)
        yield at, hidden_ND[at] @ weight_WD.T, labels_N[at]


def _losses(logits_CW: Tensor, labels_C: Tensor, V: int, gradient: bool) -> tuple[Tensor, Tensor]:
    """Losses [C], 0 where the label is ignored, and their gradient [C, W], which takes the logits' place."""
    if fused.launches(logits_CW):
        from mdn_kernels.common import cross_entropy_triton

        return cross_entropy_triton.losses(logits_CW, labels_C, V, gradient), logits_CW
    softmax_CW, counts_C, labels_C1 = precise(logits_CW), labels_C != IGNORED, labels_C.clamp(min=0)[:, None]
    softmax_CW[:, V:] = -torch.inf
    softmax_CW.sub_(softmax_CW.amax(-1, keepdim=True))
    picked_C = softmax_CW.gather(-1, labels_C1)[:, 0]
    mass_C = softmax_CW.exp_().sum(-1)
    losses_C = (mass_C.log() - picked_C) * counts_C
    if gradient:
        softmax_CW.mul_((counts_C / mass_C)[:, None])
        softmax_CW.scatter_add_(-1, labels_C1, -counts_C[:, None].to(softmax_CW.dtype))
    return losses_C, softmax_CW.to(logits_CW.dtype)


def _aligned(weight_VD: Tensor) -> Tensor:
    """The head in the dtype that is multiplied in, with rows of zeros up to W."""
    V, D = weight_VD.shape
    alignment = ALIGNMENT.get(weight_VD.device.type, ALIGNMENT["cuda"])
    if V % alignment == 0:
        return _working(weight_VD)
    weight_WD = _working(weight_VD[:0]).new_zeros(V + -V % alignment, D)
    weight_WD[:V] = weight_VD
    return weight_WD


def _working(x: Tensor) -> Tensor:
    """x in autocast's dtype, if it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@torch.no_grad()
def _token_losses(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    chunks = _chunks(_working(hidden_ND), _aligned(weight_VD), labels_N)
    return torch.cat([_losses(logits, labels, len(weight_VD), False)[0] for _, logits, labels in chunks])


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels_N: Tensor) -> Tensor:
        hidden_ND, weight_WD = _working(hidden), _aligned(weight)
        differentiate = any(ctx.needs_input_grad)
        total = precise(hidden.new_zeros(()))
        grad_hidden = torch.empty_like(hidden) if differentiate else None
        grad_weight = weight.new_zeros(weight_WD.shape) if differentiate else None
        for at, logits_CW, labels_C in _chunks(hidden_ND, weight_WD, labels_N):
            losses_C, grad_CW = _losses(logits_CW, labels_C, len(weight), differentiate)
            total += losses_C.sum()
            if grad_hidden is not None and grad_weight is not None:
                grad_hidden[at] = grad_CW @ weight_WD
                if grad_CW.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad_CW.T, hidden_ND[at])
                else:
                    grad_weight += grad_CW.T @ hidden_ND[at]
        ctx.gradients = grad_hidden, grad_weight[: len(weight)] if grad_weight is not None else None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.gradients
        return grad_hidden * grad_total, grad_weight * grad_total, None
