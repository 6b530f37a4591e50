"""Perplexity of held-out text, by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mdn.data.gpt2 import EOT
from mdn.data.shards import TokenSplit
from mdn.evaluation.scoring import Progress, quiet, score

if TYPE_CHECKING:
    from mdn.models.lm import LanguageModel


@dataclass(frozen=True)
class Windows:
    """Log-likelihood (nats) and tokens of each window."""

    loglikelihood: list[float]
    tokens: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.loglikelihood) / sum(self.tokens))

    @property
    def pairs(self) -> list[tuple[float, int]]:
        """As lm-eval's weighted_perplexity takes them."""
        return list(zip(self.loglikelihood, self.tokens, strict=True))


def heldout(
    model: LanguageModel,
    split: TokenSplit,
    *,
    window: int,
    limit: int,
    batch_tokens: int,
    progress: Progress = quiet,
) -> Windows:
    """Scores every one of the first `limit` tokens of a split once, in disjoint windows.

    Each window is read on its own with the end-of-text token in front, so a window's first token is predicted
    from that alone; longer windows give lower perplexities. The last window may be shorter.

    Raises:
        ValueError: if the split is empty.
    """
    count = min(len(split), limit)
    if count < 1:
        raise ValueError("heldout_tokens: there is nothing to score; hold out more documents")
    texts = [split.tokens(start, min(start + window, count)).tolist() for start in range(0, count, window)]
    scores = score(
        model,
        [([EOT], text) for text in texts],
        window=window,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    return Windows([value for value, _ in scores], [len(text) for text in texts])
