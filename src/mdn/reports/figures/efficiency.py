"""Fig. 6: time of a decoded token over context, training throughput and memory over sequences × tokens."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mdn.config import Params
from mdn.reports.efficiency import System, all_shapes, systems
from mdn.reports.figures.lengths import LEGEND_COLUMNS, short
from mdn.reports.figures.style import Drawing, line_style, look, written
from mdn.reports.runs import Run

OTHER_KERNEL = (0, (1, 1))  # dots, and hollow marks


class Panel(NamedTuple):
    title: str
    x: str
    kind: str  # of the measurement
    figure: str
    factor: float


PANELS = (
    Panel("Time of a decoded token (ms)", "context (tokens)", "decode", "seconds", 1e3),
    Panel("Training (thousand tokens/s)", "tokens × sequences", "train", "tokens_per_second", 1e-3),
    Panel("Peak memory of training (GiB)", "tokens × sequences", "train", "peak_gib", 1),
)

TOLD = {"decode": "decoding", "train": "training throughput and memory"}


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """One figure for each scale with a record, of what was measured. Only the paper's 1.3B has one that is
    called Fig. 6."""
    found = []
    for scale, at in params.scales.items():
        measured = [system for system in systems(params, runs, scale) if system.run.metrics]
        panels = [panel for panel in PANELS if any(_values(panel, system, measured) for system in measured)]
        if panels:
            told = dict.fromkeys(TOLD[panel.kind] for panel in panels)
            title = f"{', '.join(told)} ({at.title} scale)"
            title = f"Fig. 6: {title}" if scale == "1b3" else f"In the form of Fig. 6: {title}"
            hardware = " · ".join(dict.fromkeys(system.run.hardware for system in measured))
            note = f"Measured on {hardware}."
            found.append(_drawing(params, panels, measured, f"efficiency-{scale}", title, note))
    return found


def _drawing(
    params: Params, panels: list[Panel], measured: list[System], name: str, title: str, note: str
) -> Drawing:
    shown = [system for system in measured if any(_values(panel, system, measured) for panel in panels)]
    legend = 0.2 + 0.18 * -(-len(shown) // LEGEND_COLUMNS)  # inches
    height = 2.8 + legend
    with look():
        figure = Figure(figsize=(8.4, height))
        figure.subplots_adjust(
            left=0.065, right=0.965, bottom=(legend + 0.5) / height, top=1 - 0.3 / height, wspace=0.3
        )
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _lines(params, axes, panel, shown)
        handles = [Line2D([], [], label=system.title, **_style(params, system)) for system in shown]
        figure.legend(handles=handles, loc="lower center", ncols=LEGEND_COLUMNS)
        return written(figure, name, "efficiency", title, note)


def _values(panel: Panel, system: System, measured: list[System]) -> dict[int, float]:
    """What was measured, by the number of its shape among all shapes, from the shortest sequence."""
    values = (system.figure(panel.kind, shape, panel.figure) for shape in all_shapes(measured, panel.kind))
    return {n: panel.factor * value for n, value in enumerate(values) if value is not None}


def _style(params: Params, system: System) -> dict:
    colour, dashes = line_style(params, system.model)
    return {
        "color": colour,
        "linestyle": OTHER_KERNEL if system.variant else dashes,
        "linewidth": 1.5,
        "marker": "o",
        "markersize": 3.5,
        "markerfacecolor": "none" if system.variant else colour,
    }


def _lines(params: Params, axes: Axes, panel: Panel, shown: list[System]) -> None:
    """A line a system, over its shapes by the length of a sequence."""
    for system in shown:
        if values := _values(panel, system, shown):
            axes.plot(
                list(values),
                list(values.values()),
                label=system.title,
                clip_on=False,
                **_style(params, system),
            )
    shapes = all_shapes(shown, panel.kind)
    one = panel.kind == "decode"
    axes.set_xticks(range(len(shapes)), [short(T) if one else f"{short(T)} × {B}" for B, T in shapes])
    axes.margins(y=0.15)
    if one:
        axes.set_ylim(bottom=0)
    axes.set(title=panel.title, xlabel=panel.x)
