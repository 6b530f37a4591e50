"""Training of cells: accuracy by hand, adoption, resume, time limits, divergence."""

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mdn.config import Examples, MqarTraining, Params
from mdn.files import Busy, locked
from mdn.mqar import cells
from mdn.mqar import train as training
from mdn.mqar.cells import Cell
from mdn.mqar.data import generate, open_split, prepare
from mdn.mqar.train import accuracy, answers, build, learning_rate, train
from mdn.tracking.record import LOCK, Record
from mdn.training.optim import build_optimizer

CPU = torch.device("cpu")


@pytest.fixture
def cell(tiny: Params) -> Cell:
    return cells.cell(tiny, "tiny", "mdn", 16, 1e-2, 1)


@pytest.fixture
def data(cell: Cell, tmp_path: Path) -> Path:
    return prepare(cell.data, cell.data_seed, tmp_path / "data")


def losses(record: Record) -> list[tuple[int, float]]:
    return [(line["step"], line["train/loss"]) for line in record.log() if "train/loss" in line]


class Oracle(torch.nn.Module):
    """Answers by looking the key up in the pairs, as a model would be read: through hidden states and
    head."""

    def __init__(self, vocabulary: int, wrong: int = 0):
        super().__init__()
        self.vocabulary, self.wrong, self.head = vocabulary, wrong, torch.nn.Identity()

    def hidden(self, ids_BT):
        hidden = torch.zeros(*ids_BT.shape, self.vocabulary)
        for b, row in enumerate(ids_BT.tolist()):
            for t, token in enumerate(row):
                hidden[b, t, row[(row.index(token) + 1) % len(row)]] = 1
        if self.wrong:  # the first examples of a pass are answered with the token 0, which is no value
            hidden[: self.wrong] = torch.nn.functional.one_hot(torch.zeros(1, dtype=int), self.vocabulary)
        return hidden, None


def test_an_oracle_scores_one_and_its_mistakes_are_counted(cell: Cell):
    part = generate(Examples(24, 3, 20), 64, np.random.default_rng(1))
    assert accuracy(Oracle(64), [part], CPU) == {"24x3": 1.0}
    assert accuracy(Oracle(64, wrong=5), [part], CPU) == {"24x3": 0.75}


def test_the_loss_is_that_of_the_language_model_on_the_labels(cell: Cell, data: Path):
    """Hidden states at the queries alone, against the whole sequence with −100 elsewhere."""
    part = open_split(data, cell.data, "train")[1]
    model = build(cell)
    ids = torch.from_numpy(np.array(part.ids_NT)).long()
    queries, wanted = (torch.from_numpy(np.array(a)).long() for a in (part.queries_NP, part.answers_NP))
    ours = training.cross_entropy(answers(model, ids, queries), model.head.weight, wanted)
    assert ours.item() == pytest.approx(model.loss(ids, torch.from_numpy(part.labels_NT())).item(), rel=1e-6)


