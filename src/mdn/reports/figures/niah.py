"""Fig. 5: recall of RULER's needles over the length of the context, a panel a task."""

from mdn.config import Params
from mdn.reports.figures.lengths import listed, panels
from mdn.reports.figures.style import Drawing, look, written
from mdn.reports.layout import NEEDLES
from mdn.reports.runs import Run, active, results


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """One figure a scale with results. Only the paper's scales have one that is called Fig. 5."""
    found = []
    for scale, at in params.scales.items():
        curves: dict[str, dict[str, dict[int, float]]] = {}
        for task, title in NEEDLES.items():
            for name in active(params, runs, scale):
                rows = results(runs[scale, name], "niah")
                own = {row["task"]: 100 * row["value"] for row in rows if row["metric"] == "recall"}
                curve = {int(key.removeprefix(f"{task}_")): own[key] for key in own if key.startswith(task)}
                if curve:
                    curves.setdefault(title, {})[name] = dict(sorted(curve.items()))
        if curves:
            lengths = sorted(
                {n for by_model in curves.values() for curve in by_model.values() for n in curve}
            )
            title = f"recall of RULER's needles at {listed(lengths)} tokens ({at.title} scale)"
            title = f"Fig. 5: {title}" if at.paper else f"In the form of Fig. 5: {title}"
            with look():
                figure = panels(params, scale, curves, xlabel="tokens", ylabel="recall (%)")
                for panel in figure.axes:
                    panel.set_ylim(0, 100)
                found.append(written(figure, f"niah-{scale}", scale, title))
    return found
