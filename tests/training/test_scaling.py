"""Scaling over the devices of a host: what is planned, what is counted, and a rehearsal on CPU ranks."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from mdn.config import ConfigError
from mdn.scaling import cells
from mdn.scaling.measure import communication, covered, summary
from mdn.scaling.runner import _measured, run
from mdn.tracking.mlflow import sync
from mdn.tracking.record import Record, read_json


def test_each_cell_changes_one_thing_of_weak_scaling_by_ddp(params):
    planned = cells.plan(params)
    names = [(cell.scale, cell.name) for cell in planned]
    assert len(set(names)) == len(names)
    usual = {"strategy": "ddp", "tokens": "shards", "compile": False}
    for n, cell in enumerate(planned):
        about = cell.about()
        weak = about["batch"] == 4 * about["devices"]
        differs = [key for key, value in usual.items() if about[key] != value]
        assert len(differs) + (not weak) == (n >= 24)
        assert about["micro_batch"] == 4
        assert cell.run.training.steps == cells.STEPS + cells.PROFILED
    strong = [cell for cell in planned if cell.name.endswith("-ddp-b32-shards")]
    assert sorted({cell.machine.devices for cell in strong}) == [1, 2, 4, 8]
    assert {cell.machine.strategy for cell in planned} == {"ddp", "zero2", "fsdp"}


def test_cells_survive_json_and_others_are_refused(params):
    planned = cells.plan(params, ["smoke"], ["mdn", "mamba2"], [1, 2])
    assert cells.from_json(cells.to_json(planned)) == planned
    assert len({cell.fingerprint() for cell in planned}) == len(planned)
    raw = json.loads(cells.to_json(planned))
    raw[0]["machine"]["gpus"] = 8
    with pytest.raises(ValueError, match="plan them again"):
        cells.from_json(json.dumps(raw))
    with pytest.raises(ConfigError, match="4 × 3 devices does not divide"):
        cells.cell(planned[0].run, 3, 4, batch=16)


def test_what_intervals_cover_together_is_counted_once():
    rng = random.Random(1)
    spans = [(begin, begin + rng.randint(0, 20)) for begin in (rng.randint(0, 300) for _ in range(40))]
    assert covered(spans) == len({x for begin, end in spans for x in range(begin, end)})


def test_messages_count_alone_only_where_nothing_else_runs():
    spans = [("gemm", (0, 4)), ("ncclDevKernel_AllReduce", (3, 9)), ("adam", (8, 10)), ("gemm", (5, 6))]
    assert communication(spans, 10.0) == {"communication": 0.6, "communication_alone": 0.3}


def test_the_first_and_the_profiled_steps_are_left_out():
    speeds = [1.0] * 3 + [100.0] * (cells.STEPS - 3) + [1.0] * cells.PROFILED
    log = [{"train/tokens_per_second": speed, "train/loss": float(n)} for n, speed in enumerate(speeds)]
    assert summary(log) == {"tokens_per_second": 100.0, "loss": cells.STEPS - 1.0}


def test_a_cell_that_hangs_or_fails_leaves_its_reason(tmp_path):
    record = Record(tmp_path / "cell")
    assert "stopped after 1 s" in _measured(
        [sys.executable, "-c", "import time; time.sleep(60)"], record, 1.0
    )
    code = "raise RuntimeError('out of memory')"
    assert "status 1: RuntimeError: out of memory" in _measured([sys.executable, "-c", code], record, 60.0)
    assert read_json(record.folder / "failed.json")["error"].endswith("out of memory")


def test_cells_without_devices_or_time_wait(tmp_path, params):
    planned = cells.plan(params, ["smoke"], ["mdn"], [1, 2])
    outcomes = run(planned, runs=tmp_path, tokens=tmp_path, gpus=1, deadline_s=0.0)
    assert outcomes == {"waiting": 6, "no GPUs": 5}


def test_a_cell_that_the_deadline_cuts_waits_and_has_not_failed(tmp_path, params):
    (cell, *_) = cells.plan(params, ["smoke"], ["mdn"], [1])
    outcomes = run([cell], runs=tmp_path, tokens=tmp_path, gpus=1, deadline_s=0.3)
    assert outcomes == {"waiting": 1}
    assert not (tmp_path / cell.scale / cell.name).exists()


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["omegaconf", "mlflow", "polars"])
def test_measuring_needs_nothing_that_a_bare_gpu_machine_lacks(absent):
    code = f"import sys; sys.modules[{absent!r}] = None; import mdn.scaling.measure"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_rehearsal_on_the_cpu(tmp_path, tiny_run, count_tokens):
    """One and two Gloo ranks with the same batch: the same losses; a cell that cannot run harms none."""
    count_tokens(tmp_path / "tokens" / "smoke")
    planned = [
        cells.cell(tiny_run, 1, 2, batch=4),
        cells.cell(replace(tiny_run, data="nowhere"), 1, 2),
        cells.cell(tiny_run, 2, 2),
        cells.cell(tiny_run, 2, 2, strategy="zero2"),
        cells.cell(tiny_run, 1, 2, strategy="fsdp", tokens="synthetic"),
    ]
    outcomes = run(planned, runs=tmp_path / "runs", tokens=tmp_path / "tokens", gpus=None)
    assert outcomes == {"done": 4, "failed": 1}
    one, missing, two, sharded, synthetic = (Record(tmp_path / "runs" / c.scale / c.name) for c in planned)
    assert "prepare@nowhere" in read_json(missing.folder / "failed.json")["error"]
    losses = [[line["train/loss"] for line in record.log()] for record in (one, two, sharded)]
    assert len(losses[0]) == cells.STEPS + cells.PROFILED
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert one.metrics["communication"] == 0
    assert 0 < two.metrics["communication"] < 1
    assert synthetic.metrics["data_wait"] == 0
    assert two.metrics["loss"] == two.log()[cells.STEPS - 1]["train/loss"]
    assert two.manifest["cell"] == planned[2].about()
    assert sync(two, f"sqlite:///{tmp_path}/mlflow.db")
    before = two.manifest
    assert run(planned[2:], runs=tmp_path / "runs", tokens=tmp_path, gpus=None) == {"done": 3}
    assert two.manifest == before
