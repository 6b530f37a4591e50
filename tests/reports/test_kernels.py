import json
import runpy
import sys
from pathlib import Path

import pytest

from mdn.cli import main
from mdn.reports.figures.kernels import COLOURS as VERSION_COLOURS
from mdn.reports.figures.kernels import colour
from mdn.reports.figures.style import COLOURS
from mdn.reports.kernels import error, report, timings

ROOT = Path(__file__).parents[2]
VERSIONS = [
    {"name": name, "note": f"note of {name}", "devices": ["cpu"], "automatic": name != "v1_logspace"}
    for name in ("recurrent", "v1_logspace", "v2_segsum", "v3_triton")
]


def row(gates: str, version: str, outputs: float | None, gradients: float | None) -> dict:
    told = {"gates": gates, "ranges": f"ranges of {gates}", "version": version}
    return {**told, "outputs": outputs, "gradients": gradients}


@pytest.fixture
def record() -> dict:
    bench = ROOT / "benchmarks" / "results"
    rows = [
        row("typical", "v1_logspace", 2.0, 8e5),
        row("typical", "v2_segsum", 2e-7, 3e-7),
        row("beta=0", "v1_logspace", 2e303, None),
        row("beta=0", "v2_segsum", 5e-8, 3e-7),
        row("no mu bound", "v1_logspace", None, None),
        row("no mu bound", "v2_segsum", 1.6e-7, 3e-7),
    ]
    shape = {"T": 256, "H": 2, "K": 16, "V": 16}
    accuracy = {"device": "x86_64", "torch": "2.13.0", "dtype": "float32", "shape": shape}
    return {"accuracy": {**accuracy, "versions": VERSIONS, "rows": rows}, "timings": timings(bench)}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not finite"), (1.6e-7, "2e−7"), (0.25, "2e−1"), (8.4e5, "8e+5"), (2e303, "wrong: 0 expected")],
)
def test_an_error_is_one_digit_and_a_power(value, text):
    assert error(value) == text


def test_table_6_sets_the_papers_coefficient_beside_the_stable_one(record: dict):
    table = next(t for t in report(record).tables if "Table 6" in t.title)
    assert [cells[2].split(":")[0] for cells in table.rows] == ["v1_logspace", "v2_segsum"]
    assert [cells[3:] for cells in table.rows] == [["not finite"] * 2, ["2e−7", "3e−7"]]
    assert {cells[0] for cells in table.rows} == {"w/o μ bound: NaN at step 70"}


def test_committed_timings_are_tables_and_pictures(record: dict):
    made = report(record)
    assert record["timings"], "benchmarks/results has no timings"
    text = made.markdown()
    first = record["timings"][0]
    timed = first["results"][0]
    assert f"Time and memory on {first['device']}" in text
    assert f"| {timed['forward_backward_ms_p50']:.3f} |" in text
    assert [drawing.name for drawing in made.drawings][:2] == ["errors", f"speed-{Path(first['file']).stem}"]
    bars = {
        point[-1]
        for panel in made.drawings[1].readings.page()["panels"]
        for s in panel["series"]
        for point in s["points"]
    }
    assert f"{timed['forward_backward_ms_p50']:.5g}" in bars


def test_an_operator_has_the_colour_of_its_model_and_no_version_has_it():
    names = [version["name"] for version in VERSIONS]
    others = ("triton.gated_delta_rule", "fla.gated_delta_rule", "triton.comba", "fla.comba")
    assert colour(names, "triton.comba") == COLOURS["comba"]
    assert colour(names, "triton.gated_delta_rule") == COLOURS["gdn"]
    assert len({colour(names, name) for name in (*names, *others)}) == len(names) + len(others)
    assert not {*VERSION_COLOURS} & {COLOURS[model] for model in COLOURS if model != "mdn"}


def test_lengths_are_set_against_the_longest_of_their_heads_and_the_first_call_is_named(record: dict):
    (bench,) = [x for x in record["timings"] if x["file"] == "h200.json"]
    one = {"name": "v4_hopper", "heads": "1.3B", "B": 1, "H": 6, "K": 256, "V": 512}
    bench["lengths"] = [
        {**one, "T": 2048, "forward_backward_ms_p50": 0.6},
        {**one, "T": 8192, "forward_backward_ms_p50": 2.0},
        {**one, "heads": "400M", "K": 128, "V": 256, "T": 2048, "forward_backward_ms_p50": 0.3},
    ]
    bench["first_call"] = {"empty_cache_s": 21.4, "warm_cache_s": 1.25}
    tables = report(record).tables
    (table,) = [table for table in tables if table.title.startswith("One sequence")]
    assert [cells[2:] for cells in table.rows] == [
        ["2,048", "0.600", "293.0", "1.20"],
        ["8,192", "2.000", "244.1", "1.00"],
        ["2,048", "0.300", "146.5", "1.00"],
    ]
    assert any("first call 21.4 s, 1.2 s with compiled kernels" in table.title for table in tables)


