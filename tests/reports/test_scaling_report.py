"""Scaling in the report, from made-up records of one and eight GPUs."""

import json
from dataclasses import replace

import pytest

from mdn.reports.figures.scaling import drawings
from mdn.reports.render import render
from mdn.reports.runs import read_runs
from mdn.reports.scaling import curves, sheets
from mdn.scaling.cells import plan


def write(root, cell, speed=None):
    folder = root / cell.scale / cell.name
    folder.mkdir(parents=True)
    manifest = {"fingerprint": cell.fingerprint(), "cell": cell.about(), "weights": None, "gpu": "H200"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if speed is None:
        (folder / "failed.json").write_text(json.dumps({"error": "status 1: out of memory", "step": 0}))
        return
    figures = {"tokens_per_second": speed, "mfu": 0.4, "data_wait": 0.002, "loss": 7.5, "communication": 0.25}
    (folder / "metrics.json").write_text(json.dumps(figures))


@pytest.fixture
def results(tmp_path, params):
    """What one GPU does in a second is 100, or 110 with eight times the batch; eight do 720 together."""
    speeds = {
        "mdn-n1-ddp-b4-shards": 100.0,
        "mdn-n8-ddp-b32-shards": 720.0,
        "mdn-n1-ddp-b32-shards": 110.0,
        "mdn-n8-fsdp-b32-shards": 600.0,
        "mdn-n8-zero2-b32-shards": None,
        "mdn-n8-ddp-b32-shards-compiled": 880.0,
        "gdn-n8-ddp-b32-shards": 700.0,
    }
    for cell in plan(params, ["1b3"], ["mdn", "gdn"], [1, 8]):
        if cell.name in speeds:
            write(tmp_path / "results" / "2026-12-01-h200", cell, speeds[cell.name])
    return tmp_path


def test_curves_are_shares_of_as_many_single_gpus(params, results):
    found = curves(params, read_runs(params, results / "runs", results / "results"), "1b3")
    assert found == {
        "4 sequences a GPU, DDP": {"mdn": {1: 1.0, 8: pytest.approx(0.9)}},
        "32 sequences a step, DDP": {"mdn": {1: 1.0, 8: pytest.approx(720 / 880)}},
    }


def test_the_table_has_every_cell_and_why_one_failed(params, results):
    (table,) = sheets(params, read_runs(params, results / "runs", results / "results"))
    lines = {(row[0], *row[2:5], row[6]): row for row in table.rows}
    assert len(lines) == len(table.rows) == 7
    eight = lines["MDN", "8", "DDP", "32 of 4096", "no"]
    assert eight[7:11] == ["720", "90.0 %", "81.8 %", "40.0 %"]
    assert lines["MDN", "8", "ZeRO-2", "32 of 4096", "no"][7] == "status 1: out of memory"
    assert lines["MDN", "8", "DDP", "32 of 4096", "yes"][8] == ""  # one GPU was not compiled
    assert lines["GDN", "8", "DDP", "32 of 4096", "no"][8] == ""
    assert all(len(row) == len(table.head) for row in table.rows)


def test_figure_and_table_are_written_and_on_the_page(params, results):
    few = replace(params, scales={"1b3": params.scales["1b3"]})
    page = render(few, results / "runs", results / "reports", results / "results").read_text()
    assert page.index('id="scaling-1b3"') < page.index('id="table-scaling-cells"')
    written = results / "reports" / "figures" / "scaling-1b3.csv"
    assert "0.9" in written.read_text()
    assert "status 1: out of memory" in (results / "reports" / "tables" / "scaling-cells.md").read_text()


def test_without_records_there_is_nothing(params, tmp_path):
    runs = read_runs(params, tmp_path)
    assert drawings(params, runs) == []
    assert sheets(params, runs) == []
