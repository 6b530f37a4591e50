"""Two runs side by side, as Markdown: what was configured otherwise, then what came out otherwise."""

from collections.abc import Iterator, Mapping
from math import hypot
from pathlib import Path
from typing import Any

from mdn.reports.runs import Run, read_run
from mdn.reports.tables import number, signed
from mdn.tracking.record import flat

CURVE_ROWS = 10  # steps of the loss table
ORIGIN = ("commit", "code", "data", "kernels", "host", "gpu")  # of a manifest


def read(folder: Path) -> Run:
    """The run in a folder such as runs/smoke/mdn, or one of runs/.archive.

    Raises:
        ValueError: if there is none.
    """
    folder = folder.resolve()
    run = read_run(folder.parent.parent, folder.parent.name, folder.name)
    if run.state == "absent":
        raise ValueError(f"{folder}: no run there; name a folder such as runs/smoke/mdn")
    return run


def diff(a: Run, b: Run) -> str:
    """Markdown with a section each for configuration, origin, results and loss. A difference of results is
    given in its standard errors too, √(a² + b²) of the two: below two, it says nothing."""
    lines = [f"# {_name(a)} against {_name(b)}", ""]
    if "failed" in (a.state, b.state):
        lines += [f"{_name(run)} failed: {run.failure['error']}\n" for run in (a, b) if run.failure]
    configured = list(_changes(flat(a.config), flat(b.config)))
    lines += _table("Configuration", ["key", "a", "b"], configured, "the same")
    origin = [{key: run.manifest.get(key) for key in ORIGIN} for run in (a, b)]
    lines += _table("Origin", ["", "a", "b"], list(_changes(*map(flat, origin))), "the same")
    head = ["task", "metric", "a", "b", "b − a", "in standard errors"]
    lines += _table("Results", head, list(_results(a, b)), "no metric that both have")
    for key in ("train/loss", "validation/loss"):
        lines += _table(
            f"Log: {key}", ["step", "a", "b", "b − a"], _curve(a, b, key), "no step that both have"
        )
    return "\n".join(lines)


def _name(run: Run) -> str:
    return f"{run.scale}/{run.name}"


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[list[str]]:
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield [key, *("–" if side.get(key) is None else str(side[key]) for side in (a, b))]


def _results(a: Run, b: Run) -> Iterator[list[str]]:
    mine, other = (dict(_rows(run)) for run in (a, b))
    for key in mine:
        if key not in other:
            continue
        left, right = mine[key], other[key]
        gap = right["value"] - left["value"]
        errors = [side["stderr"] for side in (left, right)]
        spread = hypot(*errors) if None not in errors else 0
        yield [
            *key,
            *(_with_error(side) for side in (left, right)),
            signed(gap),
            signed(gap / spread) if spread else "–",
        ]


def _rows(run: Run) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for evaluation in run.evaluations.values():
        for row in evaluation.get("results", []):
            yield (row["task"], row["metric"]), row


def _with_error(row: Mapping[str, Any]) -> str:
    error = "" if row["stderr"] is None else f" ± {number(row['stderr'])}"
    return f"{number(row['value'])}{error} (n = {row['n']})"


def _curve(a: Run, b: Run, key: str) -> list[list[str]]:
    mine, other = (dict(zip(*run.series(key), strict=True)) for run in (a, b))
    steps = sorted(mine.keys() & other.keys())
    if not steps:
        return []
    last = len(steps) - 1
    chosen = sorted({steps[round(n * last / (CURVE_ROWS - 1))] for n in range(CURVE_ROWS)})
    return [
        [str(step), f"{mine[step]:.4f}", f"{other[step]:.4f}", f"{other[step] - mine[step]:+.4f}"]
        for step in chosen
    ]


def _table(title: str, head: list[str], rows: list[list[str]], empty: str) -> list[str]:
    if not rows:
        return [f"## {title}", "", f"{empty}", ""]
    lines = [head, ["---"] * len(head), *rows]
    return [f"## {title}", "", *("| " + " | ".join(cells) + " |" for cells in lines), ""]
