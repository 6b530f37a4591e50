"""Fig. 1: which tokens an update depends on, for three ways to use momentum. No model and no training."""

from matplotlib import colormaps
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from mdn.analysis.dependency import SCHEMES, dependence, example
from mdn.config import Params
from mdn.reports.figures.style import INK, Drawing, look, margins, written
from mdn.reports.runs import Run

TOKENS, SIZE = 12, 4
FLOOR = 1e-3  # of the largest; below, the palest colour
TITLES = {"blockwise": f"Blocks of {SIZE}", "window": f"Window of {SIZE}", "stepwise": "Stepwise (MDN)"}
ROWS = {True: "directly", False: "along every path"}


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    x_TD = example(TOKENS)
    with look():
        figure = Figure(figsize=(8.4, 5.1))
        panels = figure.subplots(2, 3, sharex=True, sharey=True)
        margins(figure, left=0.55, right=1.0, bottom=0.45, top=0.3, wspace=0.1, hspace=0.2)
        for row, direct in zip(panels, ROWS, strict=True):
            for panel, scheme in zip(row, SCHEMES, strict=True):
                found_TT = dependence(x_TD, scheme, SIZE, direct=direct)
                found_TT = found_TT / found_TT.max()
                shown = found_TT.clip(FLOOR)
                shown[found_TT == 0] = float("nan")
                edges = [n + 0.5 for n in range(TOKENS + 1)]
                mesh = panel.pcolormesh(
                    edges,
                    edges,
                    shown,
                    norm=LogNorm(FLOOR, 1),
                    cmap=colormaps["Oranges"].resampled(12),
                    edgecolors="face",
                    linewidth=0.2,
                )
                panel.axline((0.5, 0.5), slope=1, color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
                panel.set(aspect="equal", xticks=range(4, TOKENS + 1, 4), yticks=range(4, TOKENS + 1, 4))
                panel.set_title(f"{TITLES[scheme]}, {ROWS[direct]}")
                panel.grid(False)
            row[0].set_ylabel("update at token i")
        panels[0][0].invert_yaxis()  # of all: they share it
        for panel in panels[1]:
            panel.set_xlabel("token j")
        bar = figure.colorbar(
            mesh,
            cax=figure.add_axes((0.9, 0.25, 0.015, 0.5)),
            label="|∂ update i / ∂ token j|, largest = 1",
        )
        bar.outline.set_visible(False)
        note = (
            "Derivatives by the token's key and value; directly: with the memory held fixed at which "
            "gradients are taken. Right of the dashed line lies the future, which blockwise updates read in "
            "their block. A window ends what enters directly; through the memory, all earlier tokens count."
        )
        return [written(figure, "dependency", "", "Fig. 1: what an update of the memory depends on", note)]
