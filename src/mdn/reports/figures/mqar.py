"""Fig. 4: accuracy of multi-query associative recall, a panel a width; and how its trainings went."""

from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mdn.config import Params
from mdn.reports.figures.style import Drawing, line_style, log_scale, look, written
from mdn.reports.mqar import Sweep, sweeps
from mdn.reports.runs import Run

LEGEND_COLUMNS = 4


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """Two figures for each scale of `mqar` with a tested cell."""
    found = []
    for scale, at in params.mqar.scales.items():
        tested = [sweep for sweep in sweeps(params, runs, scale) if sweep.chosen]
        if tested:
            title = f"Fig. 4: multi-query associative recall ({at.title} scale)"
            found.append(_accuracy(params, tested, f"mqar-{scale}", title))
            title = f"Trainings behind Fig. 4 ({at.title} scale), at the best learning rate, first seed"
            found.append(_course(params, tested, f"mqar-{scale}-training", title))
    return found


def _panels(params: Params, tested: list[Sweep], rows: int, height: float) -> tuple[Figure, list[list[Axes]]]:
    """A grid of panels, a column a width, and the legend of the models below."""
    widths = sorted({sweep.width for sweep in tested})
    models = {sweep.model: sweep.title for sweep in tested}
    legend = 0.2 + 0.18 * -(-len(models) // LEGEND_COLUMNS)  # inches
    height += legend
    figure = Figure(figsize=(8.4, height))
    axes = figure.subplots(rows, len(widths), squeeze=False, sharey="row", sharex="col")
    figure.subplots_adjust(
        left=0.07,
        right=0.985,
        bottom=(legend + 0.6) / height,
        top=1 - 0.3 / height,
        wspace=0.08,
        hspace=0.15,
    )
    handles = []
    for model, title in models.items():
        colour, dashes = line_style(params, model)
        handles.append(Line2D([], [], color=colour, linestyle=dashes, label=title))
    figure.legend(handles=handles, loc="lower center", ncols=LEGEND_COLUMNS)
    for panel, width in zip(axes[0], widths, strict=True):
        panel.set_title(f"Model width {width}")
    return figure, [list(row) for row in axes]


def _accuracy(params: Params, tested: list[Sweep], name: str, title: str) -> Drawing:
    """A line a model over the parts of the test, easiest first; bars reach over the seeds; a hollow mark: cut
    short, or diverged."""
    widths = sorted({sweep.width for sweep in tested})
    with look():
        figure, axes = _panels(params, tested, 1, 3.2)
        for panel, width in zip(axes[0], widths, strict=True):
            here = [sweep for sweep in tested if sweep.width == width]
            names = list(here[0].accuracies)
            for sweep in here:
                colour, dashes = line_style(params, sweep.model)
                values = [[100 * v for v in sweep.accuracies[part]] for part in names]
                middle = [mean(v) for v in values]
                reach = [
                    [m - min(v) for m, v in zip(middle, values, strict=True)],
                    [max(v) - m for m, v in zip(middle, values, strict=True)],
                ]
                panel.errorbar(
                    range(len(names)),
                    middle,
                    reach,
                    color=colour,
                    linestyle=dashes,
                    linewidth=1.5,
                    elinewidth=0.8,
                    marker="o",
                    markersize=4,
                    markerfacecolor="none" if sweep.mark else colour,
                    clip_on=False,
                    label=sweep.title,
                )
            panel.set_xticks(range(len(names)), [part.replace("x", "\n") for part in names], fontsize=8)
            panel.set_xlabel("tokens, pairs of key and value")
            panel.set_ylim(0, 100)
        axes[0][0].set_ylabel("accuracy (%)")
        return written(figure, name, "mqar", title)


def _course(params: Params, tested: list[Sweep], name: str, title: str) -> Drawing:
    """Loss, and the largest gradient norm between two lines of the log; a cross where a gradient was first
    not finite."""
    widths = sorted({sweep.width for sweep in tested})
    with look():
        figure, axes = _panels(params, tested, 2, 4.0)
        for column, width in enumerate(widths):
            loss, norm = axes[0][column], axes[1][column]
            for sweep in (sweep for sweep in tested if sweep.width == width):
                colour, dashes = line_style(params, sweep.model)
                run = sweep.chosen[0]
                for panel, key in ((loss, "train/loss"), (norm, "train/grad_norm_max")):
                    panel.plot(
                        *run.series(key), color=colour, linestyle=dashes, linewidth=1.5, label=sweep.title
                    )
                if first := run.metrics.get("first_nonfinite_step"):
                    mark = f"{sweep.title}: first step without a finite gradient"
                    norm.plot([first], [1.0], "x", color=colour, markersize=7, clip_on=False, label=mark)
            log_scale(norm)
            norm.set_xlabel("optimizer step")
            norm.set_xlim(left=0)
        axes[0][0].set_ylabel("loss (nats)")
        axes[1][0].set_ylabel("gradient norm")
        return written(figure, name, "mqar", title)
