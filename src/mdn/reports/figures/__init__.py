"""The figures, one module each: `drawings(params, runs)` gives what can be drawn from the run folders."""

from mdn.config import Params
from mdn.reports.figures import (
    dependency,
    dynamics,
    efficiency,
    loss,
    mqar,
    niah,
    positions,
    scaling,
    spectrum,
)
from mdn.reports.figures.style import Drawing
from mdn.reports.runs import Run

FIGURES = (
    dependency,
    loss,
    mqar,
    niah,
    efficiency,
    positions,
    dynamics,
    spectrum,
    scaling,
)  # in the order of the page


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    return [drawing for figure in FIGURES for drawing in figure.drawings(params, runs)]
