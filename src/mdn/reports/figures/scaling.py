"""Training on several GPUs of a host: what is left of each GPU's speed, a panel a strategy."""

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from mdn.config import Params
from mdn.reports.figures.style import INK, Drawing, line_style, look, margins, written
from mdn.reports.runs import Run
from mdn.reports.scaling import Curve, curves

COLUMNS = 4


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """One figure a scale with cells of one and of more GPUs."""
    found = []
    for scale, at in params.scales.items():
        if panels := curves(params, runs, scale):
            title = f"Training on several GPUs of a host ({at.title} scale): tokens/s of a GPU, of one alone"
            with look():
                figure = _drawn(params, panels)
                found.append(written(figure, f"scaling-{scale}", "scaling", title))
    return found


def _drawn(params: Params, panels: dict[str, dict[str, Curve]]) -> Figure:
    models = [name for name in params.models if any(name in lines for lines in panels.values())]
    counts = sorted({n for lines in panels.values() for curve in lines.values() for n in curve})
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(8.4, 0.3 + 2.1 * rows + 0.75))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    margins(figure, left=0.6, right=0.15, bottom=0.85, top=0.3, wspace=0.08, hspace=0.3)
    for panel, (title, lines) in zip(axes, panels.items(), strict=False):
        panel.set_title(title)
        panel.axhline(1.0, color=INK, alpha=0.5, linewidth=0.8, linestyle=(0, (3, 3)))
        for name, curve in lines.items():
            colour, dashes = line_style(params, name)
            panel.plot(
                list(curve),
                list(curve.values()),
                marker="o",
                markersize=3.5,
                linewidth=1.5,
                color=colour,
                linestyle=dashes,
                label=params.models[name].title or name,
                clip_on=False,
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [f"{n}" for n in counts])
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for panel in axes[len(panels) :]:
        panel.remove()
    for panel in axes[(rows - 1) * columns : len(panels)]:
        panel.set_xlabel("GPUs")
    axes[0].set_ylim(0, None)
    handles = []
    for name in models:
        colour, dashes = line_style(params, name)
        label = params.models[name].title or name
        handles.append(Line2D([], [], color=colour, linestyle=dashes, label=label))
    figure.legend(handles=handles, loc="lower center", ncols=4)
    return figure
