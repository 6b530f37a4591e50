"""How every figure looks, and how it is written: the same input gives the same bytes, so no dates, no random
ids, bundled fonts."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from mdn.config import Params
from mdn.pattern import parse
from mdn.reports.figures.readings import Readings, read

# Okabe and Ito's palette, told apart by colour-blind readers; the grey stands in for its black, which a dark
# page swallows. A hybrid or an ablation keeps the colour of its mixer and changes the line.
COLOURS = {
    "attention": "#7f7f7f",
    "mamba2": "#e69f00",
    "gdn": "#56b4e9",
    "comba": "#009e73",
    "kda": "#cc79a7",
    "mdn": "#d55e00",
}
STYLES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (5, 2)),
    (0, (2, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (1, 1)),
    (0, (6, 1.5, 1, 1.5, 1, 1.5)),
    (0, (9, 2)),
    (0, (4, 1.5, 4, 1.5, 1, 1.5)),
)
INK = "#333333"  # text and axes; the page replaces it by its own text colour

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "mdn",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#888888",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 3,
}


@dataclass(frozen=True)
class Drawing:
    """One figure, ready to be saved: figures/<name>.svg, .png and .csv, shown in the section of its scale."""

    name: str
    scale: str
    title: str
    svg: str
    png: bytes
    readings: Readings
    note: str = ""  # what to know to read it, behind the title

    def files(self) -> dict[str, bytes]:
        """By file name."""
        contents = {"svg": self.svg.encode(), "png": self.png, "csv": self.readings.csv().encode()}
        return {f"{self.name}.{suffix}": content for suffix, content in contents.items()}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)


def line_style(params: Params, name: str) -> tuple[str, tuple[int, tuple[float, ...]]]:
    """Colour and dashes of a model, the same in every figure: they depend on params.yaml's list of models and
    not on which of them have been run."""

    def mixer(model: str) -> str:
        return parse(params.models[model].pattern)[0]

    place = [model for model in params.models if mixer(model) == mixer(name)].index(name)
    shade = 0.75 ** (place // len(STYLES))  # a family that has used up the styles goes on in a darker tone
    red, green, blue = to_rgb(COLOURS.get(mixer(name), "#0072b2"))
    return to_hex((shade * red, shade * green, shade * blue)), STYLES[place % len(STYLES)]


@contextmanager
def look() -> Iterator[None]:
    """Draw inside it: fonts, inks and lines of every figure."""
    with matplotlib.rc_context(STYLE):
        yield


def log_scale(panel: Axes) -> None:
    """A logarithmic y axis for what is drawn already: labels at powers of ten, and at 2 and 5 where there are
    few of them."""
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())


def margins(
    figure: Figure, *, left: float, right: float, bottom: float, top: float, wspace: float, hspace: float = 0
) -> None:
    """Room around the panels in inches, between them in panels; matplotlib's own layouts take seconds."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height, wspace, hspace)


def written(figure: Figure, name: str, scale: str, title: str, note: str = "") -> Drawing:
    """The figure as SVG (see-through, for the page) and PNG; inside `look`."""
    text, image, readings = io.StringIO(), io.BytesIO(), read(figure)
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    figure.savefig(image, format="png", dpi=160, metadata={"Software": None}, facecolor="white")
    return Drawing(name, scale, title, text.getvalue(), image.getvalue(), readings, note)
