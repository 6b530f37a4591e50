"""The suites, one module each, imported by name so that a suite pays for its own libraries only.

A suite's module has three functions:

    tasks(cell) -> list[str]                    names of its tasks, in order
    identity(cell) -> list                      JSON: the settings that change a result, digests of the data
    run(cell, task, progress) -> (Rows, Rows)   rows of results, rows of samples

`run` raises NotRun where a task's data are not here: the suite goes on without it and says so. A row of
results has task, metric, value, stderr, n, limit, truncated, task_hash and data; one of samples has task.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites.run import Cell

Rows = list[dict[str, Any]]
LM_EVAL = ("lm", "commonsense")  # suites of lm-eval's tasks


class NotRun(Exception):
    """A task cannot be evaluated here. The message says why and what would change that."""


class Suite(Protocol):
    """What a suite's module offers."""

    def tasks(self, cell: Cell) -> list[str]: ...
    def identity(self, cell: Cell) -> list[Any]: ...
    def run(self, cell: Cell, task: str, progress: Progress) -> tuple[Rows, Rows]: ...


def module(suite: str) -> Suite:
    """The module of a suite of mdn.config.SUITES."""
    return cast(Suite, import_module(f"{__name__}.{suite}"))
