"""The mirror, on real SQLite stores: what arrives, what never arrives twice, what a missing store costs."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from mdn import cli
from mdn.tracking import mlflow as mirror
from mdn.tracking.mlflow import Mirror, attach, open_store, sync, sync_all, ui_command
from mdn.tracking.record import identity, write_json

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def client(uri) -> MlflowClient:
    return open_store(uri)


def steps(client: MlflowClient, run: str, name: str = "train/loss") -> list[int]:
    return [point.step for point in client.get_metric_history(run, name)]


def status(client: MlflowClient, run: str) -> str:
    return client.get_run(run).info.status


def artifacts(client: MlflowClient, run: str, folder: str | None = None) -> set[str]:
    return {item.path for item in client.list_artifacts(run, folder)}


def evaluate(record, suite: str = "lm", value: float = 31.5) -> None:
    rows = [
        {"task": "heldout_wiki", "metric": "perplexity", "value": value, "stderr": None, "n": 40},
        {"task": "lambada_openai", "metric": "acc,none", "value": 0.25, "stderr": 0.07, "n": 40},
    ]
    found = {"suite": suite, "window": 1024, "harness": "0.4.13", "seconds": 3.5, "manifest": {"a": 1}}
    write_json(record.folder / "evaluation" / f"{suite}.json", found | {"results": rows})


def test_a_finished_record_arrives_whole(runs, tiny_run, uri, client, capsys):
    record = runs.begin(tiny_run, steps=12)
    runs.finish(record)
    run = client.get_run(sync(record, uri))
    assert client.get_experiment(run.info.experiment_id).name == "mdn-smoke"
    assert (run.info.run_name, run.info.status) == ("mdn", "FINISHED")
    assert steps(client, run.info.run_id) == list(range(1, 13))
    assert [p.value for p in client.get_metric_history(run.info.run_id, "train/loss")][:2] == [4, 2]
    assert run.data.metrics["final/validation_loss"] == 2.5
    assert run.data.params["shape.head_k"] == "16"
    assert run.data.params["options.mdn.log_mu_min"] == "-2.0"
    expected = {"scale": "smoke", "model": "mdn", "pattern": "mdn", "commit": "abc123"}
    expected |= {"fingerprint": tiny_run.fingerprint(), "mdn.identity": identity(record.folder)}
    assert expected.items() <= run.data.tags.items()
    assert run.data.tags["versions.torch"] == "2"
    assert run.data.tags["kernel"] == "recurrent, v2_segsum"
    files = {"config.yaml", "manifest.json", "metrics.json", "figures", "weights"}
    assert artifacts(client, run.info.run_id) == files
    assert artifacts(client, run.info.run_id, "figures") == {"figures/loss.png"}
    assert capsys.readouterr() == ("", "")


def test_a_second_call_sends_nothing(runs, tiny_run, uri, client, monkeypatch):
    record = runs.begin(tiny_run)
    evaluate(record)
    runs.finish(record)
    first = sync(record, uri)
    saved = (record.folder / "mlflow.json").read_bytes()
    for name in ("log_batch", "log_artifact", "log_figure", "create_run", "set_terminated", "update_run"):
        monkeypatch.setattr(MlflowClient, name, lambda *_, **__: pytest.fail("sent again"))
    assert sync(record, uri) == first
    assert (record.folder / "mlflow.json").read_bytes() == saved


def test_a_killed_and_resumed_training_stays_one_run_with_every_step_once(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run, steps=4)
    run = sync(record, uri, status="RUNNING")
    assert status(client, run) == "RUNNING"
    runs.write(record, 5, 7)
    assert sync(record, uri, status="KILLED") == run
    assert status(client, run) == "KILLED"
    for checkpoint, last in ((5, 9), (6, 8)):  # the second resume falls short of what was sent
        record.rewind(checkpoint)
        runs.write(record, checkpoint + 1, last)
        assert sync(record, uri, status="RUNNING") == run
        assert status(client, run) == "RUNNING"
    runs.write(record, 9, 12)
    runs.finish(record)
    assert sync(record, uri) == run
    assert status(client, run) == "FINISHED"
    assert steps(client, run) == list(range(1, 13))


def test_a_second_line_of_a_step_arrives_after_the_first_was_sent(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run, steps=5)
    run = sync(record, uri)
    record.append(5, {"validation/loss": 2.0})
    runs.write(record, 6, 6)
    sync(record, uri)
    assert steps(client, run, "validation/loss") == [5]
    assert steps(client, run) == [1, 2, 3, 4, 5, 6]


def test_a_line_cut_short_is_sent_when_it_is_whole(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run, steps=2)
    with (record.folder / "log.jsonl").open("a") as log:
        log.write('{"step": 3, "train/lo')
        log.flush()
        run = sync(record, uri)
        log.write('ss": 1.5}\n')
    sync(record, uri)
    assert steps(client, run) == [1, 2, 3]


def test_values_that_are_not_finite_are_counted_and_never_sent(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run, steps=2)
    record.append(3, {"train/loss": float("nan"), "train/norm": float("inf"), "train/lr": 0.5})
    run = sync(record, uri)
    record.append(4, {"train/loss": float("-inf")})
    sync(record, uri)
    assert steps(client, run) == [1, 2]
    assert steps(client, run, "train/lr") == [1, 2, 3]
    assert "train/norm" not in client.get_run(run).data.metrics
    assert [(p.step, p.value) for p in client.get_metric_history(run, "nonfinite")] == [(3, 2), (4, 3)]


def test_the_time_of_a_line_is_the_time_of_its_points(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run, steps=0)
    record.append(1, {"time": 1700000000.25, "train/loss": 1.0})
    points = client.get_metric_history(sync(record, uri), "train/loss")
    assert [(p.timestamp, p.value) for p in points] == [(1700000000250, 1.0)]


def test_batches_keep_to_the_limit_and_a_break_between_them_doubles_nothing(
    runs, tiny_run, uri, client, monkeypatch
):
    record = runs.begin(tiny_run, steps=0)
    for step in range(1, 91):
        record.append(step, {f"m{n}": float(step) for n in range(30)})
    sizes, send = [], MlflowClient.log_batch

    def log_batch(self, run_id, metrics=(), **rest):
        sizes.append(len(metrics))
        if len(metrics) and sum(size > 0 for size in sizes) == 2:
            raise OSError("the line broke")
        return send(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    assert sync(record, uri) is None
    run = sync(record, uri)
    assert max(sizes) <= 1000
    for name in ("m0", "m29"):
        assert steps(client, run, name) == list(range(1, 91))


@pytest.mark.parametrize("arrived", [True, False])
def test_a_kill_around_a_batch_neither_doubles_nor_loses_it(
    runs, tiny_run, uri, client, monkeypatch, arrived
):
    record = runs.begin(tiny_run, steps=3)
    run = sync(record, uri)
    runs.write(record, 4, 6)
    record.append(7, {"train/loss": float("nan")})
    record.append(8, {"note": float("inf")})
    send = MlflowClient.log_batch

    def killed(self, run_id, metrics=(), **rest):
        if arrived or not metrics:
            send(self, run_id, metrics=metrics, **rest)
        if metrics:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            sync(record, uri)
    record.rewind(5)  # what resumes writes those lines again, later
    runs.write(record, 6, 6)
    record.append(7, {"train/loss": float("nan")})
    record.append(8, {"note": float("inf")})
    runs.write(record, 9, 9)
    assert sync(record, uri) == run
    assert steps(client, run) == [1, 2, 3, 4, 5, 6, 9]
    assert [(p.step, p.value) for p in client.get_metric_history(run, "nonfinite")] == [(7, 1), (8, 2)]
    assert "sending" not in json.loads((record.folder / "mlflow.json").read_text())


def test_a_long_value_is_cut_as_a_param_and_whole_in_the_artifact(runs, tiny_run, uri, client, tmp_path):
    long = ",".join(["mdn"] * 4000)
    record = runs.begin(replace(tiny_run, pattern=long))
    run = sync(record, uri)
    param = client.get_run(run).data.params["pattern"]
    assert len(param) == 6000
    assert param.endswith("…")
    kept = Path(client.download_artifacts(run, "config.yaml", str(tmp_path))).read_text()
    assert long in kept


def test_a_changed_param_keeps_the_first_and_tags_the_drift(runs, tiny_run, uri, client, capsys):
    record = runs.begin(tiny_run)
    run = sync(record, uri)
    replace(tiny_run, lr=0.5).to_yaml(record.folder / "config.yaml")
    runs.write(record, 4, 4)
    assert sync(record, uri) == run
    data = client.get_run(run).data
    assert data.params["lr"] == "0.01"
    assert data.tags["mdn.drift"] == "lr: 0.01 → 0.5"
    assert steps(client, run) == [1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_a_failed_training_is_failed_whatever_the_mirror_is_told(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    write_json(record.folder / "failed.json", {"error": "loss is nan", "step": 3})
    run = sync(record, uri, status="RUNNING")
    assert status(client, run) == "FAILED"
    assert client.get_run(run).data.tags["mdn.failed"] == "loss is nan"
    (record.folder / "failed.json").unlink()
    sync(record, uri, status="RUNNING")
    assert status(client, run) == "RUNNING"


def test_a_training_that_diverged_is_failed_though_it_left_weights(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    write_json(record.folder / "failed.json", {"error": "diverged", "step": 3})
    runs.finish(record)
    assert status(client, sync(record, uri)) == "FAILED"


def test_a_killed_run_stays_killed_when_it_is_only_sent(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    run = sync(record, uri, status="KILLED")
    sync(record, uri)
    assert status(client, run) == "KILLED"


def test_evaluations_are_nested_runs_and_columns_of_the_parent(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    runs.finish(record)
    parent = sync(record, uri)
    evaluate(record)
    assert sync(record, uri) == parent
    experiment = client.get_run(parent).info.experiment_id
    [nested] = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert (nested.info.run_name, nested.info.status) == ("lm", "FINISHED")
    assert {"model": "mdn", "suite": "lm", "harness": "0.4.13"}.items() <= nested.data.tags.items()
    expected = {
        "lm/heldout_wiki/perplexity": 31.5,
        "lm/lambada_openai/acc_none": 0.25,
        "lm/lambada_openai/acc_none_stderr": 0.07,
    }
    assert nested.data.metrics == expected
    assert expected.items() <= client.get_run(parent).data.metrics.items()
    assert artifacts(client, nested.info.run_id) == {"lm.json"}

    evaluate(record, value=30.0)  # again: the same run, the new figure
    sync(record, uri)
    [again] = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert again.info.run_id == nested.info.run_id
    assert again.data.metrics["lm/heldout_wiki/perplexity"] == 30.0


def test_a_suite_that_failed_is_a_failed_run_with_its_reason(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    write_json(record.folder / "evaluation" / "lm.json", {"suite": "lm", "failed": "no tokens"})
    parent = client.get_run(sync(record, uri))
    saved = json.loads((record.folder / "mlflow.json").read_text())
    nested = client.get_run(saved["evaluations"]["lm"]["run_id"])
    assert (nested.info.status, nested.data.tags["failed"]) == ("FAILED", "no tokens")
    assert parent.info.status == "RUNNING"


def test_without_a_store_nothing_happens(runs, tiny_run):
    record = runs.begin(tiny_run)
    assert sync(record, None) is None
    live = Mirror(record, None)
    live.start()
    live.stop("KILLED")
    assert attach(runs.root, None, []) is None
    assert not (record.folder / "mlflow.json").exists()


def test_an_unreachable_server_costs_a_warning_and_loses_nothing(runs, tiny_run, uri, client, capsys):
    record = runs.begin(tiny_run)
    assert sync(record, NOWHERE) is None
    warning = capsys.readouterr()
    assert warning.out == ""
    assert NOWHERE in warning.err
    assert "mdn sync" in warning.err
    assert warning.err.count("\n") == 1
    assert steps(client, sync(record, uri)) == [1, 2, 3]


def test_a_password_reaches_the_store_and_nothing_that_others_see(
    runs, tiny_run, uri, client, monkeypatch, capsys
):
    secret = "http://me:s3cr@t@127.0.0.1:9"
    record, started = runs.begin(tiny_run), []
    assert sync(record, secret) is None
    warning = capsys.readouterr().err
    assert "not mirrored to http://127.0.0.1:9 (" in warning
    assert "s3cr" not in warning
    monkeypatch.setattr(
        mirror.subprocess, "Popen", lambda *command, **options: started.append((command, options))
    )
    Mirror(record, secret).start()
    ((command, options),) = started
    assert "s3cr" not in str(command)
    assert options["env"]["MLFLOW_TRACKING_URI"] == secret
    monkeypatch.setattr(mirror, "open_store", lambda asked: client)
    assert sync(record, uri) == sync(record, secret)
    assert json.loads((record.folder / "mlflow.json").read_text())["uri"] == "http://127.0.0.1:9"


def test_a_store_that_mlflow_refuses_is_a_warning_too(runs, tiny_run, tmp_path, capsys):
    (tmp_path / "mlflow.db").write_text("not a database")
    assert sync(runs.begin(tiny_run), f"sqlite:///{tmp_path}/mlflow.db") is None
    assert "not mirrored" in capsys.readouterr().err


def test_a_run_deleted_in_the_store_is_sent_anew(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    first = sync(record, uri)
    client.delete_run(first)
    second = sync(record, uri)
    assert second != first
    assert steps(client, second) == [1, 2, 3]


def test_another_store_gets_everything_and_a_moved_one_finds_its_artifacts(
    runs, tiny_run, uri, client, tmp_path
):
    record = runs.begin(tiny_run)
    run = sync(record, uri)
    store = Path(uri.removeprefix("sqlite:///"))
    moved = tmp_path / "moved"
    shutil.copytree(store.parent, moved)
    copy = f"sqlite:///{moved}/mlflow.db"
    there = open_store(copy)
    for at, folder in ((there, moved), (client, store.parent)):
        assert Path(at.get_run(run).info.artifact_uri).is_relative_to(folder)
    found = Path(there.download_artifacts(run, "config.yaml"))
    assert found.read_bytes() == (record.folder / "config.yaml").read_bytes()

    there.delete_run(run)
    with sqlite3.connect(moved / "mlflow.db") as database:  # a store that never heard of the run
        database.execute("UPDATE runs SET run_uuid = 'x' || run_uuid WHERE run_uuid = ?", (run,))
    again = sync(record, copy)
    assert again != run
    assert steps(there, again) == [1, 2, 3]
    assert json.loads((record.folder / "mlflow.json").read_text())["uri"] == copy


def test_final_weights_are_versions_of_a_model_that_say_where_they_lie(runs, tiny_run, uri, client, tmp_path):
    model = "mdn-smoke-mdn"
    seen = {found.run_id for found in client.search_model_versions(f"name = '{model}'")}
    record = runs.begin(tiny_run)
    sync(record, uri)
    assert {found.run_id for found in client.search_model_versions(f"name = '{model}'")} == seen
    runs.finish(record)
    first = sync(record, uri)
    sync(record, uri)
    one = client.get_model_version_by_alias(model, "current")
    assert (one.run_id, one.description) == (first, f"{record.weights} on None")
    assert one.tags["mdn.identity"] == identity(record.folder)
    folder = client.download_artifacts(first, one.source.removeprefix(f"runs:/{first}/"), str(tmp_path))
    pointer = json.loads(Path(folder, "pointer.json").read_text())
    assert Path(pointer["path"]).stat().st_size == pointer["bytes"] == len(b"weights")
    assert sum(path.stat().st_size for path in Path(folder).iterdir()) < 1000  # and no weights

    changed = runs.begin(replace(tiny_run, lr=0.5))  # the first is archived
    runs.finish(changed)
    second = sync_all(runs.root, uri)[changed.folder]
    assert client.get_model_version_by_alias(model, "current").run_id == second
    assert "/.archive/" in client.get_model_version(model, one.version).description
    found = [found.run_id for found in client.search_model_versions(f"name = '{model}'")]
    assert sorted(run for run in found if run not in seen) == sorted([first, second])

    runs.open(tiny_run)  # and comes back
    sync(record, uri)
    assert client.get_model_version_by_alias(model, "current").version == one.version


def test_diverged_weights_and_records_without_any_are_not_registered(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    runs.finish(record)
    write_json(record.folder / "failed.json", {"error": "diverged"})
    bare = runs.begin(replace(tiny_run, name="gdn"))
    write_json(bare.folder / "manifest.json", bare.manifest | {"weights": None})
    bare.finish({})
    for sent in (sync(record, uri), sync(bare, uri)):
        assert client.search_model_versions(f"run_id = '{sent}'") == []


def test_sync_all_sends_archived_runs_as_well(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    first = sync(record, uri, status="RUNNING")
    changed = replace(tiny_run, lr=0.5)
    runs.begin(changed)
    sent = sync_all(runs.root, uri)
    assert len(sent) == 2
    second = sent[record.folder]
    assert set(sent.values()) == {first, second}
    assert (status(client, first), status(client, second)) == ("KILLED", "RUNNING")
    assert client.get_run(second).data.params["lr"] == "0.5"


def test_a_report_is_one_run_whose_files_are_replaced(uri, client, tmp_path):
    table, figure = tmp_path / "table-1.md", tmp_path / "figures" / "loss.svg"
    figure.parent.mkdir()
    table.write_text("old")
    figure.write_text("<svg/>")
    run = attach(tmp_path, uri, [table, figure])
    table.write_text("new")
    assert attach(tmp_path, uri, [table]) == run
    assert artifacts(client, run) == {"table-1.md", "figures"}
    assert artifacts(client, run, "figures") == {"figures/loss.svg"}
    assert Path(client.download_artifacts(run, "table-1.md")).read_text() == "new"
    assert client.get_experiment(client.get_run(run).info.experiment_id).name == "mdn-report"
    assert status(client, run) == "FINISHED"


def test_attach_survives_a_missing_server(tmp_path, capsys):
    (tmp_path / "a.md").write_text("a")
    assert attach(tmp_path, NOWHERE, [tmp_path / "a.md"]) is None
    assert NOWHERE in capsys.readouterr().err


def test_the_ui_command_is_right_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("sqlite:///mlflow.db", f"sqlite:///{tmp_path}/mlflow.db"):
        words = ui_command(given).split()
        assert words[:3] == ["mlflow", "ui", "--backend-store-uri"]
        assert words[3] == f"sqlite:///{tmp_path}/mlflow.db"
    assert "postgresql://host/db" in ui_command("postgresql://host/db")
    with pytest.raises(ValueError, match="open it in a browser"):
        ui_command("https://mlflow.example.org")


@pytest.mark.parametrize(
    ("said", "done", "last"),
    [
        ("null\n", True, "FINISHED"),
        ("null\n", False, "RUNNING"),
        ('"KILLED"\n', False, "KILLED"),
        ("", False, "KILLED"),  # the training is gone and said nothing
    ],
)
def test_the_mirror_ends_as_the_training_says_or_dies(
    runs, tiny_run, uri, client, monkeypatch, said, done, last
):
    record = runs.begin(tiny_run)
    reader, writer = os.pipe()
    os.write(writer, said.encode())
    os.close(writer)
    monkeypatch.setattr(mirror.signal, "signal", lambda *_: None)
    if done:
        runs.finish(record)
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        mirror._mirror(record, uri, 60)
    run = json.loads((record.folder / "mlflow.json").read_text())["run_id"]
    assert status(client, run) == last


KILLED = """
import os, signal, sys
from pathlib import Path
from mdn.tracking.mlflow import Mirror
from mdn.tracking.record import Record
Mirror(Record(Path(sys.argv[1])), sys.argv[2]).start(0.1)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_two_first_starts_share_a_store_and_each_run_ends_as_its_training_did(runs, tiny_run, tmp_path):
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    ended, killed = runs.begin(tiny_run), runs.begin(replace(tiny_run, name="gdn"))
    command = [sys.executable, "-c", KILLED, str(killed.folder), uri]
    training = subprocess.Popen(command, stdin=subprocess.PIPE)
    live = Mirror(ended, uri)
    live.start(0.1)
    for record in (ended, killed):
        _wait(record, lambda state: state.get("step") == 3)
        runs.write(record, 4, 6)
    runs.finish(ended)
    live.stop()
    training.communicate(b"\n")
    _wait(killed, lambda state: state["status"] == "KILLED")
    client = open_store(uri)
    for record, last in ((ended, "FINISHED"), (killed, "KILLED")):
        run = json.loads((record.folder / "mlflow.json").read_text())["run_id"]
        assert status(client, run) == last
        assert steps(client, run) == [1, 2, 3, 4, 5, 6]
    assert Counter(e.name for e in client.search_experiments())["mdn-smoke"] == 1


