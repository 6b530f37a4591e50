"""Figures of known geometry: one axes over a page of 4 × 2 inches, which is 288 × 144 units of the SVG."""

import csv
import io
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from mdn.reports.figures.readings import read
from mdn.reports.figures.style import look, written


def page(xlim=(0, 10), ylim=(0, 1), **options):
    figure = Figure(figsize=(4, 2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=xlim, ylim=ylim, xlabel="width", ylabel="height", **options)
    axes.set_autoscale_on(False)
    return figure, axes


def points(figure: Figure) -> list[list]:
    return [series["points"] for series in read(figure).page()["panels"][0]["series"]]


def test_a_line_is_read_where_it_is_drawn():
    figure, axes = page()
    axes.plot([0, 5, 10], [0, 0.5, 0.875], label="a", color="#d55e00")
    (panel,) = read(figure).page()["panels"]
    assert (panel["x"], panel["y"], panel["box"]) == ("width", "height", [0, 0, 288, 144])
    (series,) = panel["series"]
    assert (series["label"], series["colour"]) == ("a", "#d55e00")
    assert series["points"] == [[0, 144, "0", "0"], [144, 72, "5", "0.5"], [288, 18, "10", "0.875"]]


def test_the_ids_are_those_of_the_groups_in_the_svg():
    with look():
        figure = Figure(figsize=(4, 3))
        axes = figure.add_subplot()
        axes.errorbar([1, 2], [1, 2], yerr=0.1, label="a")
        axes.bar([1, 2], [3, 4], label="b")
        axes.scatter([1], [2], label="c")
        axes.fill_between([1, 2], [1, 1], [2, 2], label="a")
        axes.legend()
        drawing = written(figure, "name", "smoke", "title")
    told = drawing.readings.page()
    wanted = [i for panel in told["panels"] for series in panel["series"] for i in series["ids"]]
    wanted += [i for ids in told["legend"].values() for i in ids]
    assert set(told["legend"]) == {"a", "b", "c"}
    assert len(wanted) == len(set(wanted)) > 10
    for name in wanted:
        assert len(re.findall(f'<g id="{name}"', drawing.svg)) == 1


def test_a_series_without_a_label_takes_the_legends_text_of_its_colour_if_just_one_has_it():
    figure, axes = page()
    for colour in ("#ff0000", "#00ff00", "#0000ff"):
        axes.plot([1], [1], color=colour)
    for colour, text in (("#ff0000", "red"), ("#00ff00", "green"), ("#00ff00", "olive")):
        axes.plot([], [], color=colour, label=text)
    figure.legend(handles=axes.lines[3:])
    labels = [series["label"] for series in read(figure).page()["panels"][0]["series"]][:3]
    assert labels == ["red", "", ""]


def test_marks_across_the_panel_and_caps_of_error_bars_are_no_series():
    figure, axes = page()
    axes.axhline(0.5, label="limit")
    axes.axvline(5)
    axes.errorbar([1, 2], [0.1, 0.2], yerr=0.05, capsize=3, label="a")
    assert points(figure) == [[[28.8, 129.6, "1", "0.1"], [57.6, 115.2, "2", "0.2"]]]


@pytest.mark.parametrize(("upright", "named"), [(True, ["a", "3"]), (False, ["3", "a"])])
def test_a_bar_is_a_box_and_its_category_has_a_name(upright, named):
    figure, axes = page((-1, 3), (0, 4)) if upright else page((0, 4), (-1, 3))
    (axes.bar if upright else axes.barh)(["a", "b"], [3, 2])
    first, _ = points(figure)[0]
    assert first[4:] == named
    assert first[:4] == pytest.approx([43.2, 36, 100.8, 144] if upright else [0, 93.6, 216, 122.4], abs=0.1)


def test_bars_of_a_group_are_called_by_its_name():
    figure, axes = page((-1, 2), (0, 4))
    for n in range(3):
        axes.bar([0.25 * n - 0.25, 0.25 * n + 0.75], [1, 2], 0.2)
    axes.set_xticks([0, 1], ["short", "long"])
    assert [[point[4:] for point in series] for series in points(figure)] == [
        [["short", "1"], ["long", "2"]]
    ] * 3


VALUES = np.array([[1.0, 2.0], [3.0, np.nan]])


@pytest.mark.parametrize("how", ["upper", "lower", "mesh"])
def test_a_heat_map_is_read_cell_by_cell(how):
    figure, axes = page((0, 2), (0, 2))
    if how == "mesh":
        axes.pcolormesh([0, 1, 2], [0, 1, 2], VALUES)
    else:
        axes.imshow(VALUES, origin=how, extent=(0, 2, 0, 2), aspect="auto")
    at = {value: box for *box, _, _, value in points(figure)[0]}
    low, high = [72, 144], [0, 72]
    rows = {"1": low, "2": low, "3": high} if how != "upper" else {"1": high, "2": high, "3": low}
    assert at == {
        v: [144 * (v == "2"), top, 144 + 144 * (v == "2"), bottom] for v, (top, bottom) in rows.items()
    }


def test_what_has_no_place_on_the_page_is_left_out():
    figure, axes = page((1, 100), (1, 100), xscale="log", yscale="log")
    axes.plot([0, 1, 10, 100], [1, np.nan, 10, 100])
    assert points(figure) == [[[144, 72, "10", "10"], [288, 0, "100", "100"]]]


def test_the_page_leaves_out_what_lies_beyond_the_axes_and_the_csv_does_not():
    figure, axes = page()
    axes.plot([5, 20], [0.5, 0.5])
    found = read(figure)
    assert found.page()["panels"][0]["series"][0]["points"] == [[144, 72, "5", "0.5"]]
    assert found.csv().count("\n") == 3


def test_the_csv_keeps_every_digit():
    figure, axes = page()
    axes.set_title("panel", loc="left")
    axes.plot([1 / 3], [2 / 3], label='with "quotes", and comma')
    (row,) = csv.DictReader(io.StringIO(read(figure).csv()))
    assert row["panel"] == "panel"
    assert row["series"] == 'with "quotes", and comma'
    assert (float(row["x"]), float(row["y"]), row["value"]) == (1 / 3, 2 / 3, "")
