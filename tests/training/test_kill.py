"""Killed without a warning, twice: weights, batches and learning rates of a training that nobody killed, and
one run in MLflow."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from mlflow.tracking import MlflowClient
from omegaconf import OmegaConf
from safetensors.torch import load_file

from mdn.tracking.record import Record

pytestmark = pytest.mark.slow

STEPS = 20
# Notes the digest of each micro-batch, and dies in the second one of step KILL_AT.
TRAINING = """
import hashlib, os, runpy, signal, sys
from mdn.training import lit
original = lit.LitLanguageModel.training_step
def step(self, batch, index):
    with open(os.environ["SEEN"], "a") as seen:
        print(self.global_step + 1, hashlib.sha256(batch["ids"].numpy().tobytes()).hexdigest(), file=seen)
    loss = original(self, batch, index)
    if self.global_step + 1 == int(os.environ["KILL_AT"]) and index % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss
lit.LitLanguageModel.training_step = step
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def trained(root, tmp_path, count_tokens):
    """trained(name, *kills): the record, what was seen at each step, and MLflow's store."""
    count_tokens(tmp_path / "tokens" / "smoke")
    config = OmegaConf.load(root / "params.yaml")
    smoke, config.runs.smoke = config.scales.smoke, {"mdn": "mdn"}
    smoke.d_model = 16
    budget = {"tokens": STEPS * 64, "warmup_tokens": 192, "batch_tokens": 64, "context": 16}
    smoke.training.update(budget | {"validate_every": 10, "validation_tokens": 64})
    smoke.machine = {"micro_batch": 2, "checkpoint_every": 4}

    def run(name, *kills):
        folder = tmp_path / name
        folder.mkdir()
        uri = config.tracking.uri = f"sqlite:///{folder}/mlflow.db"
        OmegaConf.save(config, folder / "params.yaml")
        command = [sys.executable, "-c", TRAINING, str(root / "pipeline" / "train_model.py")]
        command += ["--scale", "smoke", "--model", "mdn", "--params", str(folder / "params.yaml")]
        command += ["--runs", str(folder / "runs"), "--tokens", str(tmp_path / "tokens")]
        for kill in (*kills, 0):
            seen = folder / f"seen-{kill}"
            environment = os.environ | {"SEEN": str(seen), "KILL_AT": str(kill)}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
        noted = [line.split() for path in folder.glob("seen-*") for line in path.read_text().splitlines()]
        batches = {step: sorted({digest for at, digest in noted if at == step}) for step, _ in noted}
        return Record(folder / "runs" / "smoke" / "mdn"), batches, uri

    return run


def test_a_training_killed_at_steps_7_and_13_is_the_one_that_was_not(trained):
    whole, batches, _ = trained("whole")
    killed, again, uri = trained("killed", 7, 13)
    first, second = load_file(whole.weights), load_file(killed.weights)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert again == batches
    assert sorted(map(int, batches)) == list(range(1, STEPS + 1))
    assert {len(digests) for digests in batches.values()} == {2}
    for key in ("train/loss", "train/lr"):
        one, two = ([line[key] for line in r.log() if key in line] for r in (whole, killed))
        assert one == two
        assert len(one) == STEPS
    client = MlflowClient(uri)
    experiments = [e.experiment_id for e in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == list(range(1, STEPS + 1))
