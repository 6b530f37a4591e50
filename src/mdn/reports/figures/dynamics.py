"""Fig. 7: how much the memory changes at each token. And the gates behind it, layer by layer."""

from math import exp
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from mdn.config import Params
from mdn.reports.figures.loss import POINTS, smooth
from mdn.reports.figures.style import Drawing, line_style, log_scale, look, margins, written
from mdn.reports.layout import SYSTEMS
from mdn.reports.runs import Run, active

LEGEND_COLUMNS = 4
GATES = {"log_alpha": "α, of the memory", "beta": "β", "log_mu": "μ, of the momentum", "eta": "η"}
Layers = dict[str, list[dict[str, Any]]]  # by model, a row of the suite's samples for each layer


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """Two figures a scale, each for the systems and for the variants; none where nothing was followed."""
    found = []
    for scale, at in params.scales.items():
        names = active(params, runs, scale)
        variants = [name for name in names if name == "mdn" or name not in SYSTEMS]
        for suffix, chosen in (("", [name for name in names if name in SYSTEMS]), ("-variants", variants)):
            rows = {name: runs[scale, name].samples("dynamics") for name in chosen}
            changes: Layers = {name: [row for row in rows[name] if "change" in row] for name in chosen}
            gates: Layers = {name: [row for row in rows[name] if "gates" in row] for name in chosen}
            if not any(changes[name] for name in chosen if name != "mdn" or not suffix):
                continue
            what = f"at {at.title} scale" + (": variants" if suffix else "")
            for draw, layers, name in ((_changes, changes, "state-change"), (_gates, gates, "gates")):
                followed = {model: found for model, found in layers.items() if found}
                found.append(draw(params, scale, followed, f"{name}-{scale}{suffix}", what))
    return found


def _changes(params: Params, scale: str, layers: Layers, name: str, what: str) -> Drawing:
    with look():
        figure = Figure(figsize=(8.4, 3.6))
        tokens, depth = figure.subplots(1, 2, width_ratios=[2.3, 1], sharey=True)
        margins(figure, left=0.6, right=0.1, bottom=_legend(figure, params, layers), top=0.3, wspace=0.08)
        for model, rows in layers.items():
            line = _line(params, model)
            means = [sum(change) / len(rows) for change in zip(*(row["change"] for row in rows), strict=True)]
            every = -(-len(means) // POINTS)
            steps = range(1, len(means) + 1)
            smoothed = smooth(means, max(1, len(means) // 100))
            tokens.plot(steps[::every], smoothed[::every], linewidth=1.5, **line)
            average = [sum(row["change"]) / len(row["change"]) for row in rows]
            places = [row["layer"] + 1 for row in rows]
            depth.plot(places, average, marker="o", markersize=3, linewidth=1.2, **line)
        tokens.set(title="ΔS, mean over layers (moving average)", xlabel="token")
        log_scale(tokens)
        depth.set(title="ΔS, mean over tokens", xlabel="layer")
        depth.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        tokens.set_xlim(left=0)
        note = "‖S_t − S_t−1‖ averaged over heads, while a held-out text is read token by token."
        return written(figure, name, scale, f"Fig. 7: change of the memory at each token, {what}", note)


def _gates(params: Params, scale: str, layers: Layers, name: str, what: str) -> Drawing:
    """Medians as lines; bands from the first to the third quartile."""
    with look():
        figure = Figure(figsize=(8.4, 2.9))
        panels = figure.subplots(1, len(GATES))
        margins(figure, left=0.35, right=0.1, bottom=_legend(figure, params, layers), top=0.3, wspace=0.3)
        for panel, (gate, title) in zip(panels, GATES.items(), strict=True):
            for model, rows in layers.items():
                line = _line(params, model)
                having = [row for row in rows if gate in row["gates"]]
                places = [row["layer"] + 1 for row in having]
                low, middle, high = (
                    [_value(gate, row["gates"][gate][row["quantiles"].index(q)]) for row in having]
                    for q in (0.25, 0.5, 0.75)
                )
                band = {"color": line["color"], "label": line["label"]}
                panel.fill_between(places, low, high, alpha=0.15, linewidth=0, **band)
                panel.plot(places, middle, marker="o", markersize=2.5, **line)
            panel.set(title=title, xlabel="layer", ylim=(0, 2 if gate == "eta" else 1))
            panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        note = "Median and quartiles over the tokens of a held-out text and over heads."
        return written(figure, name, scale, f"Gates of every layer, {what}", note)


def _line(params: Params, model: str) -> dict[str, Any]:
    colour, dashes = line_style(params, model)
    return {"color": colour, "linestyle": dashes, "label": params.models[model].title or model}


def _value(gate: str, quantile: float) -> float:
    return exp(quantile) if gate.startswith("log_") else quantile


def _legend(figure: Figure, params: Params, models: Layers) -> float:
    """Draws it at the bottom; the room that it and the labels of the axes take, in inches."""
    handles = [Line2D([], [], **_line(params, model)) for model in models]
    figure.legend(handles=handles, loc="lower center", ncols=LEGEND_COLUMNS)
    return 0.65 + 0.18 * -(-len(handles) // LEGEND_COLUMNS)
