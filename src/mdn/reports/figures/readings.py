"""The numbers behind a figure, so that the page can show them under the pointer and a CSV can hold them.

Read from the artists of a finished matplotlib figure: lines, points, bars and meshes. A series is named by
its artist's label; one without a label takes the legend's text of the same colour, if just one has it.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator
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
            self._corners(*axes.get_window_extent().get_points()[:, None]).round(1)[0].tolist(),
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
            points = np.column_stack([line.get_xdata(orig=False), line.get_ydata(orig=False)])
            self._fill(series, axes, points, points)
            yield series

    def _bars(self, axes: Axes) -> Iterator[Series]:
        for bar in axes.containers:
            if not isinstance(bar, BarContainer) or not bar.patches:
                continue
            series = self._series(bar, bar.patches[0].get_facecolor(), bar.patches)
            low = np.array([patch.get_xy() for patch in bar.patches], dtype=float)
            size = np.array([(patch.get_width(), patch.get_height()) for patch in bar.patches], dtype=float)
            upright = bar.orientation == "vertical"
            tips = low + size * ((0.5, 1) if upright else (1, 0.5))
            across = 0 if upright else 1
            tips[:, across] = _snapped(axes.xaxis if upright else axes.yaxis, tips[:, across])
            self._fill(series, axes, low, low + size, at=tips)
            yield series

    def _grids(self, axes: Axes) -> Iterator[Series]:
        grids: list[Any] = [*axes.images, *(c for c in axes.collections if isinstance(c, QuadMesh))]
        for grid in grids:
            series = Series("", "", [self._name(grid)])
            corners, values = _cells(grid)
            low, high = corners[:-1, :-1].reshape(-1, 2), corners[1:, 1:].reshape(-1, 2)
            self._fill(series, axes, low, high, values=values.ravel())
            yield series

    def _collections(self, axes: Axes) -> Iterator[Series]:
        part: Any
        for part in axes.collections:
            if isinstance(part, PathCollection):
                series = self._series(part, (*part.get_facecolor(), "none")[0], [part])
                points = np.asarray(part.get_offsets(), dtype=float)
                self._fill(series, axes, points, points)
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

    def _fill(
        self, series: Series, axes: Axes, low: Any, high: Any, at: Any = None, values: Any = None
    ) -> None:
        """Points [n, 2] that reach from their corners `low` to `high`; `at`: their places, by default in the
        middle. What has no place on the page (NaN, or 0 on a logarithmic axis) or no value is left out."""
        boxes = self._corners(axes.transData.transform(low), axes.transData.transform(high))
        places = (low + high) / 2 if at is None else at
        there = (np.abs(boxes) < FAR).all(1)
        if values is not None:
            there &= np.isfinite(values)
            series.values = values[there].tolist()
        series.boxes = boxes[there].round(1).tolist()
        series.xs = _called(axes.xaxis, places[there, 0].tolist())
        series.ys = _called(axes.yaxis, places[there, 1].tolist())

    def _corners(self, a: Any, b: Any) -> Any:
        """left, top, right, bottom in the SVG's unit, whose y grows downwards, of boxes between the pixels a
        and b, [n, 2]."""
        a, b = ((0, self._height) + pixels * self._scale * (1, -1) for pixels in (a, b))
        return np.concatenate([np.minimum(a, b), np.maximum(a, b)], 1)


def _cells(grid: Any) -> tuple[Any, Any]:
    """Corners [rows + 1, columns + 1, 2] and values [rows, columns] of a heat map; NaN: no value."""
    values: Any = np.ma.filled(np.ma.asarray(grid.get_array(), dtype=float), np.nan)
    if isinstance(grid, QuadMesh):
        corners: Any = grid.get_coordinates()
        return corners, values.reshape(corners.shape[0] - 1, corners.shape[1] - 1)
    left, right, bottom, top = grid.get_extent()
    first, last = (top, bottom) if grid.origin == "upper" else (bottom, top)
    across = np.linspace(left, right, values.shape[1] + 1)
    up = np.linspace(first, last, values.shape[0] + 1)
    return np.stack(np.meshgrid(across, up), -1), values


def _snapped(axis: Axis, values: Any) -> Any:
    """The named tick that each bar stands at: those of a group stand beside it."""
    ticks = np.asarray(axis.get_majorticklocs(), dtype=float)
    if isinstance(axis.get_major_formatter(), ScalarFormatter | LogFormatter) or len(ticks) < 2:
        return values
    nearest = ticks[np.abs(values[:, None] - ticks).argmin(1)]
    return np.where(np.abs(values - nearest) < np.diff(ticks).min() / 2, nearest, values)


def _called(axis: Axis, values: list[float]) -> list[Any]:
    """What places on an axis are called: by the text of their tick if ticks are names, else by the number."""
    if isinstance(axis.get_major_formatter(), ScalarFormatter | LogFormatter):
        return list(values)
    ticks = [(tick.get_loc(), tick.label1.get_text()) for tick in axis.get_major_ticks()]

    def name(value: float) -> Any:
        near = (text for at, text in ticks if text and math.isclose(at, value, rel_tol=1e-6, abs_tol=1e-9))
        return next(near, value)

    return [name(value) for value in values]


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
