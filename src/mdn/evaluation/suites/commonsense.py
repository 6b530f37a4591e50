"""Seven multiple-choice sets by lm-eval's protocol, 0-shot: the paper's commonsense columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mdn.evaluation import data
from mdn.evaluation.tasks import run_task

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites import Rows
    from mdn.evaluation.suites.run import Cell

TASKS = ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "boolq", "sciq")


def tasks(cell: Cell) -> list[str]:
    return list(TASKS)


def identity(cell: Cell) -> list[Any]:
    setting = cell.evaluation
    return [setting.limit, setting.window, *(data.digest(task, cell.raw) for task in TASKS)]


def run(cell: Cell, task: str, progress: Progress) -> tuple[Rows, Rows]:
    return run_task(cell, task, progress)
