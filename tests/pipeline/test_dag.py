"""The DAG as a user meets it: a copy of the checkout, parameters cut down, the real `dvc`.

One copy serves all tests of this file, in order: the first builds everything, the others edit params.yaml or
a source file and look at what DVC would rerun or reran. Packages come from pip, or from this checkout's
data/raw where it has them already.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from omegaconf import OmegaConf

pytestmark = pytest.mark.slow

CELLS = {"gdn": "gdn", "mdn": "mdn", "mdn-no-correction": "mdn"}


def edit(path: Path, **values: object) -> None:
    """Sets values of params.yaml in `path`; keys are written a__b__c."""
    file = path / "params.yaml"
    config = OmegaConf.load(file)
    for key, value in values.items():
        node = config
        *parts, last = key.replace("_h_", "-h-").split("__")
        for part in parts:
            node = node[part]
        node[last.replace("~", "-")] = value
    OmegaConf.save(config, file)


def run(path: Path, *command: str, check: bool = True) -> str:
    """Runs a command of the project in `path`, on its sources, and returns what it printed."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{path / 'src'}{os.pathsep}{path / 'kernels'}",
        "DVC_NO_ANALYTICS": "1",
    }
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if check:
        assert done.returncode == 0, output
    else:
        assert done.returncode != 0, output
    return output


def ran(output: str) -> set[str]:
    """Names of the stages that a `dvc repro` ran."""
    return {line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage '")}


def changed(path: Path) -> set[str]:
    """Names of the stages that `dvc status` lists."""
    return set(json.loads(run(path, "dvc", "status", "--json")))


def cell(name: str, scale: str = "smoke") -> set[str]:
    suites = OmegaConf.load(Path(__file__).parents[2] / "params.yaml").suites
    return {f"train-{scale}@{name}", *(f"evaluate-{scale}@{name}-{suite}" for suite in suites)}


@pytest.fixture(scope="module")
def project(root, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).exists():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, path / name)
    (path / "dvc.lock").unlink(missing_ok=True)
    if (root / "data" / "raw").exists():
        shutil.copytree(root / "data" / "raw", path / "data" / "raw")
    run(path, "git", "init", "-q")
    run(path, "git", "config", "user.email", "test@example.org")
    run(path, "git", "config", "user.name", "test")
    edit(
        path,
        runs={"smoke": CELLS, "small": {}, "400m": {}, "1b3": {}},
        scales__smoke__training={
            "tokens": 4 * 512,
            "warmup_tokens": 512,
            "batch_tokens": 512,
            "context": 128,
            "lr": 3e-3,
            "validate_every": 2,
            "validation_tokens": 512,
        },
        scales__smoke__machine={"micro_batch": 2, "checkpoint_every": 2},
        scales__smoke__evaluation={
            "limit": 3,
            "window": 512,
            "batch_tokens": 2048,
            "heldout_tokens": 512,
            "written_limit": 2,
            "retrieval_window": 128,
            "longbench_window": 192,
            "niah_lengths": [512],
            "niah_items": 1,
            "position_length": 128,
            "position_windows": 1,
        },
        scales__smoke__d_model=32,
        mqar__runs__smoke={},
    )
    run(path, "git", "add", "-A")
    run(path, "git", "commit", "-qm", "start")
    output = run(path, "dvc", "repro")
    assert set().union(*map(cell, CELLS)) | {"prepare@smoke", "render"} <= ran(output)
    run(path, "git", "add", "-A")
    run(path, "git", "commit", "-qm", "baseline")
    return path


def trained(path: Path, name: str) -> dict:
    return OmegaConf.to_container(OmegaConf.load(path / "runs" / "smoke" / name / "config.yaml"))


