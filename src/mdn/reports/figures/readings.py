"""The numbers behind a figure, so that the page can show them under the pointer and a CSV can hold them.

Read from the artists of a finished matplotlib figure: lines, points, bars and meshes. A series is named by
its artist's label; one without a label takes the legend's text of the same colour, if just one has it.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, ScalarFormatter

POINTS_AN_INCH = 72  # the unit of the SVG
FAR = 1e4  # no page reaches so far: where matplotlib puts 0 on a logarithmic axis


@dataclass
class Series:
    """ids: the SVG's groups that belong to it. boxes: where each point is drawn, [left, top, right, bottom]
    in the SVG's unit; a point of a line is a box without extent."""

    label: str
    colour: str
    ids: list[str]
    xs: list[Any] = field(default_factory=list)
    ys: list[Any] = field(default_factory=list)
    boxes: list[list[float]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)  # of a mesh: what the colour says


@dataclass
class Panel:
    title: str
    x: str
    y: str
    box: list[float]
    series: list[Series]


@dataclass(frozen=True)
class Readings:
    """legend: text -> the SVG's groups of that entry."""

    panels: list[Panel]
    legend: dict[str, list[str]]

    def page(self) -> dict[str, Any]:
        """For the script of the page: numbers as the text that is shown."""
        return {
            "legend": self.legend,
            "panels": [
                {
                    "x": panel.x,
                    "y": panel.y or panel.title,
                    "box": panel.box,
                    "series": [
                        {
                            "label": series.label,
                            "colour": series.colour,
                            "ids": series.ids,
                            "points": [
                                [*(box if box[:2] != box[2:] else box[:2]), *map(_text, point)]
                                for box, point in zip(series.boxes, _points(series), strict=True)
                                if _meet(box, panel.box)
                            ],
                        }
                        for series in panel.series
                    ],
                }
                for panel in self.panels
            ],
        }

    def csv(self) -> str:
        """panel, series, x, y, value: one line a point."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["panel", "series", "x", "y", "value"])
        for panel in self.panels:
            for series in panel.series:
                for point in _points(series):
                    writer.writerow([panel.title or panel.y, series.label, *point, *[""] * (3 - len(point))])
        return out.getvalue()


def _points(series: Series) -> Iterator[tuple[Any, ...]]:
    return zip(series.xs, series.ys, *([series.values] if series.values else []), strict=True)


def _meet(a: list[float], b: list[float]) -> bool:
    """Do two boxes touch? A point on the frame of its panel does."""
    return a[0] <= b[2] + 1 and b[0] <= a[2] + 1 and a[1] <= b[3] + 1 and b[1] <= a[3] + 1


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.5g}".replace("-", "−")


def read(figure: Figure) -> Readings:
    """The numbers of a finished figure; gives its artists the ids that their groups have in the SVG."""
    figure.draw_without_rendering()  # ticks and layout are settled by it
    legend, by_colour = _legend(figure)
    reader = _Reader(figure, by_colour)
    panels = [reader.panel(axes) for axes in figure.axes]
    return Readings([panel for panel in panels if panel.series], legend)


class _Reader:
    # Matplotlib's types of what artists hold are wider than what they ever hold, hence Any.

    def __init__(self, figure: Figure, by_colour: dict[str, str]):
        self._by_colour = by_colour
        self._scale = POINTS_AN_INCH / figure.dpi
        self._height = figure.get_figheight() * POINTS_AN_INCH
        self._named = 0

    def panel(self, axes: Axes) -> Panel:
        found = [*self._lines(axes), *self._bars(axes), *self._grids(axes), *self._collections(axes)]
        titles = (axes.get_title(loc) for loc in ("left", "center", "right"))
        return Panel(
            next(filter(None, titles), ""),
            axes.get_xlabel(),
            axes.get_ylabel(),
            self._corners(axes.get_window_extent().get_points()),
            [series for series in found if series.boxes or series.label],
        )

    def _lines(self, axes: Axes) -> Iterator[Series]:
        spreads = [c for c in axes.containers if isinstance(c, ErrorbarContainer)]
        caps = {id(cap) for container in spreads for cap in container.lines[1]}
        line: Any
        for line in axes.lines:
            # A line in other coordinates than the data's is a mark across the panel.
            if id(line) in caps or line.get_transform() != axes.transData or not line.get_visible():
                continue
            owner = next((c for c in spreads if c.lines[0] is line), line)
            series = self._series(owner, line.get_color(), [line])
            if owner is not line:
                series.ids += [self._name(part) for group in owner.lines[1:] for part in group]
            for x, y in zip(line.get_xdata(orig=False), line.get_ydata(orig=False), strict=True):
                self._add(series, axes, (x, y, x, y))
            yield series

    def _bars(self, axes: Axes) -> Iterator[Series]:
        for bar in axes.containers:
            if not isinstance(bar, BarContainer) or not bar.patches:
                continue
            series = self._series(bar, bar.patches[0].get_facecolor(), bar.patches)
            for patch in bar.patches:
                x, y, wide, high = patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()
                tip = (x + wide / 2, y + high) if bar.orientation == "vertical" else (x + wide, y + high / 2)
                self._add(series, axes, (x, y, x + wide, y + high), at=tip)
            yield series

    def _grids(self, axes: Axes) -> Iterator[Series]:
        grids: list[Any] = [*axes.images, *(c for c in axes.collections if isinstance(c, QuadMesh))]
        for grid in grids:
            series = Series("", "", [self._name(grid)])
            for *sides, value in _cells(grid):
                self._add(series, axes, sides, value=value)
            yield series

    def _collections(self, axes: Axes) -> Iterator[Series]:
        part: Any
        for part in axes.collections:
            if isinstance(part, PathCollection):
                series = self._series(part, (*part.get_facecolor(), "none")[0], [part])
                offsets: Any = part.get_offsets()
                for x, y in offsets:
                    self._add(series, axes, (x, y, x, y))
                yield series
            elif not isinstance(part, QuadMesh) and not str(part.get_label() or "_").startswith("_"):
                yield Series(part.get_label(), "", [self._name(part)])  # a band: hidden with its line

    def _series(self, owner: Any, colour: Any, artists: Iterable[Artist]) -> Series:
        text, colour = str(owner.get_label() or "_"), to_hex(colour)
        label = self._by_colour.get(colour, "") if text.startswith("_") else text
        return Series(label, colour, [self._name(artist) for artist in artists])

    def _name(self, artist: Artist) -> str:
        self._named += 1
        artist.set_gid(f"s{self._named}")
        return f"s{self._named}"

    def _add(
        self,
        series: Series,
        axes: Axes,
        sides: Sequence[float],
        at: tuple[float, float] | None = None,
        value: float | None = None,
    ) -> None:
        """A point that reaches over the sides left, bottom, right, top; `at`: its place, by default their
        middle. What has no place on the page (NaN, or 0 on a logarithmic axis) is left out."""
        left, bottom, right, top = sides
        box = self._corners(axes.transData.transform([(left, bottom), (right, top)]))
        if all(abs(side) < FAR for side in box):
            x, y = at or ((left + right) / 2, (bottom + top) / 2)
            series.xs.append(_called(axes.xaxis, x))
            series.ys.append(_called(axes.yaxis, y))
            series.boxes.append(box)
            if value is not None:
                series.values.append(value)

    def _corners(self, pixels: Any) -> list[float]:
        """left, top, right, bottom in the SVG's unit, whose y grows downwards."""
        (x0, y0), (x1, y1) = np.asarray(pixels, dtype=float) * self._scale
        y0, y1 = self._height - y0, self._height - y1
        return [round(float(side), 1) for side in (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))]