def test_what_is_not_finite_is_drawn_at_the_edge_and_the_rest_at_its_value(record: dict):
    series = {s.label: s.xs for s in report(record).drawings[0].readings.panels[0].series}
    assert series["v2_segsum"] == [2e-7, 5e-8, 1.6e-7]
    assert series["v1_logspace"] == [2.0, "not finite", "not finite"]


def test_a_comparison_names_two_versions_only_and_starts_with_what_they_are(record: dict):
    text = report(record, only=["v1_logspace", "v2_segsum"]).markdown("a against b", None)
    assert text.index("## Versions") < text.index("## Errors")
    assert "note of v2_segsum" in text
    assert "v3_triton" not in text
    assert "![" not in text


def test_markdown_tables_are_even(record: dict):
    for table in report(record).tables:
        assert {len(cells) for cells in table.rows} == {len(table.head)}


def test_the_stage_writes_the_same_bytes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mdn_kernels.testing.GATES", {"typical": {}, "no mu bound": {"log_mu": (-8.0, 0.0)}})
    monkeypatch.setattr("mdn_kernels.accuracy.GATES", {"typical": {}, "no mu bound": {"log_mu": (-8.0, 0.0)}})
    written = []
    for name in ("a", "b"):
        out = ["--out", str(tmp_path / name), "--results", str(ROOT / "benchmarks" / "results")]
        monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *out])
        runpy.run_path(str(ROOT / "pipeline" / "bench_kernels.py"), run_name="__main__")
        files = [path for path in sorted((tmp_path / name).rglob("*")) if path.is_file()]
        written.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert written[0] == written[1]
    assert {"kernels.md", "kernels/record.json", "kernels/errors.svg", "kernels/errors.png"} <= set(
        written[0]
    )
    record = json.loads(written[0]["kernels/record.json"])["accuracy"]
    found = {(r["gates"], r["version"]): r["outputs"] for r in record["rows"]}
    assert found["no mu bound", "v1_logspace"] is None
    assert found["no mu bound", "v2_segsum"] < 1e-5


def test_mdn_diff_of_kernels_finds_runs_that_differ_in_nothing_else(
    add_run, runs: Path, params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mdn_kernels.accuracy.GATES", {"typical": {}})
    monkeypatch.setattr("mdn_kernels.testing.GATES", {"typical": {}})
    archived = runs / ".archive/smoke/mdn/0123456789abcdef"
    archived.parent.mkdir(parents=True)
    (runs / "smoke/mdn").rename(archived)
    add_run("smoke", "mdn", 0.4)
    manifest = json.loads((archived / "manifest.json").read_text())
    manifest["kernels"] = {"momentum_delta_rule": "v1_logspace"}
    (archived / "manifest.json").write_text(json.dumps(manifest))
    config = archived / "config.yaml"
    config.write_text(config.read_text().replace("kernel: auto", "kernel: v1_logspace"))
    text = (ROOT / "params.yaml").read_text().replace("uri: sqlite:///mlflow.db", "uri: null")
    Path("params.yaml").write_text(text)
    command = ["diff", "--kernel", "v1_logspace", "v2_segsum", "--runs", str(runs), "--out", "made"]
    assert main(command) == 0
    made = Path("made/diff.md").read_text()
    assert "### smoke/mdn (0123456789ab) on v1_logspace against smoke/mdn on v2_segsum" in made
    assert "| kernel | v1_logspace | auto |" in made
    assert "smoke/mdn-no-correction" not in made
    assert {"errors.svg", "loss-1.png", "loss-1.csv"} <= {path.name for path in Path("made").iterdir()}


def test_an_unknown_version_is_one_line(capsys):
    assert main(["diff", "--kernel", "v1_logspace", "v9"]) == 2
    assert "no version 'v9'; use one of recurrent" in capsys.readouterr().err
