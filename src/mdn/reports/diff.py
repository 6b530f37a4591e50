"""Runs side by side, as Markdown: what was configured otherwise, what came out otherwise, how they got there.

A side is one run, all runs of a folder, or all runs of a git revision; runs are paired by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import floor, hypot, isclose, log10
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mdn.reports.layout import SHARES
from mdn.reports.runs import Run, read_run, recorded, results
from mdn.reports.significance import paired
from mdn.reports.tables import fixed, markdown_line, signed
from mdn.tracking.record import ARCHIVE, flat

CURVE_ROWS = 10  # steps of the loss table
ORIGIN = ("commit", "code", "data", "kernels", "host", "gpu")  # of a manifest
# Beyond so many standard errors: of two results that do not differ, 5, 1 and 0.1 per cent are.
MARKS = ((3.29, "***"), (2.58, "**"), (1.96, "*"))


@dataclass(frozen=True)
class Side:
    """What is compared: a name for it and its runs; a side of one run has it under ""."""

    title: str
    runs: dict[str, Run]
    params: dict[str, Any] = field(default_factory=dict)  # of a revision


def read(folder: Path) -> Side:
    """The run in a folder such as runs/smoke/mdn (or one of runs/.archive), or all runs in one such as
    runs/smoke.

    Raises:
        ValueError: if there is none.
    """
    folder = folder.resolve()
    run = read_run(folder.parent.parent, folder.parent.name, folder.name)
    if run.state != "absent":
        return Side(run.title, {"": run})
    inside = sorted(path.parent for path in folder.glob("*/manifest.json"))
    if not inside:
        raise ValueError(
            f"{folder}: no run there; name a folder such as runs/smoke/mdn or runs/smoke, or a git revision"
        )
    return Side(folder.name, {at.name: read_run(folder.parent, folder.name, at.name) for at in inside})


def read_all(root: Path, params: Path) -> Side:
    """All runs as they are now, with params.yaml.

    Raises:
        ValueError: if there is none.
    """
    found = [run for run in recorded(root) if ARCHIVE not in run.folder.parts]
    if not found:
        raise ValueError(f"{root}: no run there; `dvc repro` makes them")
    stated: Any = OmegaConf.to_container(OmegaConf.load(params))
    return Side("now", {f"{run.scale}/{run.name}": run for run in found}, stated)


def pairs(a: Side, b: Side) -> dict[str, tuple[Run, Run]]:
    """The runs that both sides have, by name."""
    return {name: (run, b.runs[name]) for name, run in a.runs.items() if name in b.runs}


def diff(a: Side, b: Side) -> str:
    """Markdown: parameters (of revisions), runs (of several), configuration, origin, results, loss (of one).

    A difference of results is given in standard errors too: item by item where both runs have the same ones,
    else by √(a² + b²) of the two. What is beyond 1.96 is marked. For several runs, only results that differ
    are listed.
    """
    both = pairs(a, b)
    single = set(both) == {""}
    lines = [f"# {a.title} against {b.title}", ""]
    if a.params or b.params:
        changed = list(_changes(flat(a.params), flat(b.params)))
        lines += _table("Parameters", ["key", "a", "b"], changed, "params.yaml is the same")
    if not single:
        lines += _table("Runs", ["run", "a", "b"], list(_states(a, b)), "the same runs")
    failures = [(run, side) for name in both for run, side in zip(both[name], (a, b), strict=True)]
    lines += [
        f"{side.title if single else f'{run.name} of {side.title}'} failed: `{run.failure['error']}`\n"
        for run, side in failures
        if run.failure
    ]

    def table(title: str, head: list[str], rows: dict[str, list[list[str]]], empty: str) -> list[str]:
        if single:
            return _table(title, head, rows[""], empty)
        return _table(title, ["run", *head], [[name, *row] for name in rows for row in rows[name]], empty)

    configured = {name: list(_changes(flat(x.config), flat(y.config))) for name, (x, y) in both.items()}
    lines += table("Configuration", ["key", "a", "b"], configured, "the same")
    origin = {name: list(_changes(_origin(x), _origin(y))) for name, (x, y) in both.items()}
    lines += table("Origin", ["", "a", "b"], origin, "the same")
    found = {name: list(_results(x, y)) for name, (x, y) in both.items()}
    if not single:
        found = {name: [r for r in rows if r.differs] for name, rows in found.items()}
    head = ["task", "metric", "a", "b", "b − a", "in standard errors", "judged by"]
    empty = "no metric that both have" if single else "no metric differs"
    lines += table("Results", head, {name: [r.cells for r in rows] for name, rows in found.items()}, empty)
    lines += _chance([r for rows in found.values() for r in rows])
    if single:
        for key in ("train/loss", "validation/loss"):
            head = ["step", "a", "b", "b − a"]
            lines += _table(f"Log: {key}", head, _curve(*both[""], key), "no step that both have")
    return "\n".join(lines)


def kernel_pairs(root: Path, a: str, b: str) -> list[tuple[Side, Side]]:
    """Runs under `root`, archived ones too, that were trained on version `a` of the momentum delta rule, each
    with the run of the same data and configuration, but for the kernel, on version `b`."""

    def rest(run: Run) -> tuple[Any, ...]:
        return (run.manifest.get("data"), *sorted(flat({**run.config, "kernel": ""}).items(), key=str))

    def on(version: str) -> list[Run]:
        kernels = [(run, run.manifest.get("kernels") or {}) for run in recorded(root)]
        return [run for run, used in kernels if used.get("momentum_delta_rule") == version]

    others = {str(rest(run)): run for run in on(b)[::-1]}
    found = [(run, others[str(rest(run))]) for run in on(a) if str(rest(run)) in others]
    return [(Side(f"{x.title} on {a}", {"": x}), Side(f"{y.title} on {b}", {"": y})) for x, y in found]


@dataclass(frozen=True)
class Result:
    """A metric of both: formatted, and the difference in standard errors (None without them)."""

    cells: list[str]
    differs: bool
    z: float | None
    by_item: bool


def mark(z: float | None) -> str:
    """Stars of a difference in standard errors."""
    return next((stars for least, stars in MARKS if z is not None and abs(z) >= least), "")


def _chance(found: Sequence[Result]) -> list[str]:
    """What the stars mean, and how many there would be if nothing differed."""
    judged = [result for result in found if result.z is not None]
    if not judged:
        return []
    starred = sum(bool(mark(result.z)) for result in judged)
    by_item = sum(result.by_item for result in judged)
    return [
        f"{starred} of {len(judged)} differences are beyond 1.96 standard errors (\\*; \\*\\* beyond 2.58, "
        f"\\*\\*\\* beyond 3.29); were nothing different, about {0.05 * len(judged):.1f} would be. {by_item} "
        "are judged item by item, where both runs have the same ones (right or wrong: McNemar's exact test), "
        "the others by two independent errors. What another seed of the training would change is in neither.",
        "",
    ]


def _states(a: Side, b: Side) -> Iterator[list[str]]:
    for name in dict.fromkeys([*a.runs, *b.runs]):
        sides = [side.runs.get(name) for side in (a, b)]
        told = ["–" if run is None else f"{run.state}, {run.manifest.get('fingerprint')}" for run in sides]
        if told[0] != told[1]:
            yield [name, *told]


def _origin(run: Run) -> dict[str, Any]:
    return flat({key: run.manifest.get(key) for key in ORIGIN})


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[list[str]]:
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield [key, *("–" if side.get(key) is None else str(side[key]) for side in (a, b))]


def _results(a: Run, b: Run) -> Iterator[Result]:
    mine, other = (dict(_rows(run)) for run in (a, b))
    samples = _by_task(a), _by_task(b)
    for key in mine:
        if key not in other:
            continue
        left, right = mine[key], other[key]
        _, task, metric = key
        lead = [task, f"{metric}, %" if metric in SHARES else metric]
        if left["value"] is None or right["value"] is None:
            told = ["not finite" if side["value"] is None else _with_error(side, 4) for side in (left, right)]
            yield Result([*lead, *told, "–", "–", "–"], left["value"] != right["value"], None, False)
            continue
        gap = right["value"] - left["value"]
        found = paired(left, right, *(side.get(key[:2], []) for side in samples))
        z, how = found or _independent(left, right)
        places = _places(left, right)
        cells = [
            *lead,
            *(_with_error(side, places) for side in (left, right)),
            _gap(100 * gap if metric in SHARES else gap, places),
            "–" if z is None else f"{_gap(z, 2)} {mark(z)}".rstrip().replace("*", "\\*"),
            how,
        ]
        yield Result(cells, not isclose(left["value"], right["value"], rel_tol=1e-9), z, found is not None)


def _independent(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[float | None, str]:
    """The difference in standard errors of two results whose errors have nothing to do with each other, and
    what they were not measured alike in."""
    if a["stderr"] is None or b["stderr"] is None or not (spread := hypot(a["stderr"], b["stderr"])):
        return None, "–"
    names = {"task_hash": "task", "data": "items", "window": "window"}
    other = [name for key, name in names.items() if a.get(key) != b.get(key)]
    return (b["value"] - a["value"]) / spread, "; other ".join(
        ["two errors", *filter(None, [", ".join(other)])]
    )


def _places(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """Decimals that show two digits of the smaller error; of the difference, where there is no error."""
    if a["metric"] in SHARES:
        return 2
    known = [error for error in (a["stderr"], b["stderr"]) if error]
    least = min(known) if known else abs(b["value"] - a["value"]) or abs(a["value"]) / 100
    return min(max(1 - floor(log10(least)), 0), 6) if least else 2


def _rows(run: Run) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Suite, task and metric of every result; the last validation loss first."""
    if losses := run.series("validation/loss")[1]:
        last = {"metric": "validation loss", "value": losses[-1], "stderr": None, "n": None}
        yield ("", "training", "validation loss"), last
    for suite in run.evaluations:
        for row in results(run, suite):
            yield (suite, row["task"], row["metric"]), row


