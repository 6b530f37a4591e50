"""Panels whose horizontal axis is a number of tokens, a line a model; shared by figures over context."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mdn.config import Params
from mdn.reports.figures.style import INK, line_style

LEGEND_COLUMNS = 4
COLUMNS = 3

Curve = Mapping[int, float]  # tokens -> value


def panels(
    params: Params, scale: str, curves: Mapping[str, Mapping[str, Curve]], *, xlabel: str, ylabel: str
) -> Figure:
    """By title of the panel and model. A dashed line marks the context of the scale's training, if it is
    among the tokens; inside `look`."""
    models = [name for name in params.models if any(name in found for found in curves.values())]
    tokens = sorted({n for found in curves.values() for curve in found.values() for n in curve})
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    legend = 0.2 + 0.18 * -(-len(models) // LEGEND_COLUMNS)  # inches
    height = 0.3 + 2.1 * rows + 0.15 + legend
    figure = Figure(figsize=(8.4, height))
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    figure.subplots_adjust(
        left=0.075,
        right=0.985,
        bottom=(legend + 0.45) / height,
        top=1 - 0.3 / height,
        wspace=0.2,
        hspace=0.28,
    )
    context = params.scales[scale].training.context
    for panel, (title, found) in zip(axes, curves.items(), strict=False):
        panel.set_title(title)
        if tokens[0] < context < tokens[-1]:
            panel.axvline(context, color=INK, alpha=0.5, linewidth=0.8, linestyle=(0, (3, 3)))
        for name, curve in found.items():
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
        panel.set_xticks(tokens, [short(n) for n in tokens])
        panel.minorticks_off()
        if 1e4 <= panel.get_ylim()[1] < 1e6:  # five digits do not fit between the panels
            panel.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K")
    for panel in axes[len(curves) :]:
        panel.remove()
    for panel in axes[(rows - 1) * columns : len(curves)]:
        panel.set_xlabel(f"{xlabel} (trained on {short(context)})")
    for panel in axes[::columns]:
        panel.set_ylabel(ylabel)
    styles = {name: line_style(params, name) for name in models}
    figure.legend(
        handles=[
            Line2D([], [], color=colour, linestyle=dashes, label=params.models[name].title or name)
            for name, (colour, dashes) in styles.items()
        ],
        loc="lower center",
        ncols=LEGEND_COLUMNS,
    )
    return figure


def short(tokens: int) -> str:
    """512, 1K, 16K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def listed(tokens: Sequence[int]) -> str:
    """512 and 1K; 2K, 4K and 8K."""
    *head, last = map(short, tokens)
    return f"{', '.join(head)} and {last}" if head else last