def _wait(record, reached) -> None:
    path, deadline = record.folder / "mlflow.json", time.monotonic() + 120
    while not (path.exists() and reached(json.loads(path.read_text()))):
        assert time.monotonic() < deadline, "the mirror did not get there"
        time.sleep(0.05)


def test_a_mirror_that_was_killed_sends_the_rest_from_here(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    live = Mirror(record, uri)
    live.start()
    live._process.kill()
    live.stop("KILLED")
    run = json.loads((record.folder / "mlflow.json").read_text())["run_id"]
    assert status(client, run) == "KILLED"


@pytest.fixture
def project(runs, root, tmp_path, monkeypatch):
    """The present folder: a project with params.yaml; project(uri) sets its store."""
    monkeypatch.chdir(tmp_path)

    def use(uri: str) -> None:
        text = (root / "params.yaml").read_text()
        assert "uri: sqlite:///mlflow.db" in text
        Path("params.yaml").write_text(text.replace("uri: sqlite:///mlflow.db", f"uri: {uri}"))

    return use


def test_mdn_sync_sends_all_runs_and_says_which_failed(
    runs, tiny_run, uri, client, project, capsys, monkeypatch
):
    project(uri)
    assert cli.main(["sync"]) == 0
    assert "no run folders" in capsys.readouterr().out
    record = runs.begin(tiny_run)
    assert cli.main(["sync"]) == 0
    assert "runs/smoke/mdn: " in capsys.readouterr().out
    assert steps(client, json.loads((record.folder / "mlflow.json").read_text())["run_id"]) == [1, 2, 3]
    monkeypatch.setattr(mirror, "_send", lambda *_: 1 / 0)
    assert cli.main(["sync"]) == 1
    assert "runs/smoke/mdn: not sent" in capsys.readouterr().out


def test_mdn_sync_without_a_store_says_what_to_write(project, capsys):
    project("null")
    assert cli.main(["sync"]) == 2
    assert "tracking.uri: null" in capsys.readouterr().err


def test_mdn_ui_prints_the_command_it_becomes_and_where_the_runs_are(
    runs, tiny_run, project, uri, client, capsys, monkeypatch
):
    project(uri)
    sync(runs.begin(tiny_run), uri)
    number = client.get_experiment_by_name("mdn-smoke").experiment_id
    started = []
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "true")
    monkeypatch.setattr(cli.os, "execv", lambda program, words: started.append(words))
    cli.main(["ui"])
    printed = capsys.readouterr()
    assert printed.out.split() == started[0][2:] == ui_command(uri).split()
    assert f"mdn-smoke: http://127.0.0.1:5000/#/experiments/{number}?" in printed.err
    assert cli.os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


def test_mdn_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom mdn.cli import main\ntry:\n main(['--help'])\nexcept SystemExit:\n pass\n"
        "print(sorted({'torch', 'mlflow', 'lightning', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sync" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_is_described_and_its_description_replaced(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    run = sync(record, uri)
    for text in ("first", "| second | **table** |"):
        mirror.describe(runs.root, uri, {"smoke/mdn": text, "smoke/gdn": "was never sent"})
        assert client.get_run(run).data.tags["mlflow.note.content"] == text


def test_where_a_run_is_shown(runs, tiny_run, uri, client):
    record = runs.begin(tiny_run)
    run = sync(record, uri)
    number = client.get_run(run).info.experiment_id
    assert json.loads((record.folder / "mlflow.json").read_text())["experiment_id"] == number
    page = mirror.artifact_page(uri, run, "index.html")
    assert page == f"#/experiments/{number}/runs/{run}/artifacts/index.html"


def test_a_store_that_is_down_costs_descriptions_a_warning(runs, tiny_run, uri, capsys):
    sync(runs.begin(tiny_run), uri)
    mirror.describe(runs.root, NOWHERE, {"smoke/mdn": "text"})
    assert "not mirrored" in capsys.readouterr().err
