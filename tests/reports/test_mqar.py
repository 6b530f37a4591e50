"""Associative recall in the report, from made-up records of the paper's sweep."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import polars as pl
import pytest

from mdn.config import Params
from mdn.mqar.cells import Cell, cell
from mdn.mqar.summary import best, summary
from mdn.reports.figures.mqar import drawings
from mdn.reports.mqar import sheets, sweeps
from mdn.reports.render import render
from mdn.reports.runs import Run, read_run, read_runs

RATES = (1e-3, 3.162e-3)


def write(
    root: Path, made: Cell, validation: float, test: float, *, cut: str | None = None, gpu: str | None = None
) -> Path:
    """A record whose accuracy falls by 0.01 a part from `test`."""
    folder = root / made.scale / made.name
    folder.mkdir(parents=True)
    names = [f"{part.length}x{part.pairs}" for part in made.data.test]
    parts = {f"test/{name}": test - n / 100 for n, name in enumerate(names)}
    metrics = {
        "steps": 707,
        "epochs": 1.0,
        "seconds": 10.4,
        "skipped_steps": 0,
        "validation/accuracy": validation,
        "test/accuracy": sum(parts.values()) / len(parts),
        **parts,
    }
    manifest = {
        "fingerprint": made.fingerprint(),
        "data": "da7a" * 3,
        "code": "c0de" * 3,
        "commit": "0123456789ab",
        "kernels": {"momentum_delta_rule": "v3_triton"} if made.pattern == "mdn" else {},
        "gpu": gpu,
        "cpu": "x86_64",
        "started": "2026-11-30T18:00:00+00:00",
        "cut": cut,
    }
    files = {"config.yaml": asdict(made), "manifest.json": manifest, "metrics.json": metrics}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    lines = [
        {"step": step, "train/loss": 9 / step, "train/grad_norm_max": 1 + step / 100}
        for step in (50, 100, 150)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def root(params: Params, tmp_path: Path) -> Path:
    """MDN and GDN, two widths, rates and seeds: 3.162e-3 is better on validation, 1e-3 on the test."""
    for name, plus in (("gdn", 0.0), ("mdn", 0.1)):
        for width in (128, 256):
            for seed in (1, 2):
                low, high = (cell(params, "paper", name, width, lr, seed) for lr in RATES)
                write(tmp_path / "runs", low, 0.5 + plus, 0.9)
                write(tmp_path / "runs", high, 0.6 + plus, 0.6 + plus + seed / 100)
    return tmp_path / "runs"


def found(params: Params, root: Path, results: Path | None = None) -> dict[tuple[str, str], Run]:
    return read_runs(params, root, results)


def test_the_rate_is_chosen_on_validation_and_not_on_the_test(params: Params, root: Path):
    chosen = {(s.model, s.width): s for s in sweeps(params, found(params, root), "paper")}
    assert set(chosen) == {(model, width) for model in ("gdn", "mdn") for width in (128, 256)}
    mdn = chosen["mdn", 256]
    assert [run.config["lr"] for run in mdn.chosen] == [3.162e-3] * 2
    assert [run.config["seed"] for run in mdn.chosen] == [1, 2]
    assert len(mdn.cells) == 4
    assert mdn.accuracies["512x32"] == pytest.approx([0.71, 0.72])
    assert mdn.accuracies["2048x512"] == pytest.approx([0.63, 0.64])


def test_of_equal_rates_the_smallest_is_chosen_and_untested_cells_are_passed_over(
    params: Params, tmp_path: Path
):
    for lr, validation in ((1e-3, 0.5), (3.162e-3, 0.5), (1e-2, 0.9)):
        write(tmp_path, cell(params, "paper", "mdn", 128, lr, 1), validation, 0.5)
    (tmp_path / "mqar-paper" / "mdn" / "w128-lr1.0e-02-s1" / "metrics.json").unlink()
    runs = [
        run for (scale, _), run in found(params, tmp_path).items() if scale == "mqar-paper" and run.manifest
    ]
    assert len(runs) == 3
    assert [run.config["lr"] for run in best(runs)] == [1e-3]
    assert best([run for run in runs if not run.metrics]) == []


def test_the_summary_is_the_mean_over_the_seeds_of_the_best_rate(params: Params, root: Path):
    runs = [read_run(root, "mqar-paper", f"mdn/w256-lr{lr:.1e}-s{seed}") for lr in RATES for seed in (1, 2)]
    figures = summary(runs)
    assert figures["w256/lr"] == 3.162e-3
    assert figures["w256/seeds"] == 2
    assert figures["w256/validation"] == pytest.approx(0.7)
    assert figures["w256/test/512x32"] == pytest.approx(0.715)
    assert figures["w256/test"] == pytest.approx(0.675)


def test_the_table_gives_means_ranges_and_the_best_of_a_width(params: Params, root: Path):
    results, trainings, settings = sheets(params, found(params, root))
    assert [row[:3] for row in results.rows] == [
        ["GDN", "128", "61.50 ± 0.50"],
        ["MDN", "128", "71.50 ± 0.50"],
        ["GDN", "256", "61.50 ± 0.50"],
        ["MDN", "256", "71.50 ± 0.50"],
    ]
    assert results.head[2:12] == [
        *("512/32", "512/64", "512/128", "1024/64", "1024/128", "1024/256"),
        *("2048/128", "2048/256", "2048/512", "Mean"),
    ]
    assert {n for n, _ in results.best} == {1, 3}
    assert "| MDN | 256 | **71.50 ± 0.50** |" in results.markdown()
    assert "\\textbf{71.50 $\\pm$ 0.50}" in results.latex()
    assert len(trainings.rows) == 16
    lines = {row[0]: row[1:] for row in settings.rows}
    assert lines["Epochs"][0] == lines["Epochs"][-1] == "32"
    assert lines["Key size"][0] == lines["Key size"][-1] == "128"
    assert lines["Value expansion"][-1] == "2"


def test_a_training_that_was_cut_is_marked_and_explained(params: Params, tmp_path: Path):
    reason = "stopped by the time limit after epoch 3.20 of 32"
    write(tmp_path, cell(params, "paper", "mdn", 256, 1e-3, 1), 0.5, 0.5, cut=reason)
    runs = found(params, tmp_path)
    assert runs["mqar-paper", "mdn/w256-lr1.0e-03-s1"].state == "unfinished"
    results, trainings, _ = sheets(params, runs)
    assert results.rows[0][0] == "MDN (cut)"
    assert f"MDN, width 256, seed 1: {reason}." in results.notes
    assert trainings.rows[0][:2] == ["mdn/w256-lr1.0e-03-s1", reason]


def test_a_divergence_shows_its_step_and_reason(params: Params, tmp_path: Path):
    made = cell(params, "paper", "mdn-v1-logspace", 256, 1e-3, 1)
    folder = write(tmp_path, made, 0.0, 0.1)
    metrics = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(metrics | {"first_nonfinite_step": 70}))
    (folder / "failed.json").write_text(json.dumps({"error": "no finite gradient", "step": 79}))
    runs = found(params, tmp_path)
    results, trainings, _ = sheets(params, runs)
    assert results.rows[0][0] == "MDN with kernel v1_logspace (diverged)"
    line = dict(zip(trainings.head, trainings.rows[0], strict=True))
    assert line["State"] == "failed: no finite gradient"
    assert line["First non-finite step"] == "70"
    assert line["Largest gradient norm"] == "2.50"


def test_a_cell_of_another_configuration_is_marked(params: Params, tmp_path: Path):
    made = cell(params, "paper", "mdn", 256, 1e-3, 1)
    folder = write(tmp_path, made, 0.5, 0.5)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": "0" * 12}))
    _, trainings, _ = sheets(params, found(params, tmp_path))
    assert trainings.rows[0][1] == "finished †"
    assert trainings.notes[-1].startswith("†")


def test_results_of_other_machines_fill_what_runs_lack(params: Params, root: Path, tmp_path: Path):
    """runs/ first, then the latest campaign; each with GPU and date."""
    results = tmp_path / "results"
    (results / "README.md").parent.mkdir()
    (results / "README.md").write_text("not a campaign")
    kda, mdn = (cell(params, "paper", name, 256, 1e-3, 1) for name in ("kda", "mdn"))
    write(results / "2026-11-30-h200", kda, 0.3, 0.3, gpu="NVIDIA H200")
    write(results / "2026-12-01-h100", kda, 0.4, 0.4, gpu="NVIDIA H100")
    write(results / "2026-12-01-h100", mdn, 0.99, 0.99, gpu="NVIDIA H100")
    runs = found(params, root, results)
    ours, theirs = runs["mqar-paper", mdn.name], runs["mqar-paper", kda.name]
    assert (ours.campaign, ours.hardware) == (None, "x86_64")
    assert (theirs.campaign, theirs.hardware) == ("2026-12-01-h100", "NVIDIA H100, 2026-11-30")
    together = replace(theirs, manifest=theirs.manifest | {"gpu_shared_by": 4})
    assert together.hardware == "NVIDIA H100 shared by 4 trainings, 2026-11-30"
    assert theirs.metrics["validation/accuracy"] == 0.4
    assert (runs["smoke", "mdn"].state, runs["smoke", "mdn"].campaign) == ("absent", None)
    table, *_ = sheets(params, runs)
    assert next(row for row in table.rows if row[0] == "KDA")[-1] == "NVIDIA H100, 2026-11-30"


def test_a_language_model_of_another_machine_fills_its_cells(params: Params, made: Path, tmp_path: Path):
    runs = read_runs(params, tmp_path / "runs", made.parent)
    assert runs["smoke", "mdn"].state == "finished"
    assert runs["smoke", "mdn"].campaign == "runs"
    assert runs["smoke", "comba"].evaluations.keys() >= {"lm", "commonsense"}


def test_the_figure_has_a_panel_a_width_and_a_line_a_model(params: Params, root: Path):
    accuracy, course = drawings(params, found(params, root))
    assert accuracy.name == "mqar-paper"
    for text in ("Model width 128", "Model width 256", "MDN", "GDN"):
        assert text in accuracy.svg
        assert text in course.svg
    assert "KDA" not in accuracy.svg
    assert drawings(params, found(params, root.parent / "nothing")) == []


def test_the_page_and_the_files_have_it(params: Params, root: Path, tmp_path: Path):
    page = render(params, root, tmp_path / "reports", tmp_path / "results").read_text()
    for text in ("Multi-query associative recall (Paper scale)", "Table 5: settings", "Fig. 4"):
        assert text in page
    table = pl.read_csv(tmp_path / "reports" / "tables" / "mqar-paper.csv")
    assert table.filter(pl.col("Model") == "MDN")["2048/512"].to_list() == ["63.50 ± 0.50"] * 2
    for name in ("tables/mqar-settings.tex", "figures/mqar-paper.svg", "figures/mqar-paper-training.png"):
        assert (tmp_path / "reports" / name).stat().st_size > 1000
