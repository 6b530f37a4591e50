"""Loss curves from log.jsonl."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from mdn.config import Params
from mdn.reports.figures.style import INK, Drawing, line_style, look, written
from mdn.reports.layout import SYSTEMS
from mdn.reports.runs import Run, active

LEGEND_COLUMNS = 3
POINTS = 500  # a line: as many as the eye can use, so that a long training does not make a large file


def smooth(values: list[float], half: int) -> list[float]:
    """Centred moving average over 2·half + 1 values, over fewer at the ends."""
    if not values:
        return []
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    found = []
    for i in range(len(values)):
        start, stop = max(0, i - half), min(len(values), i + half + 1)
        found.append((sums[stop] - sums[start]) / (stop - start))
    return found


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """Two figures a scale: the systems of Table 2, the variants beside MDN; none without a log."""
    found = []
    for scale, at in params.scales.items():
        logged = [name for name in active(params, runs, scale) if runs[scale, name].log]
        systems = [name for name in logged if name in SYSTEMS]
        variants = [name for name in logged if name not in SYSTEMS]
        if systems:
            title = f"Training at {at.title} scale: the systems of Table 2"
            found.append(_draw(params, runs, scale, systems, f"loss-{scale}", title))
        if variants:
            names = [name for name in systems if name == "mdn"] + variants
            title = f"Training at {at.title} scale: variants"
            found.append(_draw(params, runs, scale, names, f"loss-{scale}-variants", title))
    return found


def _draw(
    params: Params, runs: dict[tuple[str, str], Run], scale: str, names: list[str], name: str, title: str
) -> Drawing:
    rows = -(-(len(names) + 1) // LEGEND_COLUMNS)
    legend = 0.2 + 0.18 * rows  # inches
    height = 3.5 + legend
    with look():
        figure = Figure(figsize=(8.4, height))
        panels = figure.subplot_mosaic(
            [["loss", "lr"], ["loss", "norm"]],
            width_ratios=[2.3, 1],
            gridspec_kw={
                "left": 0.06,
                "right": 0.985,
                "bottom": (legend + 0.5) / height,
                "top": 1 - 0.3 / height,
                "wspace": 0.22,
                "hspace": 0.35,
            },
        )
        loss, lr, norm = panels["loss"], panels["lr"], panels["norm"]
        handles = []
        for model in names:
            run = runs[scale, model]
            colour, dashes = line_style(params, model)
            per_step = run.config["training"]["batch_tokens"] / 1e6
            label = params.models[model].title or model
            if run.state == "failed":
                label += " (failed)"
            half = max(1, len(run.log) // 60)
            _line(loss, run, "train/loss", per_step, label, colour, dashes, half)
            _line(lr, run, "train/lr", per_step, label, colour, dashes)
            _line(norm, run, "train/grad_norm", per_step, label, colour, dashes, half)
            steps, values = run.series("validation/loss")
            loss.plot(
                [s * per_step for s in steps],
                values,
                "o",
                label=f"{label}, validation",
                color=colour,
                markersize=4,
                clip_on=False,
                zorder=3,
            )
            handles.append(Line2D([], [], color=colour, linestyle=dashes, label=label))
        handles.append(
            Line2D([], [], color=INK, marker="o", linestyle="none", markersize=4, label="validation")
        )
        loss.set(title="Loss (nats a token; training smoothed)", xlabel="tokens (millions)")
        lr.set(title="Learning rate")
        norm.set(title="Gradient norm", xlabel="tokens (millions)")
        lr.tick_params(labelbottom=False)
        for panel in panels.values():
            panel.set_xlim(left=0)
            panel.xaxis.set_major_locator(MaxNLocator(5))
        lr.set_ylim(bottom=0)
        figure.legend(handles=handles, loc="lower center", ncols=LEGEND_COLUMNS)
        return written(figure, name, scale, title)


def _line(
    panel: Axes,
    run: Run,
    key: str,
    per_step: float,
    label: str,
    colour: str,
    dashes: tuple[int, tuple[float, ...]],
    half: int = 0,
) -> None:
    steps, values = run.series(key)
    values = smooth(values, half) if half else values
    every = -(-len(steps) // POINTS) or 1
    panel.plot(
        [step * per_step for step in steps[::every]],
        values[::every],
        label=label,
        color=colour,
        linestyle=dashes,
        linewidth=1.5,
    )
