"""Fig. 6 and its tables from made-up records of a card."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from mdn.config import Params
from mdn.efficiency.cells import MODELS, plan
from mdn.reports.efficiency import sheets
from mdn.reports.figures.efficiency import drawings
from mdn.reports.render import render
from mdn.reports.runs import read_runs

SPEED = {"transformer": 60, "mamba2": 45, "gdn": 50, "gdn-fla": 48, "comba": 49, "kda": 44, "mdn": 49.2}
SPEED["mdn-v4_recompute"] = 47
SHAPES = ((8, 2048), (4, 4096), (2, 8192), (1, 16384))


def write(root: Path, params: Params, scale: str, *, gpu: str = "NVIDIA H200") -> None:
    """Thousand tokens/s of SPEED, less on longer sequences; KDA at 16384 tokens failed."""
    for run in plan(params, scale).runs:
        folder = root / run.scale / run.name
        folder.mkdir(parents=True)
        metrics: dict[str, float] = {}
        for n, (B, T) in enumerate(SHAPES):
            cell, speed = f"train/{B}x{T}", 1e3 * SPEED[run.name] * (1 - n / 50)
            for name, factor in (("seconds", 1.0), ("seconds_p20", 0.99), ("seconds_p80", 1.01)):
                metrics[f"{cell}/{name}"] = factor * B * T / speed
            metrics |= {f"{cell}/tokens_per_second": speed, f"{cell}/samples": 8, f"{cell}/mfu": 0.4}
            metrics |= {f"{cell}/peak_gib": 60 + SPEED[run.name] / 10, f"{cell}/estimated_gib": 70.0}
        for n, T in enumerate((1024, 2048, 4096, 8192, 16384)):
            metrics[f"decode/1x{T}/seconds"] = 3e-3 + n * (2e-3 if run.name == "transformer" else 0)
            metrics[f"decode/1x{T}/peak_gib"] = 8.0
        failures = {}
        if run.name == "kda":
            metrics = {k: v for k, v in metrics.items() if not k.startswith("train/1x16384")}
            failures = {"train/1x16384": "OutOfMemoryError: CUDA out of memory"}
        if run.name == "mdn":
            metrics |= {"loader/4x4096/seconds": 0.4, "loader/4x4096/wait_seconds": 0.001}
            metrics |= {"prefill/1x16384/seconds": 0.05, "prefill/1x16384/token_seconds": 1e-3}
            metrics |= {"prefill/1x16384/tokens_read": 8000, "compiled/4x4096/seconds": 0.3}
            metrics |= {"compiled/4x4096/tokens_per_second": 54120, "compiled/4x4096/compile_seconds": 21.0}
        manifest = {
            "gpu": gpu,
            "driver": "580.1",
            "commit": "0123456789ab",
            "started": "2026-11-30T20:00:00+00:00",
            "kernels": {"op": run.kernel},
            "versions": {"torch": "2.11.0"},
            "failures": failures,
            "weights": None,
            "cut": "the deadline left out 1 cells" if run.name == "comba" else None,
        }
        files = {"config.yaml": asdict(run), "manifest.json": manifest, "metrics.json": metrics}
        for name, value in files.items():
            (folder / name).write_text(json.dumps(value))


@pytest.fixture
def results(params: Params, tmp_path: Path) -> Path:
    write(tmp_path / "results" / "2026-11-30-h200", params, "1b3")
    return tmp_path / "results"


def test_ratios_and_failures_are_in_the_table_of_trainings(params: Params, results: Path):
    training, _, _ = sheets(params, read_runs(params, results.parent / "runs", results))
    rows = {(row[0], row[1]): dict(zip(training.head, row, strict=True)) for row in training.rows}
    assert len(rows) == len(MODELS) * len(SHAPES)
    mdn = rows["MDN", "4 × 4096"]
    assert (mdn["Tokens/s to GDN's"], mdn["Tokens/s to GDN (FLA)'s"]) == ("0.984", "1.025")
    assert mdn["Peak to GDN (FLA)'s"] == "1.002"
    published = {title: row["Paper's GB"] for (title, at), row in rows.items() if at == "4 × 4096"}
    assert published.pop("GDN (FLA)") == ""
    assert published == {
        "Transformer": "33.00",
        "Mamba2": "37.21",
        "GDN": "39.38",
        "Comba": "42.34",
        "KDA": "39.22",
        "MDN": "44.89",
        "MDN (residuals computed again)": "41.25",
    }
    assert (mdn["Tokens/s"], mdn["p20 to p80"]) == ("48216", "47739 to 48703")
    assert rows["KDA", "1 × 16384"]["Tokens/s"] == "failed: OutOfMemoryError: CUDA out of memory"
    best = {(training.rows[n][0], training.rows[n][1]) for n, _ in training.best}
    assert best == {("Transformer", f"{B} × {T}") for B, T in SHAPES}
    notes = " ".join(training.notes)
    assert "MDN 44.89" in notes
    assert "Comba: the deadline left out" in notes


def test_decoding_prefill_loader_and_compiler_have_their_tables(params: Params, results: Path):
    _, decoding, rest = sheets(params, read_runs(params, results.parent / "runs", results))
    rows = {row[0]: row for row in decoding.rows}
    assert rows["Transformer"][1:6] == ["3.00", "5.00", "7.00", "9.00", "11.00"]
    told = {row[2].split()[0] + row[2].split()[-1]: row[3:6] for row in rest.rows}
    assert list(told.values()) == [
        ["50.0 ms", "16384 ms (8000 read)", "327.7"],
        ["1.00 ms", "400.0 ms a step", "0.25%"],
        ["54120 tokens/s, first step 21 s", "48216 tokens/s", "1.122"],
    ]


def test_no_ratio_between_two_campaigns(params: Params, results: Path, tmp_path: Path):
    write(tmp_path / "results" / "2026-12-01-h200", params, "1b3")
    later = tmp_path / "results" / "2026-12-01-h200" / "efficiency-1b3"
    for name in ("gdn", "gdn-fla"):
        (later / name / "manifest.json").unlink()
        (later / name / "metrics.json").unlink()
    training, _, _ = sheets(params, read_runs(params, results.parent / "runs", results))
    rows = {(row[0], row[1]): row for row in training.rows}
    assert rows["MDN", "4 × 4096"][4:6] == ["", ""]
    assert rows["GDN", "4 × 4096"][4] == "1.000"


def test_the_figure_has_a_line_a_system_and_is_fig_6_at_the_papers_scale_only(
    params: Params, results: Path, tmp_path: Path
):
    write(tmp_path / "runs", params, "small")
    runs = read_runs(params, tmp_path / "runs", results)
    small, large = drawings(params, runs)
    assert (large.name, small.name) == ("efficiency-1b3", "efficiency-small")
    assert large.title.startswith("Fig. 6: ")
    assert not small.title.startswith("Fig. 6")
    decoding, throughput, memory = large.readings.panels
    assert len(decoding.series) == len(MODELS)
    kda = next(series for series in throughput.series if series.label == "KDA")
    assert kda.xs == ["2K × 8", "4K × 4", "8K × 2"]
    assert kda.ys[0] == pytest.approx(44)
    mdn = next(series for series in memory.series if series.label == "MDN")
    assert mdn.ys == pytest.approx([64.92] * 4)
    colours = {series.label: series.colour for series in throughput.series}
    assert colours["GDN"] == colours["GDN (FLA)"]


def test_what_was_not_measured_is_no_part_of_the_figure(params: Params, results: Path, tmp_path: Path):
    def keep(kinds: tuple[str, ...]) -> list:
        for path in results.rglob("metrics.json"):
            found = json.loads(path.read_text())
            path.write_text(json.dumps({k: v for k, v in found.items() if k.startswith(kinds)}))
        return drawings(params, read_runs(params, tmp_path / "runs", results))

    (figure,) = keep(("train/4x4096", "prefill"))
    assert [panel.series[0].xs for panel in figure.readings.panels] == [["4K × 4"], ["4K × 4"]]
    assert figure.title == "Fig. 6: training throughput and memory (1.3B scale)"
    assert keep(("prefill",)) == []


def test_the_page_has_figure_tables_and_records_and_is_the_same_twice(
    params: Params, results: Path, tmp_path: Path
):
    pages = [render(params, tmp_path / "runs", tmp_path / f"out{n}", results).read_text() for n in (1, 2)]
    assert pages[0] == pages[1]
    assert 'id="table-efficiency-1b3-decoding"' in pages[0]
    assert "results/2026-11-30-h200" in pages[0]
    ids = re.findall(r'<(?:article|figure|section) id="([^"]+)"', pages[0])
    assert len(ids) == len({*ids})
    assert (tmp_path / "out1" / "figures" / "efficiency-1b3.csv").exists()
    assert (tmp_path / "out1" / "tables" / "efficiency-1b3-rest.md").exists()


def test_without_a_record_there_is_no_section(params: Params, tmp_path: Path):
    page = render(params, tmp_path / "runs", tmp_path / "out").read_text()
    assert 'id="efficiency"' not in page
