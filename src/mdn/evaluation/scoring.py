"""Log-likelihoods of continuations, whatever the batch.

Sequences are padded on the right, where a causal model cannot look, and the vocabulary-wide logits exist only
for the positions that are scored.

Shapes: B sequences, T positions, D width, N scored positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from mdn.models.lm import LanguageModel

POSITIONS = 128  # positions whose logits exist at once: 26 MB in float32, which a CPU's cache still helps

Progress = Callable[[int, int], None]  # (done, all)


def quiet(done: int, total: int) -> None:
    """Shows no progress."""


def precision(device: torch.device) -> AbstractContextManager:
    """bf16 autocast on CUDA, the model's own float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.inference_mode()
def score(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    window: int,
    batch_tokens: int,
    progress: Progress = quiet,
) -> list[tuple[float, bool]]:
    """Log-likelihood (nats) of each continuation given its context, and whether greedy decoding gives it.

    Args:
        pairs: (context, continuation) token ids; a context has at least one token. What exceeds the window is
            cut from the left of the context.
        window: longest input in tokens.
        batch_tokens: tokens of a forward pass, padding included.

    Raises:
        ValueError: if a context is empty or a continuation does not fit into the window.
        FloatingPointError: if the model gives a log-likelihood that is not finite.
    """
    scores = [(0.0, True)] * len(pairs)  # right for an empty continuation
    rows: dict[tuple[int, ...], list[int]] = {}  # an input, and the pairs that share it (yes/no answers do)
    for number, (context, continuation) in enumerate(pairs):
        if not context:
            raise ValueError("a context is empty; put the end-of-text token in front")
        if len(continuation) > window:
            raise ValueError(
                f"window: {window} is too short for a continuation of {len(continuation)} tokens; "
                f"set evaluation.window to {len(continuation)} or more"
            )
        if continuation:
            rows.setdefault((*context, *continuation)[-window - 1 : -1], []).append(number)

    device = next(model.parameters()).device
    inputs = sorted(rows, key=lambda ids: (-len(ids), ids))
    done = len(pairs) - sum(map(len, rows.values()))
    progress(done, len(pairs))
    for batch in token_batches(inputs, batch_tokens):
        ids_BT = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
        row: list[int] = []
        position: list[int] = []
        target: list[int] = []
        owners: list[int] = []
        for b, ids in enumerate(batch):
            ids_BT[b, : len(ids)] = torch.tensor(ids)
            for number in rows[ids]:
                continuation = pairs[number][1]
                row += [b] * len(continuation)
                position += range(len(ids) - len(continuation), len(ids))
                target += continuation
                owners.append(number)
        with precision(device):
            h_BTD, _ = model.hidden(ids_BT.to(device))
            h_ND = h_BTD[torch.tensor(row, device=device), torch.tensor(position, device=device)]
            value_N, greedy_N = token_scores(model, h_ND, torch.tensor(target, device=device))
        if not value_N.isfinite().all():
            raise FloatingPointError("the model gives log-likelihoods that are not finite")
        lengths = [len(pairs[number][1]) for number in owners]
        for number, value, greedy in zip(
            owners, value_N.split(lengths), greedy_N.split(lengths), strict=True
        ):
            scores[number] = (value.sum().item(), bool(greedy.all()))
        done += len(owners)
        progress(done, len(pairs))
    return scores


def token_batches(inputs: Sequence[tuple[int, ...]], batch_tokens: int) -> list[Sequence[tuple[int, ...]]]:
    """Consecutive inputs, longest first, as batches of at most `batch_tokens` with padding (or of one)."""
    batches, start = [], 0
    while start < len(inputs):
        stop = start + max(1, batch_tokens // len(inputs[start]))
        batches.append(inputs[start:stop])
        start = stop
    return batches


def token_scores(model: LanguageModel, h_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Of each target: its log-probability (float64, on the CPU), and whether it is the most likely token."""
    values, greedy = [], []
    for h, target in zip(h_ND.split(POSITIONS), target_N.split(POSITIONS), strict=True):
        logits = model.logits(h).float()
        values.append(-F.cross_entropy(logits, target, reduction="none"))
        greedy.append(logits.argmax(-1) == target)
    return torch.cat(values).double().cpu(), torch.cat(greedy).cpu()
