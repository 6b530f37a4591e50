"""Needles and positions in the report: Fig. 5, its numbers, and what must not be taken for them."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mdn.config import Params
from mdn.reports.departures import departures
from mdn.reports.figures import drawings, niah, positions
from mdn.reports.figures.lengths import listed, short
from mdn.reports.frame import frame, layout
from mdn.reports.layout import NEEDLES
from mdn.reports.runs import read_runs
from mdn.reports.tables import grids, markdown


def write_suite(folder: Path, suite: str, results: list[dict]) -> None:
    head = json.loads((folder / "evaluation" / "lm.json").read_text())
    told = {"n": 2, "limit": 2, "truncated": 0, "stderr": None, "task_hash": None, "data": "d" * 12}
    rows = [{**told, **row} for row in results]
    (folder / "evaluation" / f"{suite}.json").write_text(
        json.dumps({**head, "suite": suite, "results": rows})
    )


def write_needles(folder: Path, recalls: dict[int, float]) -> None:
    """The same recall for every task."""
    rows = [
        {"task": f"{task}_{length}", "metric": "recall", "value": recall, "window": length}
        for length, recall in recalls.items()
        for task in NEEDLES
    ]
    write_suite(folder, "niah", rows)


def write_positions(folder: Path, losses: dict[int, float]) -> None:
    rows = [
        {"task": f"heldout_{text}", "metric": f"nll@{stop}", "value": loss}
        for text in ("wiki", "speeches")
        for stop, loss in losses.items()
    ]
    write_suite(folder, "positions", rows)


@pytest.fixture
def suites(params: Params) -> Params:
    return replace(params, suites=["lm", "niah", "positions"])


def test_perplexities_of_five_digits_leave_room_for_the_axis(suites: Params, runs: Path):
    """Of each panel the width of its labels, and what is there: the gap to the panel before it."""
    write_positions(runs / "smoke" / "mdn", {64: math.log(9000), 128: math.log(21000)})
    (drawing,) = positions.drawings(suites, read_runs(suites, runs))
    labels = re.findall(r">([\d.]+K?)</text>", drawing.svg)
    assert "20K" in labels
    assert not any(len(label) > 4 for label in labels)


@pytest.fixture
def curves(monkeypatch) -> dict:
    """What the figures hand to `panels`, by scale."""
    found: dict = {}
    for module in (niah, positions):
        inner = module.panels

        def keep(params, scale, given, inner=inner, module=module, **labels):
            found[module.__name__.rsplit(".", 1)[1], scale] = given
            return inner(params, scale, given, **labels)

        monkeypatch.setattr(module, "panels", keep)
    return found


def test_fig_5_has_a_panel_a_task_and_a_line_a_model(suites: Params, runs: Path, curves):
    write_needles(runs / "smoke" / "mdn", {1024: 0.25, 512: 0.5})
    write_needles(runs / "smoke" / "gdn", {512: 0.125, 1024: 0.0})
    (drawing,) = niah.drawings(suites, read_runs(suites, runs))
    assert drawing.name == "niah-smoke"
    assert curves["niah", "smoke"] == {
        title: {"mdn": {512: 50.0, 1024: 25.0}, "gdn": {512: 12.5, 1024: 0.0}} for title in NEEDLES.values()
    }
    assert "trained on 256" in drawing.svg
    for title in (*NEEDLES.values(), "MDN", "GDN"):
        assert title in drawing.svg


@pytest.mark.parametrize(
    ("scale", "lengths", "title"),
    [
        ("smoke", (512, 1024), "In the form of Fig. 5: {} at 512 and 1K tokens (Smoke scale)"),
        ("400m", (2048, 8192), "Fig. 5: {} at 2K and 8K tokens (400M scale)"),
    ],
)
def test_only_a_scale_of_the_papers_has_a_figure_5_and_titles_say_the_lengths(
    suites: Params, runs: Path, scale, lengths, title
):
    write_needles(runs / scale / "mdn", dict.fromkeys(lengths, 0.5))
    (drawing,) = niah.drawings(suites, read_runs(suites, runs))
    assert (drawing.scale, drawing.title) == (scale, title.format("recall of RULER's needles"))


def test_perplexity_over_position_has_a_panel_a_text(suites: Params, runs: Path, curves):
    write_positions(runs / "smoke" / "mdn", {64: 3.0, 128: 2.5})
    write_positions(runs / "smoke" / "kda", {64: 4.0, 128: 800.0})
    (drawing,) = positions.drawings(suites, read_runs(suites, runs))
    assert drawing.title == "Perplexity over position in windows of 128 tokens (Smoke scale)"
    lines = {"kda": {64: math.exp(4)}, "mdn": {64: math.exp(3), 128: math.exp(2.5)}}
    assert curves["positions", "smoke"] == {"Wikipedia held-out": lines, "Speeches held-out": lines}


def test_results_of_another_training_are_not_drawn(suites: Params, runs: Path):
    for write_own, values in ((write_needles, {512: 0.5}), (write_positions, {64: 3.0})):
        write_own(runs / "smoke" / "mdn", values)
    manifest = runs / "smoke" / "mdn" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"fingerprint": "0" * 12}))
    found = {drawing.name for drawing in drawings(suites, read_runs(suites, runs))}
    assert found & {"niah-smoke", "positions-smoke"} == set()


def grid(params: Params, root: Path, name: str):
    runs = read_runs(params, root)
    found = grids(frame(params, runs), layout(params, runs), params.scales)
    return next(grid for grid in found if grid.name == name)


def test_the_table_of_the_papers_length_shows_what_the_paper_prints(suites: Params, runs: Path, add_run):
    write_needles(add_run("1b3", "mdn", 0.4), {8192: 0.375, 16384: 0.25})
    found = grid(suites, runs, "niah-1b3")
    assert found.title == "Fig. 5 in numbers: RULER's needles at 8192 tokens, recall (1.3B scale)"
    cells = dict(found.rows)["MDN"]
    assert [cell.value for cell in cells] == ["37.50"] * 6
    assert [cell.published for cell in cells] == ["", "", "", "38.60", "35.15", "27.60"]
    assert [cell.gap for cell in cells] == ["", "", "", "−1.10", "+2.35", "+9.90"]
    assert {cell.row["window"] for cell in cells} == {8192}


def test_a_small_scale_tabulates_its_longest_needles_and_never_as_the_papers(suites: Params, runs: Path):
    lengths = suites.scales["smoke"].evaluation.niah_lengths
    write_needles(runs / "smoke" / "mdn", {length: length / 4096 for length in lengths})
    found = grid(suites, runs, "niah-smoke")
    assert found.title == f"RULER's needles at {max(lengths)} tokens, recall (Smoke scale)"
    cells = dict(found.rows)["MDN"]
    assert {cell.row["value"] for cell in cells} == {100 * max(lengths) / 4096}
    assert {cell.published for cell in cells} == {""}
    assert "Fig. 5" not in markdown(found)


def test_a_report_without_the_suite_has_the_table_only_where_the_paper_prints_numbers(
    params: Params, runs: Path
):
    off = replace(params, suites=["lm"])
    found = {
        (scale, table.key)
        for scale, tables in layout(off, read_runs(off, runs)).items()
        for table in tables
        if table.key == "niah"
    }
    assert found == {("1b3", "niah")}


@pytest.mark.parametrize(("scale", "differ"), [("smoke", [True, True, True]), ("400m", [False, False, True])])
def test_departures_name_lengths_prompts_and_haystacks_of_needles(
    suites: Params, runs: Path, scale: str, differ: list[bool]
):
    def said():
        found = departures(suites, read_runs(suites, runs), scale)
        return [line for line in found if line.what.startswith("RULER's needles")]

    assert [(line.here, line.differs) for line in said()] == [("not run", True)]
    write_needles(runs / scale / "mdn", dict.fromkeys(suites.scales[scale].evaluation.niah_lengths, 0.5))
    assert [line.differs for line in said()] == differ


@pytest.mark.parametrize(("tokens", "text"), [(64, "64"), (1024, "1K"), (1500, "1500"), (16384, "16K")])
def test_lengths_are_short(tokens, text):
    assert short(tokens) == text


@pytest.mark.parametrize(
    ("lengths", "text"), [([512], "512"), ([512, 1024], "512 and 1K"), ([1, 2, 3], "1, 2 and 3")]
)
def test_lengths_are_listed(lengths, text):
    assert listed(lengths) == text
