"""The run folder: what is adopted, resumed, archived and brought back, and what its files may contain."""

import json
from dataclasses import replace

import pytest

from mdn.files import Busy, locked
from mdn.tracking.record import ARCHIVE, LOCK, Record, identity, write_json


def test_an_empty_folder_is_new(runs, tiny_run):
    record, todo = runs.open(tiny_run)
    assert todo == "new"
    assert record.folder == runs.root / tiny_run.scale / tiny_run.name
    assert identity(record.folder) is None


def test_a_finished_run_is_adopted_untouched(runs, tiny_run):
    record = runs.begin(tiny_run)
    runs.finish(record)
    before = {path: path.read_bytes() for path in record.folder.iterdir()}
    again, todo = runs.open(tiny_run)
    assert (again, todo) == (record, "finished")
    assert {path: path.read_bytes() for path in record.folder.iterdir()} == before
    assert again.config == tiny_run


def test_a_finished_run_is_made_again_if_forced_and_what_that_left_unfinished_is_resumed(
    runs, tiny_run, monkeypatch
):
    record = runs.begin(tiny_run, steps=5)
    runs.finish(record)
    monkeypatch.setenv("MDN_FORCE", "1")
    was = identity(record.folder)
    assert runs.open(tiny_run) == (record, "new")
    assert list(record.folder.iterdir()) == []
    assert Record(runs.root / ARCHIVE / tiny_run.scale / tiny_run.name / was).finished
    runs.begin(tiny_run, steps=2)
    assert runs.open(tiny_run) == (record, "resume")


@pytest.mark.parametrize("missing", ["metrics.json", "model.safetensors"])
def test_a_run_without_weights_or_metrics_is_resumed(runs, tiny_run, missing):
    record = runs.begin(tiny_run)
    runs.finish(record)
    (record.folder / missing).unlink()
    assert runs.open(tiny_run) == (record, "resume")


def test_an_unfinished_run_is_resumed_with_other_code(runs, tiny_run):
    record = runs.begin(tiny_run)
    assert runs.open(tiny_run, code="f" * 12) == (record, "resume")
    assert len(record.log()) == 3


@pytest.mark.parametrize("change", [{"code": "f" * 12}, {"data": "e" * 12}])
def test_a_finished_run_of_other_code_or_data_is_archived_whole(runs, tiny_run, change):
    record = runs.begin(tiny_run)
    record.checkpoints.mkdir()
    (record.checkpoints / "step-2.pt").write_bytes(b"state")
    runs.finish(record)
    was = identity(record.folder)
    assert runs.open(tiny_run, **change) == (record, "new")
    assert list(record.folder.iterdir()) == []
    kept = runs.root / ARCHIVE / tiny_run.scale / tiny_run.name / was
    assert (kept / "checkpoints" / "step-2.pt").read_bytes() == b"state"
    assert Record(kept).finished


def test_an_unfinished_run_of_another_configuration_or_data_starts_at_0(runs, tiny_run):
    runs.begin(tiny_run)
    changed = replace(tiny_run, lr=2 * tiny_run.lr)
    assert runs.open(changed)[1] == "new"
    assert runs.begin(changed, steps=1).log()[-1]["step"] == 1
    assert runs.open(changed, data="e" * 12)[1] == "new"


@pytest.mark.parametrize(("done", "todo"), [(True, "finished"), (False, "resume")])
def test_going_back_to_a_configuration_brings_its_run_back(runs, tiny_run, done, todo):
    first = runs.begin(tiny_run, steps=5)
    if done:
        runs.finish(first)
    runs.begin(replace(tiny_run, lr=2 * tiny_run.lr), steps=2)
    record, found = runs.open(tiny_run)
    assert found == todo
    assert len(record.log()) == 5
    assert record.config == tiny_run
    assert runs.open(replace(tiny_run, lr=2 * tiny_run.lr))[1] == "resume", "and the other one was kept too"


def test_archiving_leaves_the_gitignore_and_the_lock_of_the_place(runs, tiny_run):
    record = runs.begin(tiny_run)
    (record.folder / ".gitignore").write_text("/model.safetensors\n")
    with locked(record.folder / LOCK):
        runs.open(tiny_run, data="e" * 12)
        assert sorted(path.name for path in record.folder.iterdir()) == [".gitignore", LOCK]
        runs.begin(replace(tiny_run, lr=2 * tiny_run.lr))
        assert runs.open(tiny_run)[1] == "resume", "and nothing is in the way when a run comes back"
        with pytest.raises(Busy), locked(record.folder / LOCK, wait=False):
            pass


def test_rewind_drops_later_lines_and_the_cut_one(runs, tiny_run):
    record = runs.begin(tiny_run, steps=9)
    with (record.folder / "log.jsonl").open("a") as log:
        log.write('{"step": 10, "train/lo')
    assert [line["step"] for line in record.log()] == list(range(1, 10))
    record.rewind(6)
    runs.write(record, 7, 8)
    assert [line["step"] for line in record.log()] == list(range(1, 9))


@pytest.mark.parametrize("first", [0, 1, 4, 5, 6])
def test_log_from_a_step_on_is_the_tail_of_the_whole(runs, tiny_run, first):
    record = runs.begin(tiny_run, steps=4)
    record.append(4, {"validation/loss": 2.0})
    runs.write(record, 5, 5)
    assert record.log(first=first) == [line for line in record.log() if line["step"] >= first]


def test_the_log_is_strict_json(runs, tiny_run):
    record = runs.begin(tiny_run, steps=0)
    record.append(1, {"train/loss": float("nan"), "train/norm": float("-inf"), "train/lr": 0.5})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads((record.folder / "log.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "train/loss": "nan", "train/norm": "-inf", "train/lr": 0.5}


def test_write_json_refuses_nan_and_keeps_what_was_there(tmp_path):
    path = tmp_path / "metrics.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert json.loads(path.read_text()) == {"loss": 1.0}
    assert list(tmp_path.iterdir()) == [path]


def test_final_metrics_leave_out_what_is_not_finite(runs, tiny_run):
    record = runs.begin(tiny_run)
    record.finish({"validation_loss": float("inf"), "train_loss": 1.5})
    assert record.metrics == {"train_loss": 1.5}