def _by_task(run: Run) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The samples of every suite and task."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for suite in run.evaluations:
        for sample in run.samples(suite):
            found.setdefault((suite, sample["task"]), []).append(sample)
    return found


def _with_error(row: Mapping[str, Any], places: int) -> str:
    shown = [value for value in (row["value"], row["stderr"]) if value is not None]
    shift = 2 if row["metric"] in SHARES else 0
    told = [fixed(float(Decimal(repr(value)).scaleb(shift)), places) for value in shown]
    return " ± ".join(told) + ("" if row["n"] is None else f" (n = {row['n']})")


def _gap(value: float, places: int) -> str:
    """A difference with its sign, and never a zero that is none."""
    if not value:
        return "0"
    text = fixed(value, places)
    return signed(value) if not text.strip("-0.") else "−" + text[1:] if value < 0 else f"+{text}"


def _curve(a: Run, b: Run, key: str) -> list[list[str]]:
    mine, other = (dict(zip(*run.series(key), strict=True)) for run in (a, b))
    steps = sorted(mine.keys() & other.keys())
    if not steps:
        return []
    last = len(steps) - 1
    chosen = sorted({steps[round(n * last / (CURVE_ROWS - 1))] for n in range(CURVE_ROWS)})
    return [
        [str(step), f"{mine[step]:.4f}", f"{other[step]:.4f}", _gap(other[step] - mine[step], 4)]
        for step in chosen
    ]


def _table(title: str, head: list[str], rows: list[list[str]], empty: str) -> list[str]:
    if not rows:
        return [f"## {title}", "", f"{empty}", ""]
    lines = [head, ["---"] * len(head), *rows]
    return [f"## {title}", "", *map(markdown_line, lines), ""]
