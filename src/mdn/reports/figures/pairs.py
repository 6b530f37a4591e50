"""Two runs' losses over each other: for `mdn diff`."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mdn.reports.figures.loss import POINTS, smooth
from mdn.reports.figures.style import Drawing, look, written
from mdn.reports.runs import Run

COLUMNS = 3
A: dict[str, Any] = {"color": "#7f7f7f", "linestyle": (0, (4, 2))}
B: dict[str, Any] = {"color": "#d55e00", "linestyle": "-"}


def drawing(name: str, titles: tuple[str, str], pairs: Mapping[str, tuple[Run, Run]]) -> Drawing | None:
    """The losses of every pair; of a single one also b − a, if both have the same steps. None without a log.

    The horizontal axis is tokens, so that scales with other batches can be compared.
    """
    logged = {key: pair for key, pair in pairs.items() if all(run.log for run in pair)}
    if not logged:
        return None
    single = len(logged) == 1
    panels = 2 if single else len(logged)
    columns = min(COLUMNS, panels)
    rows = -(-panels // columns)
    with look():
        figure = Figure(figsize=(8.4, 3.4 * rows if single else 2.6 * rows + 0.4), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel, (key, pair) in zip(axes, logged.items(), strict=False):
            panel.set(title=key or "Loss (nats a token; training smoothed)", xlabel="tokens (millions)")
            budgets = [run.last_step * _tokens(run) for run in pair]
            if max(budgets) > 4 * min(budgets):
                panel.set_xscale("log")
            for run, title, style in zip(pair, titles, (A, B), strict=True):
                steps, values = _smoothed(run)
                panel.plot([s * _tokens(run) for s in steps], values, linewidth=1.4, label=title, **style)
                steps, values = run.series("validation/loss")
                at = [s * _tokens(run) for s in steps]
                panel.plot(at, values, "o", markersize=4, color=style["color"], label=f"{title}, validation")
        if single:
            (pair,) = logged.values()
            _difference(axes[1], pair)
        for unused in axes[panels:]:
            unused.remove()
        handles = [Line2D([], [], label=title, **style) for title, style in zip(titles, (A, B), strict=True)]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        return written(figure, name, "", f"Loss: {titles[0]} against {titles[1]}")


def _difference(panel: Axes, pair: tuple[Run, Run]) -> None:
    (steps, mine), (others, other) = map(_smoothed, pair)
    there = dict(zip(others, other, strict=True))
    common = [(step, there[step] - value) for step, value in zip(steps, mine, strict=True) if step in there]
    panel.set(title="b − a", xlabel="tokens (millions)")
    panel.axhline(0, color=A["color"], linewidth=0.8)
    if common and _tokens(pair[0]) == _tokens(pair[1]):
        at = [step * _tokens(pair[0]) for step, _ in common]
        panel.plot(at, [gap for _, gap in common], linewidth=1.4, label="b − a", **B)


def _smoothed(run: Run) -> tuple[list[int], list[float]]:
    steps, values = run.series("train/loss")
    every = -(-len(steps) // POINTS) or 1
    return steps[::every], smooth(values, max(1, len(run.log) // 60))[::every]


def _tokens(run: Run) -> float:
    """Millions of tokens in a step."""
    return run.config["training"]["batch_tokens"] / 1e6
