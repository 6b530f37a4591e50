# mypy: ignore-errors
"""Cross-entropy of a chunk of logits and, in their place, its gradient: one Triton kernel that reads them
twice and writes them once. In torch each step of a softmax is a pass over float32 copies.

C tokens · V vocabulary · W columns of the logits, W ≥ V; those from V on stand for no token
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORED = tl.constexpr(-100)
COLUMNS = 4096  # that a program has at hand, 16 a thread


@triton.jit
def _losses(logits, labels, losses, V, W, GRADIENT: tl.constexpr, BW: tl.constexpr):
    """−log softmax(logits)[label] of one row and, with GRADIENT, softmax(logits) − [label] over the logits; 0
    where the label is ignored."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * W
    label = tl.load(labels + row)
    counts = label != IGNORED
    column = tl.arange(0, BW)
    # Before the loop, whose reductions all threads wait for: later some would have written over it.
    picked = tl.load(logits + label, mask=(label >= 0) & (label < V), other=float("nan")).to(tl.float32)
    largest = float("-inf")
    mass = 0.0  # Σ exp(logit − largest)
    for start in range(0, V, BW):
        x = tl.load(logits + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(largest, tl.max(x, 0))
        mass = mass * tl.exp(before - largest) + tl.sum(tl.exp(x - largest), 0)
    tl.store(losses + row, tl.where(counts, largest + tl.log(mass) - picked, 0.0))
    if GRADIENT:
        for start in range(0, W, BW):
            at = start + column
            x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
            p = tl.exp(x - largest) / mass - tl.where(at == label, 1.0, 0.0)
            p = tl.where(counts, p, 0.0)
            tl.store(logits + at, p.to(logits.dtype.element_ty), mask=at < W)


def losses(logits_CW: Tensor, labels_C: Tensor, V: int, gradient: bool) -> Tensor:
    """Losses [C] in nats and float32, 0 where the label is −100; with `gradient` their gradient takes the
    logits' place, rounded once, 0 from column V on.

    logits_CW: contiguous, on a GPU, in any floating dtype but float64. labels_C: int64; one outside the
    vocabulary makes its loss NaN.
    """
    out_C = torch.empty(len(labels_C), dtype=torch.float32, device=logits_CW.device)
    with torch.cuda.device_of(logits_CW):
        _losses[(len(labels_C),)](
            *(logits_CW, labels_C, out_C, V, logits_CW.shape[1]), GRADIENT=gradient, BW=COLUMNS, num_warps=8
        )
    return out_C
