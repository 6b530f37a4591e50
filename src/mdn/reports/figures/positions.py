"""Perplexity over position in long windows of held-out text, a panel a text."""

import math

from mdn.config import Params
from mdn.reports.figures.lengths import panels, short
from mdn.reports.figures.style import Drawing, look, written
from mdn.reports.layout import TEXTS
from mdn.reports.runs import Run, active, results


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """One figure a scale with results. A point is the mean over the positions from the one before it."""
    found = []
    for scale, at in params.scales.items():
        curves: dict[str, dict[str, dict[int, float]]] = {}
        for name in active(params, runs, scale):
            for row in results(runs[scale, name], "positions"):
                if row["value"] > 700:  # a perplexity beyond float64
                    continue
                text = row["task"].removeprefix("heldout_")
                curve = curves.setdefault(f"{TEXTS.get(text, text)} held-out", {}).setdefault(name, {})
                curve[int(row["metric"].removeprefix("nll@"))] = math.exp(row["value"])
        if curves:
            longest = max(max(curve) for by_model in curves.values() for curve in by_model.values())
            title = f"Perplexity over position in windows of {short(longest)} tokens ({at.title} scale)"
            with look():
                figure = panels(params, scale, curves, xlabel="up to position", ylabel="perplexity")
                found.append(written(figure, f"positions-{scale}", scale, title))
    return found
