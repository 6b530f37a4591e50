"""Loss over position in windows of `position_length` tokens of held-out text: how far more context helps, and
whether a model holds beyond the length it was trained on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mdn.data.shards import open_split, read_index
from mdn.evaluation.positions import buckets, by_position
from mdn.evaluation.suites import NotRun

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites import Rows
    from mdn.evaluation.suites.run import Cell


def tasks(cell: Cell) -> list[str]:
    """The held-out splits of the model's text."""
    return [name for name in read_index(cell.tokens)["splits"] if name.startswith("heldout")]


def identity(cell: Cell) -> list[Any]:
    setting = cell.evaluation
    return [setting.position_length, setting.position_windows, read_index(cell.tokens)["digest"]]


def run(cell: Cell, task: str, progress: Progress) -> tuple[Rows, Rows]:
    """A result for each bucket of positions, nll@<its last position>; a sample for each window.

    Raises:
        NotRun: if the split is shorter than a window.
    """
    setting, index, split = cell.evaluation, read_index(cell.tokens), open_split(cell.tokens, task)
    if len(split) < setting.position_length:
        raise NotRun(
            f"position_length: {setting.position_length} is more than the {len(split)} tokens of {task}"
        )
    nll_WT = by_position(
        cell.model,
        split,
        length=setting.position_length,
        most=setting.position_windows,
        batch_tokens=setting.batch_tokens,
        progress=progress,
    )
    windows = len(nll_WT)
    results: Rows = []
    samples: Rows = [{"task": task, "window": number} for number in range(windows)]
    for start, stop in buckets(setting.position_length):
        metric, mean_W = f"nll@{stop}", nll_WT[:, start:stop].mean(1)
        results.append(
            {
                "task": task,
                "metric": metric,
                "value": mean_W.mean().item(),
                "stderr": mean_W.std().item() / math.sqrt(windows) if windows > 1 else None,
                "n": windows * (stop - start),
                "limit": setting.position_windows,
                "truncated": 0,
                "window": setting.position_length,
                "task_hash": None,
                "data": f"{cell.tokens.name}, {task}, sha256 {index['digest'][:12]}",
            }
        )
        for sample, value in zip(samples, mean_W.tolist(), strict=True):
            sample[metric] = value
    return results, samples
