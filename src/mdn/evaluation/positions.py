"""How well a model predicts the token at each position of a long window of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mdn.data.gpt2 import EOT
from mdn.data.shards import TokenSplit
from mdn.evaluation.scoring import Progress, precision, quiet, token_scores

if TYPE_CHECKING:
    from mdn.models.lm import LanguageModel

FIRST = 64  # positions 1 to 64 are one bucket: what so little context tells depends on the text


@torch.inference_mode()
def by_position(
    model: LanguageModel,
    split: TokenSplit,
    *,
    length: int,
    most: int,
    batch_tokens: int,
    progress: Progress = quiet,
) -> Tensor:
    """Negative log-likelihood (nats) of every token of the first windows of a split, [W, length] in float64.

    The windows, at most `most`, are whole and disjoint and cross the borders of documents, as in training;
    each is read with the end-of-text token in front.

    Args:
        split: has a window or more.

    Raises:
        FloatingPointError: if the model gives a likelihood that is not finite.
    """
    count, batch = min(len(split) // length, most), max(1, batch_tokens // length)
    device = next(model.parameters()).device
    rows = []
    for start in range(0, count, batch):
        stop = min(start + batch, count)
        tokens = torch.from_numpy(split.tokens(start * length, stop * length).astype("int64"))
        target_BT = tokens.view(-1, length).to(device)
        ids_BT = target_BT.roll(1, dims=1)
        ids_BT[:, 0] = EOT
        with precision(device):
            h_BTD, _ = model.hidden(ids_BT)
            value_N, _ = token_scores(model, h_BTD.flatten(0, 1), target_BT.flatten())
        if not value_N.isfinite().all():
            raise FloatingPointError("the model gives log-likelihoods that are not finite")
        rows.append(-value_N.view(-1, length))
        progress(stop, count)
    return torch.cat(rows)


def buckets(length: int) -> list[tuple[int, int]]:
    """Positions from 0 as half-open ranges up to powers of two: [0, 64), [64, 128), …"""
    found = [(0, FIRST)]
    while found[-1][1] < length:
        found.append((found[-1][1], 2 * found[-1][1]))
    return found
