"""LAMBADA and WikiText by lm-eval's protocol; perplexity of the held-out parts of the model's own text."""

from __future__ import annotations

import contextlib
import io
import math
from typing import TYPE_CHECKING, Any

from lm_eval.api.metrics import bootstrap_stderr, weighted_perplexity

from mdn.data.shards import open_split, read_index
from mdn.evaluation import data
from mdn.evaluation.perplexity import heldout
from mdn.evaluation.tasks import BOOTSTRAPS, run_task

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites import Rows
    from mdn.evaluation.suites.run import Cell

TASKS = ("lambada_openai", "wikitext")


def tasks(cell: Cell) -> list[str]:
    """A held-out split is a task."""
    splits = read_index(cell.tokens)["splits"]
    return [*TASKS, *(name for name in splits if name.startswith("heldout"))]


def identity(cell: Cell) -> list[Any]:
    setting = cell.evaluation
    digests = [*(data.digest(task, cell.raw) for task in TASKS), read_index(cell.tokens)["digest"]]
    return [setting.limit, setting.window, setting.heldout_tokens, *digests]


def run(cell: Cell, task: str, progress: Progress) -> tuple[Rows, Rows]:
    return run_heldout(cell, task, progress) if task.startswith("heldout") else run_task(cell, task, progress)


def run_heldout(cell: Cell, name: str, progress: Progress) -> tuple[Rows, Rows]:
    """A held-out split: one result, one sample for each window."""
    setting, index = cell.evaluation, read_index(cell.tokens)
    windows = heldout(
        cell.model,
        open_split(cell.tokens, name),
        window=setting.window,
        limit=setting.heldout_tokens,
        batch_tokens=setting.batch_tokens,
        progress=progress,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # lm-eval announces its bootstrap
        error = bootstrap_stderr(weighted_perplexity, windows.pairs, BOOTSTRAPS)
    result = {
        "task": name,
        "metric": "perplexity",
        "value": windows.perplexity,
        "stderr": error if len(windows.tokens) > 1 and math.isfinite(error) else None,
        "n": sum(windows.tokens),
        "limit": setting.heldout_tokens,
        "truncated": 0,
        "task_hash": None,
        "data": f"{cell.tokens.name}, {name}, sha256 {index['digest'][:12]}",
    }
    samples = [
        {"task": name, "window": number, "tokens": tokens, "loglikelihood": value}
        for number, (value, tokens) in enumerate(windows.pairs)
    ]
    return [result], samples
