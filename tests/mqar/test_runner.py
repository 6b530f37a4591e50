"""The runner as it is started on a machine that has Python, NumPy and torch and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mdn.config import Params
from mdn.mqar import cells
from mdn.mqar.runner import run
from mdn.tracking.record import Record, read_json

ABSENT = [
    *("datasets", "dvc", "jinja2", "lightning", "lm_eval", "matplotlib", "mlflow", "omegaconf", "polars"),
    *("pyarrow", "rich", "safetensors", "tokenizers", "transformers", "yaml", "zstandard"),
]


@pytest.fixture
def bare(root: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a process, and of those that it starts, for which these packages do not exist."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({ABSENT})\n")
    path = os.pathsep.join(map(str, (site, root / "src", root / "kernels")))
    return os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def start(environment: dict[str, str], folder: Path, planned: list, *options: str) -> subprocess.Popen:
    (folder / "cells.json").write_text(cells.to_json(planned))
    command = [sys.executable, "-m", "mdn.mqar", "run", "cells.json", *options]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_two_workers_without_the_pipelines_packages(tiny: Params, bare: dict[str, str], tmp_path: Path):
    probe = subprocess.run([sys.executable, "-c", "import omegaconf"], env=bare, capture_output=True)
    assert probe.returncode, "the packages are still there: this test would show nothing"
    planned = [cells.cell(tiny, "tiny", name, 16, 1e-2, 1) for name in ("mdn-v1-logspace", "transformer")]
    output, _ = start(bare, tmp_path, planned, "--workers", "2").communicate()
    assert "cells: 2 done" in output, output
    records = [Record(tmp_path / "runs" / cell.scale / cell.name) for cell in planned]
    assert all(record.finished for record in records)
    assert [record.manifest["kernels"] for record in records] == [
        {"momentum_delta_rule": "v1_logspace"},
        {},
    ]
    assert read_json(records[0].folder / "config.yaml")["kernel"] == "v1_logspace"
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["mqar-tiny"]


def test_a_crash_of_one_cell_stops_no_other_and_is_told(tiny: Params, bare: dict[str, str], tmp_path: Path):
    good = cells.cell(tiny, "tiny", "transformer", 16, 1e-2, 1)
    bad = replace(good, name="transformer/none", shape=replace(good.shape, heads=3))
    process = start(bare, tmp_path, [bad, good])
    output, _ = process.communicate()
    assert process.returncode == 1
    assert "transformer/none: its process ended with status" in output
    assert "3 heads do not divide" in output
    assert "cells: 1 failed, 1 done" in output


def test_when_time_is_up_running_cells_are_tested_and_others_wait(
    tiny: Params, bare: dict[str, str], tmp_path: Path
):
    long = replace(tiny.mqar.scales["tiny"].training, epochs=10**6, stop_above=1.0)
    planned = [
        replace(cells.cell(tiny, "tiny", "transformer", 16, 1e-3, seed), training=long) for seed in (1, 2)
    ]
    before = time.time()
    # Less than a first reserve: the cell's first look at the clock is its last. And less than its process
    # takes to import torch, so that no time is left for the other one.
    output, _ = start(bare, tmp_path, planned, "--deadline-s", "1.5").communicate()
    assert time.time() - before < 60
    assert "cells: 1 cut, 1 waiting" in output, output
    record = Record(tmp_path / "runs" / planned[0].scale / planned[0].name)
    assert json.dumps(record.manifest["cut"]).startswith('"stopped by the time limit')
    assert "test/accuracy" in record.metrics
    assert not (tmp_path / "runs" / planned[1].scale / planned[1].name).exists()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs and what they start ignore SIGINT, unless one on the way handles it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_processes_that_the_runner_started(
    tiny: Params, bare: dict[str, str], tmp_path: Path, number: signal.Signals
):
    long = replace(tiny.mqar.scales["tiny"].training, epochs=10**6, stop_above=1.0)
    cell = replace(cells.cell(tiny, "tiny", "transformer", 16, 1e-3, 1), training=long)
    process = start(bare, tmp_path, [cell])
    log = tmp_path / "runs" / cell.scale / cell.name / "log.jsonl"
    until = time.time() + 60
    while not log.exists() and time.time() < until:
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)  # the pipe closes when the last process that writes to it is gone
    assert log.exists()
    assert process.returncode


@pytest.mark.parametrize(("workers", "count", "words"), [(0, 1, "workers: 0"), (1, 2, "is there twice")])
def test_what_cannot_run_is_refused_before_anything_is_written(
    tiny: Params, tmp_path: Path, workers: int, count: int, words: str
):
    planned = [cells.cell(tiny, "tiny", "mdn", 16, 1e-2, 1)] * count
    with pytest.raises(ValueError, match=words):
        run(planned, runs=tmp_path / "runs", data=tmp_path / "data", workers=workers)
    assert not (tmp_path / "runs").exists()


def test_one_cell_again_with_one_command(root: Path, tmp_path: Path):
    """plan | run, as the report tells; here without training, from a wrong name to a list of one."""
    plan = [
        sys.executable,
        "-m",
        "mdn.mqar",
        "plan",
        "--params",
        str(root / "params.yaml"),
        "--scale",
        "short",
    ]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'kernels'}"}

    def done(*command: str, text: str = "") -> subprocess.CompletedProcess:
        return subprocess.run(
            command, env=environment, input=text, capture_output=True, text=True, cwd=tmp_path
        )

    wrong = done(*plan, "--cell", "mdn/w256")
    assert wrong.returncode == 2
    assert "'mdn/w256' is none of mdn/w256-lr3.2e-03-s1" in wrong.stderr
    one = done(*plan, "--cell", "kda/w256-lr1.0e-03-s1")
    assert [cell.name for cell in cells.from_json(one.stdout)] == ["kda/w256-lr1.0e-03-s1"]
    run = done(sys.executable, "-m", "mdn.mqar", "run", "-", "--workers", "0", text=one.stdout)
    assert "workers: 0" in run.stderr


@pytest.mark.slow
def test_the_stage_adopts_what_the_runner_has_made(bare: dict[str, str], root: Path, tmp_path: Path):
    """Both see the same code, though the stage has more of the pipeline in its process."""
    params = (root / "params.yaml").read_text()
    small = params.replace("{epochs: 4, batch: 64, stop_above", "{epochs: 1, batch: 640, stop_above")
    assert small != params
    (tmp_path / "params.yaml").write_text(small)
    whole = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'kernels'}"}
    plan = [sys.executable, "-m", "mdn.mqar", "plan", "--scale", "smoke", "--models", "transformer"]
    planned = subprocess.run(plan, env=whole, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    output, _ = start(bare, tmp_path, cells.from_json(planned), "--workers", "2").communicate()
    assert "cells: 1 done" in output, output
    stage = [sys.executable, str(root / "pipeline" / "train_mqar.py"), "--scale", "smoke"]
    done = subprocess.run(
        [*stage, "--model", "transformer"], env=whole, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.count("adopted") == 1, done.stdout + done.stderr
    summary = read_json(tmp_path / "runs" / "mqar-smoke" / "transformer" / "metrics.json")
    assert summary["w32/seeds"] == 1
    assert 0 <= summary["w32/test/64x8"] <= 1
