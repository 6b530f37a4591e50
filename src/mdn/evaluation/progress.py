"""A bar for each task, with items/s and the time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mdn.evaluation import scoring


class Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.1f} items/s" if speed else "")


@contextmanager
def bars() -> Iterator[Callable[[str], scoring.Progress]]:
    """Yields a function that returns what moves a task's bar; the first move draws it, at 0."""
    columns = (BarColumn(), MofNCompleteColumn(), Speed(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as progress:

        def add(name: str) -> scoring.Progress:
            bar = progress.add_task(name, total=None, visible=False, start=False)

            def move(done: int, total: int) -> None:
                progress.start_task(bar)  # does nothing once it runs
                progress.update(bar, completed=done, total=total, visible=True)

            return move

        yield add
