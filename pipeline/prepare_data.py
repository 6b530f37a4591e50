"""Stage `prepare`: one data set of params.yaml into token shards, data/tokens/<set>.

It goes on where it was stopped, after the last finished group of files. `--task I/N` makes every N-th group
only, from group I on: a job array has N of them (`mdn submit prepare@<set> --tasks N`); the stage joins them.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from mdn.config import ConfigError, load
from mdn.data import gpt2
from mdn.data.prepare import prepare, prepare_task, task
from mdn.data.selection import LEFT_OUT
from mdn.data.tokenization import tokenizer
from mdn.tracking.manifest import code_digest
from mdn.tracking.record import forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", help="a name under data.sets")
    parser.add_argument("--task", metavar="I/N", help="only every N-th group of files; I from 0 to N - 1")
    parser.add_argument("--params", default="params.yaml")
    parser.add_argument("--raw", type=Path, default=Path("data/raw"))
    parser.add_argument("--tokens", type=Path, default=Path("data/tokens"))
    arguments = parser.parse_args()
    try:
        share = None if arguments.task is None else task(arguments.task)
        sets = load(arguments.params).data.sets
        if arguments.set not in sets:
            raise ConfigError(f"data.sets: {arguments.set!r} is not there; use one of {', '.join(sets)}")
        made = tokenizer(arguments.raw / gpt2.FOLDER)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("reading", total=None)

            def watch(what: str, done: int, total: int | None) -> None:
                progress.update(bar, description=what, completed=done, total=total)

            settings: dict[str, Any] = {
                "raw": arguments.raw,
                "tokens": arguments.tokens,
                "made": made,
                "watch": watch,
                "code": code_digest("mdn.data"),
                "say": partial(progress.console.print, markup=False, highlight=False, soft_wrap=True),
            }
            if share is not None:
                prepare_task(arguments.set, sets[arguments.set], share, **settings)
                return
            index = prepare(arguments.set, sets[arguments.set], force=forced(), **settings)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    Console().print(summary(arguments.set, index))


def summary(name: str, index: dict[str, Any]) -> Table:
    """What became of each part's documents."""
    table = Table("part", title=f"{name}, digest {index['digest'][:12]}")
    for head in ("train documents", "tokens", "held-out documents", "tokens", "left out"):
        table.add_column(head, justify="right")
    for source in index["sources"]:
        counts = [source[split][unit] for split in ("train", "heldout") for unit in ("documents", "tokens")]
        left_out = [f"{source[why]:,} {why}" for why in LEFT_OUT if source[why]]
        table.add_row(source["name"], *(f"{count:,}" for count in counts), ", ".join(left_out) or "none")
    return table


if __name__ == "__main__":
    main()