def test_the_whole_dag_fills_the_report(project):
    page = (project / "reports" / "index.html").read_text()
    assert "not comparable" in page
    cells = pl.read_csv(project / "reports" / "cells.csv", infer_schema_length=None)
    ours = cells.filter(pl.col("status") == "ok", pl.col("scale") == "smoke")
    assert set(ours["row"]) == set(CELLS)
    assert ours["value"].is_finite().all()
    assert {"heldout_wiki", "lambada_ppl", "hellaswag", "lm_average", "standin_squad", "standin_code"} <= set(
        ours["column"]
    )
    record = json.loads((project / "runs" / "smoke" / "mdn" / "metrics.json").read_text())
    assert record["steps"] == 4
    assert record["tokens"] == 4 * 512


def test_nothing_to_do_runs_nothing(project):
    assert ran(run(project, "dvc", "repro")) == set()
    assert changed(project) == set()


def test_the_command_of_a_cell_makes_that_cell_again_and_nothing_else(project):
    """Plainly asked for, DVC skips what is up to date; forced, the stage does not adopt its own result."""

    def state() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in (project / "runs").rglob("*") if p.is_file()}

    cells = pl.read_csv(project / "reports" / "cells.csv", infer_schema_length=None)
    wanted = (pl.col("row") == "gdn") & (pl.col("column") == "heldout_wiki") & (pl.col("scale") == "smoke")
    before, row = state(), cells.filter(wanted, pl.col("table") == "table2").to_dicts()[0]
    path = project / "runs" / "smoke" / "gdn" / "evaluation" / "lm.json"
    first = json.loads(path.read_text())
    assert ran(run(project, "sh", "-c", row["command"])) == {"evaluate-smoke@gdn-lm"}
    made = {name for name, time in state().items() if before.get(name) != time}
    own = {path, path.with_name("lm.samples.jsonl.gz"), path.with_name("metrics") / "lm.json"}
    assert made == set(map(str, own))
    assert json.loads(path.read_text())["results"] == first["results"]
    assert changed(project) == {"render"}
    run(project, "git", "checkout", "-q", "dvc.lock")
    run(project, "dvc", "checkout", "--force")
    assert changed(project) == set()


def test_rendering_twice_gives_the_same_bytes(project):
    def rendered() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted((project / "reports").rglob("*")) if p.is_file()}

    before = rendered()
    run(project, "dvc", "repro", "--single-item", "--force", "render")
    assert rendered() == before


def test_an_ablations_private_parameter_touches_its_own_cells(project):
    before = (project / "params.yaml").read_text()
    edit(project, **{"models__mdn~no~correction": {"base": "mdn", "options": {"mdn": {"log_mu_min": -3.0}}}})
    listed = changed(project)
    assert {"train-smoke@mdn-no-correction"} <= listed <= cell("mdn-no-correction") | {"render"}
    (project / "params.yaml").write_text(before)
    assert changed(project) == set()


def test_a_base_takes_its_derived_models_along(project):
    """Through the file and through `dvc exp run -S`: every cell trains with what the base says now."""
    before = (project / "params.yaml").read_text()
    edit(project, models__mdn__lr=1e-3)
    ran_now = ran(run(project, "dvc", "repro"))
    assert {"train-smoke@mdn", "train-smoke@mdn-no-correction"} <= ran_now
    assert "train-smoke@gdn" not in ran_now
    assert trained(project, "mdn")["lr"] == trained(project, "mdn-no-correction")["lr"] == 1e-3
    assert trained(project, "gdn")["lr"] == 3e-3

    (project / "params.yaml").write_text(before)
    assert "adopted" in run(project, "dvc", "repro")  # back from the archive, not trained again
    assert trained(project, "mdn")["lr"] == 3e-3

    run(project, "dvc", "exp", "run", "-S", "models.mdn.lr=2e-3")
    assert trained(project, "mdn")["lr"] == trained(project, "mdn-no-correction")["lr"] == 2e-3
    run(project, "git", "checkout", "-q", "params.yaml", "dvc.lock")
    run(project, "dvc", "repro")
    assert trained(project, "mdn-no-correction")["lr"] == 3e-3