def _cells(grid: Any) -> Iterator[tuple[float, float, float, float, float]]:
    """Left, bottom, right, top and value of every cell of a heat map that has a value."""
    values: Any = np.ma.filled(np.ma.asarray(grid.get_array(), dtype=float), np.nan)
    if isinstance(grid, QuadMesh):
        corners: Any = grid.get_coordinates()
        values = values.reshape(corners.shape[0] - 1, corners.shape[1] - 1)
    else:
        left, right, bottom, top = grid.get_extent()
        first, last = (top, bottom) if grid.origin == "upper" else (bottom, top)
        across = np.linspace(left, right, values.shape[1] + 1)
        corners = np.stack(np.meshgrid(across, np.linspace(first, last, values.shape[0] + 1)), -1)
    for (i, j), value in np.ndenumerate(values):
        if math.isfinite(value):
            (x0, y0), (x1, y1) = corners[i, j].tolist(), corners[i + 1, j + 1].tolist()
            yield x0, y0, x1, y1, float(value)


def _called(axis: Axis, value: float) -> Any:
    """What a place on an axis is called: by the text of its tick if ticks are names, else the number."""
    if not isinstance(axis.get_major_formatter(), ScalarFormatter | LogFormatter):
        for tick in axis.get_major_ticks():
            text = tick.label1.get_text()
            if text and math.isclose(tick.get_loc(), value, rel_tol=1e-6, abs_tol=1e-9):
                return text
    return float(value)


def _legend(figure: Figure) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Text -> groups of each entry, and the text of every colour that just one entry has."""
    legends: list[Any] = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    entries: dict[str, list[str]] = {}
    colours: dict[str, set[str]] = {}
    for n, legend in enumerate(legends):
        for i, (handle, text) in enumerate(zip(legend.legend_handles, legend.get_texts(), strict=True)):
            ids = [f"l{n}-{i}", f"l{n}-{i}-text"]
            text.set_gid(ids[1])
            if handle is not None:
                handle.set_gid(ids[0])
            entries.setdefault(text.get_text(), []).extend(ids)
            if isinstance(handle, Line2D):
                colours.setdefault(to_hex(handle.get_color()), set()).add(text.get_text())
    return entries, {colour: texts.pop() for colour, texts in colours.items() if len(texts) == 1}
