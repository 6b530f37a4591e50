"""Fig. 6: time of a decoded token over context, training throughput and memory over sequences × tokens."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mdn.config import Params
from mdn.reports.efficiency import System, all_shapes, systems
from mdn.reports.figures.lengths import LEGEND_COLUMNS, short
from mdn.reports.figures.style import Drawing, line_style, look, written
from mdn.reports.runs import Run

OTHER_KERNEL = (0, (1, 1))  # dots, and hollow marks


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """One figure for each scale with a record. Only the paper's 1.3B has one that is called Fig. 6."""
    found = []
    for scale, at in params.scales.items():
        measured = [system for system in systems(params, runs, scale) if system.run.metrics]
        if measured:
            title = f"decoding, training throughput and memory ({at.title} scale)"
            title = f"Fig. 6: {title}" if scale == "1b3" else f"In the form of Fig. 6: {title}"
            hardware = " · ".join(dict.fromkeys(system.run.hardware for system in measured))
            found.append(_drawing(params, measured, f"efficiency-{scale}", title, f"Measured on {hardware}."))
    return found


def _drawing(params: Params, measured: list[System], name: str, title: str, note: str) -> Drawing:
    legend = 0.2 + 0.18 * -(-len(measured) // LEGEND_COLUMNS)  # inches
    height = 2.8 + legend
    with look():
        figure = Figure(figsize=(8.4, height))
        decoding, throughput, memory = figure.subplots(1, 3)
        figure.subplots_adjust(
            left=0.065, right=0.965, bottom=(legend + 0.5) / height, top=1 - 0.3 / height, wspace=0.3
        )
        _lines(params, decoding, measured, "decode", "seconds", 1e3)
        _lines(params, throughput, measured, "train", "tokens_per_second", 1e-3)
        _lines(params, memory, measured, "train", "peak_gib", 1)
        decoding.set_ylim(bottom=0)
        decoding.set(title="Time of a decoded token (ms)", xlabel="context (tokens)")
        throughput.set(title="Training (thousand tokens/s)", xlabel="tokens × sequences")
        memory.set(title="Peak memory of training (GiB)", xlabel="tokens × sequences")
        handles = [Line2D([], [], label=system.title, **_style(params, system)) for system in measured]
        figure.legend(handles=handles, loc="lower center", ncols=LEGEND_COLUMNS)
        return written(figure, name, "efficiency", title, note)


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


def _lines(params: Params, panel: Axes, measured: list[System], kind: str, name: str, factor: float) -> None:
    """A line a system, over its shapes by the length of a sequence."""
    shapes = all_shapes(measured, kind)
    for system in measured:
        values = [system.figure(kind, shape, name) for shape in shapes]
        at = [n for n, value in enumerate(values) if value is not None]
        if at:
            panel.plot(
                at,
                [factor * value for value in values if value is not None],
                label=system.title,
                clip_on=False,
                **_style(params, system),
            )
    one = kind == "decode"
    panel.set_xticks(range(len(shapes)), [short(T) if one else f"{short(T)} × {B}" for B, T in shapes])
    panel.margins(y=0.15)
    if not panel.lines:
        panel.text(0.5, 0.5, "not measured here", transform=panel.transAxes, ha="center", alpha=0.6)