def test_metrics_diff_shows_the_edit(project):
    edit(project, models__gdn__lr=1e-2)
    assert ran(run(project, "dvc", "repro")) <= cell("gdn") | {"render"}
    shown = json.loads(run(project, "dvc", "metrics", "diff", "--json"))
    gdn = shown.get("diff", shown)["runs/smoke/gdn/metrics.json"]
    assert gdn["validation_loss"]["old"] != gdn["validation_loss"]["new"]
    run(project, "git", "checkout", "-q", "params.yaml", "dvc.lock")
    run(project, "dvc", "repro")


def test_adding_and_removing_a_model(project):
    edit(project, runs__smoke=CELLS | {"mdn-h-3to1": "mdn-h-3to1"})
    assert ran(run(project, "dvc", "repro")) == cell("mdn-h-3to1") | {"render"}
    assert ",mdn-h-3to1," in (project / "reports" / "cells.csv").read_text()
    edit(project, runs__smoke=CELLS)
    assert ran(run(project, "dvc", "repro")) == {"render"}


def test_associative_recall_is_a_part_of_its_own(project):
    """Listed, it trains and is rendered; a language model's settings leave it alone."""
    edit(project, mqar__runs__smoke={"mdn": "mdn"}, mqar__scales__smoke__training__epochs=1)
    assert ran(run(project, "dvc", "repro")) == {"mqar-smoke@mdn", "render"}
    assert "Fig. 4: multi-query associative recall" in (project / "reports" / "index.html").read_text()
    summary = json.loads((project / "runs" / "mqar-smoke" / "mdn" / "metrics.json").read_text())
    assert 0 <= summary["w32/test"] <= 1
    edit(project, scales__smoke__evaluation__limit=2)
    assert not any(name.startswith("mqar") for name in changed(project))
    edit(project, mqar__scales__smoke__workers=2)
    assert "adopted" in run(project, "dvc", "repro", "mqar-smoke@mdn")
    run(project, "git", "checkout", "-q", "params.yaml", "dvc.lock")
    run(project, "dvc", "repro")


def test_another_kernel_version_retrains_its_model_and_those_derived(project):
    edit(project, models__mdn__kernel="recurrent")
    ran_now = ran(run(project, "dvc", "repro"))
    assert ran_now == cell("mdn") | cell("mdn-no-correction") | {"render"}
    manifest = json.loads((project / "runs" / "smoke" / "mdn" / "manifest.json").read_text())
    assert manifest["kernels"]["momentum_delta_rule"] == "recurrent"
    run(project, "git", "checkout", "-q", "params.yaml", "dvc.lock")
    run(project, "dvc", "repro")


def test_a_report_source_reruns_render_only(project):
    source = project / "src" / "mdn" / "reports" / "tables.py"
    before = source.read_text()
    source.write_text(before + "\n# a remark\n")
    assert changed(project) == {"render"}
    source.write_text(before)
    assert changed(project) == set()


def test_another_scales_parameters_touch_nothing_here(project):
    before = (project / "params.yaml").read_text()
    edit(project, scales__400m__training__lr=1e-3, shapes__400m__mdn__layers=20)
    assert changed(project) <= {"render"}
    (project / "params.yaml").write_text(before)


def test_a_mistake_stops_before_any_work(project):
    before = (project / "params.yaml").read_text()
    edit(project, models__mdn__lr="abc")
    output = run(project, "dvc", "repro", check=False)
    assert "models.mdn.lr: 'abc' is not a number" in output
    (project / "params.yaml").write_text(before)


def test_a_remark_in_a_mixer_trains_nothing_again(project):
    """DVC sees a changed file and asks; the stages see the same code and adopt what is there."""
    source = project / "src" / "mdn" / "mixers" / "mdn.py"
    before = source.read_text()
    weights = project / "runs" / "smoke" / "mdn" / "model.safetensors"
    made = weights.stat().st_mtime_ns
    source.write_text(before + "\n# a remark\n")
    output = run(project, "dvc", "repro")
    assert output.count("adopted") >= len(CELLS)
    assert weights.stat().st_mtime_ns == made
    source.write_text(before)
    run(project, "dvc", "repro")