def test_the_learning_rate_is_zoologys_cosine(cell: Cell):
    """torch's own scheduler, stepped once an epoch."""
    cell = replace(cell, training=MqarTraining(epochs=7, batch=1, stop_above=1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=cell.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7, eta_min=0.0)
    for epoch in range(7):
        assert learning_rate(cell, epoch) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        schedule.step()


def test_the_optimizer_is_zoologys(cell: Cell):
    """torch's AdamW as it comes, but for a weight decay of 0.1."""
    model = build(cell)
    plain = torch.optim.AdamW(model.parameters()).defaults
    matrices, others = build_optimizer(model, cell.run()).param_groups
    for group in (matrices, others):
        assert (tuple(group["betas"]), group["eps"]) == (plain["betas"], plain["eps"])
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_a_training_leaves_a_whole_record_and_is_adopted_afterwards(cell: Cell, data: Path, tmp_path, capsys):
    record = train(cell, runs=tmp_path / "runs", data=data)
    assert record.folder == tmp_path / "runs" / "mqar-tiny" / "mdn" / "w16-lr1.0e-02-s1"
    assert record.finished
    metrics = record.metrics
    assert metrics["steps"] == 2 * 3
    assert metrics["epochs"] == 2
    assert metrics["test/accuracy"] == (metrics["test/16x2"] + metrics["test/24x3"]) / 2
    assert not record.checkpoints.exists()
    manifest = record.manifest
    assert manifest["kernels"]["momentum_delta_rule"] == "v2_segsum"
    assert manifest["fingerprint"] == cell.fingerprint()
    assert manifest["cut"] is None
    assert "plan --scale tiny --cell mdn/w16-lr1.0e-02-s1 | " in manifest["command"]
    assert [line["step"] for line in record.log() if "validation/accuracy" in line] == [3, 6]
    before = (record.folder / "metrics.json").stat().st_mtime_ns
    train(cell, runs=tmp_path / "runs", data=data)
    assert "adopted" in capsys.readouterr().out
    assert (record.folder / "metrics.json").stat().st_mtime_ns == before


def test_a_cell_that_another_process_trains_is_left_alone(cell: Cell, data: Path, tmp_path: Path):
    folder = tmp_path / "runs" / cell.scale / cell.name
    with locked(folder / LOCK), pytest.raises(Busy, match=f"{folder}: in use by process {os.getpid()} on"):
        train(cell, runs=tmp_path / "runs", data=data)
    assert [path.name for path in folder.iterdir()] == [LOCK]
    assert train(cell, runs=tmp_path / "runs", data=data).finished


def test_the_test_is_asked_once_at_the_end_and_validation_after_every_epoch(
    cell: Cell, data: Path, tmp_path: Path, monkeypatch
):
    """So the test chooses neither when a training ends nor, by validation accuracy, its learning rate."""
    asked, plain = [], training.accuracy

    def watched(model, parts, device):
        asked.append([len(part) for part in parts])
        return plain(model, parts, device)

    monkeypatch.setattr(training, "_rehearse", lambda *_: None)
    monkeypatch.setattr(training, "accuracy", watched)
    train(cell, runs=tmp_path / "runs", data=data)
    assert asked == [[5, 5], [5, 5], [10, 6]]


def test_it_learns(cell: Cell, tmp_path: Path):
    """One pair among 15 tokens, far above the chance of 1 in 8."""
    easy = replace(cell.data, train=[Examples(8, 1, 1280)], test=[Examples(8, 1, 50)], validation_examples=50)
    cell = replace(cell, data=easy, training=MqarTraining(epochs=6, batch=32, stop_above=0.9))
    record = train(cell, runs=tmp_path / "runs", data=prepare(easy, 1, tmp_path / "data"))
    assert record.metrics["validation/accuracy"] > 0.9
    assert record.metrics["test/accuracy"] > 0.8
    assert record.metrics["epochs"] < 6, "stops as soon as validation passes the threshold"


def test_what_a_time_limit_cuts_goes_on_to_the_same_end(cell: Cell, data: Path, tmp_path: Path, monkeypatch):
    """Cut in the middle of an epoch, and once more: bit-identical figures (CPU)."""
    monkeypatch.setattr(training, "LOG_EVERY", 1)
    whole = train(cell, runs=tmp_path / "whole", data=data)
    plain = training._Training.step

    def until(last: int):
        def step(self, *batch):
            plain(self, *batch)
            if self.at.step == last:
                self.deadline = 0.0

        return step

    for last in (2, 4):
        monkeypatch.setattr(training._Training, "step", until(last))
        record = train(cell, runs=tmp_path / "cut", data=data)
        assert not record.finished
        assert record.metrics["steps"] == last
        assert set(record.metrics) >= {"test/16x2", "test/24x3", "validation/accuracy"}
        assert record.manifest["cut"] == f"stopped by the time limit after epoch {last / 3:.2f} of 2"
    monkeypatch.setattr(training._Training, "step", plain)
    record = train(cell, runs=tmp_path / "cut", data=data)
    assert record.finished
    assert losses(record) == losses(whole)
    for name, value in whole.metrics.items():
        if "seconds" not in name:
            assert record.metrics[name] == value, name


def test_a_training_that_validation_has_ended_is_not_gone_on_with(
    cell: Cell, data: Path, tmp_path, monkeypatch
):
    """Interrupted between its last checkpoint and its test."""
    cell = replace(cell, training=replace(cell.training, stop_above=-1.0))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training._Training, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(cell, runs=tmp_path, data=data)
    assert train(cell, runs=tmp_path, data=data).metrics["epochs"] == 1


def test_a_deadline_that_has_passed_leaves_a_tested_record_of_no_steps(
    cell: Cell, data: Path, tmp_path: Path
):
    record = train(cell, runs=tmp_path / "runs", data=data, deadline=time.time())
    assert record.metrics["steps"] == 0
    assert record.manifest["cut"] is not None
    assert not record.finished


def test_another_configuration_archives_the_record(cell: Cell, data: Path, tmp_path: Path):
    train(cell, runs=tmp_path / "runs", data=data)
    other = replace(cell, training=replace(cell.training, batch=16))
    record = train(other, runs=tmp_path / "runs", data=data)
    assert record.metrics["steps"] == 2 * 6
    assert len(list((tmp_path / "runs" / ".archive").rglob("metrics.json"))) == 1


def test_a_step_without_a_finite_gradient_changes_nothing_and_ten_in_a_row_end_it(
    cell: Cell, data: Path, tmp_path: Path, monkeypatch
):
    cell = replace(cell, training=replace(cell.training, epochs=5))
    plain, weights = training.cross_entropy, []

    def broken(hidden, weight, answers):
        weights.append(weight.detach().clone())
        return plain(hidden, weight, answers) * (math.nan if len(weights) > 2 else 1)

    monkeypatch.setattr(training, "cross_entropy", broken)
    record = train(cell, runs=tmp_path / "runs", data=data)
    assert len(weights) == 2 + 10
    assert not weights[1].equal(weights[2])
    assert all(w.equal(weights[2]) for w in weights[3:])
    assert record.metrics["first_nonfinite_step"] == 3
    assert record.metrics["skipped_steps"] == 10
    assert "10 steps in a row, up to step 12" in (record.folder / "failed.json").read_text()
    assert [line["step"] for line in record.log() if "train/first_nonfinite_step" in line] == [3]


@pytest.mark.parametrize("name", ["transformer", "mamba2", "gdn", "comba", "kda", "mdn-v1-logspace"])
def test_every_model_trains(tiny: Params, data: Path, tmp_path: Path, name: str):
    cell = cells.cell(tiny, "tiny", name, 16, 1e-3, 1)
    cell = replace(cell, training=replace(cell.training, epochs=1))
    record = train(cell, runs=tmp_path / "runs", data=data)
    assert record.metrics["steps"] == 3
