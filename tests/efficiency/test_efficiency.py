"""Plans, records and the runner of `mdn.efficiency`, with shapes that a CPU measures in seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.mqar.test_runner import ABSENT

from mdn.config import ConfigError, Params
from mdn.efficiency import cells, measure, warm
from mdn.efficiency.cells import MODELS, Part, Plan, from_json, plan, to_json
from mdn.efficiency.measure import Compiled, Loader, Prefill
from mdn.efficiency.records import add, begin, fail, summarize
from mdn.efficiency.runner import run
from mdn.models.lm import PREFILL
from mdn.tracking.record import Record

CPU = torch.device("cpu")


def small(params: Params, *models: str, parts: list[Part]) -> Plan:
    """One layer of each model."""
    runs = plan(params, "smoke", models).runs
    return Plan([replace(run, shape=replace(run.shape, layers=1)) for run in runs], parts)


def record(runs: Path, name: str) -> Record:
    return Record(runs / "efficiency-smoke" / name)


def test_a_plan_survives_its_json(params: Params):
    planned = plan(params, "1b3")
    assert from_json(to_json(planned)) == planned
    assert [run.name for run in planned.runs][:3] == ["mdn", "gdn-fla", "gdn"]
    assert planned.runs[1].kernel == "fla"


def test_what_must_be_known_is_measured_first_and_every_shape_of_the_paper_is_there(params: Params):
    parts = plan(params, "1b3").parts
    assert (parts[0].kind, parts[0].shapes, parts[0].rounds) == ("train", [(4, 4096)], 2)
    assert len(parts[0].models) == len(MODELS)
    shapes = {shape for part in parts if part.kind == "train" for shape in part.shapes}
    assert shapes == {(8, 2048), (4, 4096), (2, 8192), (1, 16384)}
    decoded = [part.shapes for part in parts if part.kind == "decode"]
    assert decoded == [[(1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16384)]]


def test_prefill_is_of_the_small_scale_and_tells_4k_from_16k(params: Params):
    parts = {part.kind: part for part in plan(params, "small").parts}
    assert parts["prefill"].shapes == [(1, 4096), (1, 16384)]
    assert "prefill" not in {part.kind for part in plan(params, "1b3").parts}


@pytest.mark.parametrize(
    ("scale", "models", "kinds", "words"),
    [("2b", ["mdn"], None, "2b"), ("1b3", ["mdm"], None, "mdm"), ("1b3", ["mdn"], ["trian"], "trian")],
)
def test_what_does_not_exist_is_refused(params: Params, scale: str, models: list, kinds: list, words: str):
    with pytest.raises((ConfigError, ValueError), match=words):
        plan(params, scale, models, kinds)


def test_a_plan_of_another_version_is_refused():
    with pytest.raises(ValueError, match="plan again"):
        from_json('{"runs": [], "parts": [{"kind": "train"}]}')


def start(root: Path, folder: Path, planned: Plan, *options: str) -> tuple[int, str]:
    """`run` in a process for which the pipeline's packages do not exist."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({ABSENT})\n")
    path = os.pathsep.join(map(str, (site, root / "src", root / "kernels")))
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    (folder / "plan.json").write_text(to_json(planned))
    command = [sys.executable, "-m", "mdn.efficiency", "run", "plan.json", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_turns_alternate_a_failing_cell_is_recorded_and_a_second_call_adds_what_is_missing(
    params: Params, root: Path, tmp_path: Path
):
    first = Part("train", ["mdn", "gdn-fla", "transformer"], [(2, 8)], 2, 2)
    planned = small(params, "mdn", "gdn:fla", "transformer", parts=[first])
    status, output = start(root, tmp_path, planned)
    assert status == 1
    assert "cells: 1 failed, 2 measured" in output, output
    told = [line.split()[0] for line in output.splitlines() if line.startswith(("mdn ", "transformer "))]
    assert told == ["mdn", "transformer"] * 2
    broken, mdn = record(tmp_path / "runs", "gdn-fla"), record(tmp_path / "runs", "mdn")
    assert "runs on cuda, not on cpu" in broken.manifest["failures"]["train/2x8"]
    assert mdn.finished
    assert mdn.manifest["kernels"] == {"momentum_delta_rule": "v2_segsum"}
    assert [line["round"] for line in mdn.log()] == [0, 0, 1, 1]

    more = Plan(planned.runs, [first, Part("decode", ["mdn"], [(1, 8)], 1, 2)])
    status, output = start(root, tmp_path, more)
    assert "cells: 1 failed, 3 measured" in output, output
    assert len(mdn.log()) == 6  # four are those of the first call
    assert {"train/2x8/tokens_per_second", "decode/1x8/seconds"} <= mdn.metrics.keys()


def test_a_process_that_dies_is_blamed_and_another_goes_on(
    params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`_exit` stands for a kernel that ends its process."""
    planned = small(
        params, "transformer", "gdn", parts=[Part("train", ["transformer", "gdn"], [(1, 8)], 1, 2)]
    )
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'work' in sys.argv:\n"
        "    import mdn.efficiency.measure as measure\n"
        "    build = measure.Train.__init__\n"
        "    def broken(self, run, *rest):\n"
        "        if run.name == 'transformer': os._exit(9)\n"
        "        build(self, run, *rest)\n"
        "    measure.Train.__init__ = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    outcomes = run(planned, runs=tmp_path / "runs")
    assert outcomes == {"failed": 1, "measured": 1}
    failures = record(tmp_path / "runs", "transformer").manifest["failures"]
    assert failures == {"train/1x8": "its process ended with status 9"}


def test_at_the_deadline_nothing_runs_and_what_is_left_waits(params: Params, tmp_path: Path):
    planned = small(params, "transformer", parts=[Part("train", ["transformer"], [(1, 8)], 1, 10**9)])
    before = time.time()
    assert run(planned, runs=tmp_path / "runs", deadline_s=12) == {"waiting": 1}
    assert time.time() - before < 30
    assert record(tmp_path / "runs", "transformer").manifest["cut"]
    assert not list((tmp_path / "runs").glob(".efficiency*"))


def test_sigterm_ends_the_process_that_measures(params: Params, tmp_path: Path):
    planned = small(params, "mdn", parts=[Part("train", ["mdn"], [(2, 64)], 1, 10**6)])
    (tmp_path / "plan.json").write_text(to_json(planned))
    command = [sys.executable, "-m", "mdn.efficiency", "run", str(tmp_path / "plan.json")]
    process = subprocess.Popen(
        [*command, "--runs", str(tmp_path / "runs")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    until = time.time() + 60
    while not list((tmp_path / "runs").glob(".efficiency-*.at")) and time.time() < until:
        time.sleep(0.1)
    assert time.time() < until
    process.terminate()
    process.communicate(timeout=60)  # the pipe closes when the last process that writes to it is gone
    assert process.returncode == 128 + signal.SIGTERM


def test_speed_and_utilisation_follow_from_the_median_of_all_rounds(params: Params, tmp_path: Path):
    mdn = plan(params, "smoke", ["mdn"]).runs[0]
    made = begin(tmp_path, mdn, "c0de", {})
    add(made, "train/4x8", 0, [{"seconds": 0.1, "peak_gib": 3.0}, {"seconds": 0.9, "peak_gib": 3.0}])
    add(made, "train/4x8", 1, [{"seconds": 0.2, "peak_gib": 3.5}])
    found = summarize(made, "train/4x8", flops=1000, peak=1e6)
    assert found["train/4x8/seconds"] == 0.2
    assert found["train/4x8/tokens_per_second"] == pytest.approx(160)
    assert found["train/4x8/mfu"] == pytest.approx(0.16)
    assert found["train/4x8/samples"] == 3
    assert found["train/4x8/seconds_p20"] == pytest.approx(0.14)  # 0.1 + 2/5 of the way to 0.2
    assert "train/4x8/mfu" not in summarize(made, "train/4x8", 1000, None)


@pytest.mark.parametrize("cut", [None, "not everything is measured yet"])
def test_other_code_moves_a_record_to_the_archive_finished_or_not(params: Params, tmp_path: Path, cut):
    mdn = plan(params, "smoke", ["mdn"]).runs[0]
    begin(tmp_path, mdn, "c0de", {}).finish({"train/4x8/seconds": 1.0})
    made = begin(tmp_path, mdn, "c0de", {})
    assert made.metrics
    (made.folder / "manifest.json").write_text(json.dumps(made.manifest | {"cut": cut}))
    assert not (begin(tmp_path, mdn, "0ther", {}).folder / "metrics.json").exists()
    assert len(list(tmp_path.glob(".archive/*/*/*"))) == 1


def test_the_reason_of_a_failure_outlives_that_of_its_process(params: Params, tmp_path: Path):
    made = begin(tmp_path, plan(params, "smoke", ["mdn"]).runs[0], "c0de", {})
    fail(made, ["train/4x8"], "CUDA error: an illegal memory access")
    fail(made, ["train/4x8", "train/2x16"], "its process ended with status 1")
    assert made.manifest["failures"]["train/4x8"].startswith("CUDA error")
    assert made.manifest["failures"]["train/2x16"].endswith("status 1")


def one(params: Params, name: str):
    return small(params, name, parts=[]).runs[0]


def test_a_step_from_the_loader_says_what_part_of_it_was_waiting(params: Params):
    samples = list(Loader(one(params, "transformer"), CPU, vocabulary=64).samples(2, 16, 3))
    assert len(samples) == 3
    assert all(0 < sample["wait_seconds"] < sample["seconds"] for sample in samples)


def test_a_prompt_at_once_and_token_by_token(params: Params):
    (sample,) = Prefill(one(params, "mdn"), CPU, vocabulary=64).samples(1, 32, 1)
    assert sample["tokens_read"] == 29  # all but three that warm up
    assert 0 < sample["seconds"] < 32 * sample["token_seconds"]


@pytest.mark.parametrize("name", ["mdn", "transformer"])
def test_a_long_prompt_is_read_in_parts_that_change_nothing(
    params: Params, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mdn.models.lm.PREFILL", 16)
    assert PREFILL == 4096
    measurement = Prefill(one(params, name), CPU, vocabulary=64)
    ids_BT = measurement.ids(2, 41)
    with torch.no_grad():
        hidden_BTD, states = measurement.model.prefill(ids_BT)
        whole_BTD, expected = measurement.model.hidden(ids_BT, measurement.model.init_states(2))
    torch.testing.assert_close(hidden_BTD[:, -1], whole_BTD[:, -1], rtol=1e-4, atol=1e-5)
    assert expected is not None
    for one_state, other in zip(states, expected, strict=True):
        for key in other:
            torch.testing.assert_close(one_state[key], other[key], rtol=1e-4, atol=1e-5)


def test_a_process_that_compiles_meets_every_model_and_kind_but_what_comes_later(
    params: Params, monkeypatch: pytest.MonkeyPatch
):
    met = []

    class Fake:
        def __init__(self, run, device, vocabulary):
            self.run = run

        def samples(self, B, T, count):
            met.append((self.run.name, self.run.shape.layers, B, T))
            return iter(())

    monkeypatch.setattr(warm, "share_candidates", lambda share: None)
    monkeypatch.setattr(measure, "MEASUREMENTS", dict.fromkeys(cells.KINDS, Fake))
    planned = plan(params, "small", ["mdn", "gdn-h-3to1"])
    warm.compile_share(planned, 5, 8, "cpu")
    sizes = {(4, 4096), (8, 2048), (1, 1024)}
    of_mdn, of_hybrid = ({x for x in met if x[0] == name} for name in ("mdn", "gdn-h-3to1"))
    assert of_mdn == {("mdn", 1, B, T) for B, T in sizes}
    assert of_hybrid == {("gdn-h-3to1", 4, B, T) for B, T in sizes}  # a whole pattern


@pytest.mark.slow
def test_compiled_blocks_train(params: Params):
    samples = list(Compiled(one(params, "transformer"), CPU, vocabulary=64).samples(2, 16, 2))
    assert len(samples) == 2


def test_the_command_of_a_record_plans_that_record(params: Params, root: Path, tmp_path: Path):
    planned = plan(params, "small", ["mdn:v2_segsum"])
    from mdn.efficiency.work import _about

    command = _about(planned.runs[0], CPU)["command"].split(" | ")[0].split()[1:]
    done = subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True)
    assert cells.from_json(done.stdout).runs == planned.runs, done.stderr
