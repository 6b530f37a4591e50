"""The mirror against a real MLflow server on PostgreSQL: nothing lost, nothing doubled, through an outage."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from mlflow import MlflowClient

from mdn.tracking.mlflow import Mirror, sync

POSTGRES = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)  # Debian's place
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        POSTGRES is None or find_spec("psycopg") is None,
        reason="needs Debian's postgresql and the Python package psycopg[binary]",
    ),
]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def database():
    """A PostgreSQL of its own on loopback; its server refuses root, so root starts it as postgres."""
    folder, port = Path(tempfile.mkdtemp(prefix="mdn-postgres-")), free_port()
    user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if user:
        shutil.chown(folder, "postgres")
    run = lambda *words: subprocess.run([*user, *words], check=True, capture_output=True, cwd="/")  # noqa: E731
    run(f"{POSTGRES}/initdb", "-D", f"{folder}/data", "-U", "mdn", "-A", "trust", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"
    run(f"{POSTGRES}/pg_ctl", "-D", f"{folder}/data", "-w", "-l", f"{folder}/log", "-o", options, "start")
    run(f"{POSTGRES}/createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "mdn", "mlflow")
    yield f"postgresql://mdn@127.0.0.1:{port}/mlflow"
    run(f"{POSTGRES}/pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop")
    shutil.rmtree(folder)


class Server:
    """`mlflow server`, which can be stopped and started again."""

    def __init__(self, database: str, folder: Path):
        self.port, self.database, self.folder = free_port(), database, folder
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.database]
        words += ["--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--workers", "1"]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        log = (self.folder / "server.log").open("a")
        self.process = subprocess.Popen(
            words, env=os.environ | quiet, stdout=log, stderr=log, start_new_session=True
        )
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2)
                return
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-3000:]
                time.sleep(0.2)

    def stop(self) -> None:
        os.killpg(self.process.pid, 15)
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def server(database, tmp_path_factory):
    started = Server(database, tmp_path_factory.mktemp("mlflow"))
    started.start()
    yield started
    started.stop()


def identifier(record) -> str:
    return json.loads((record.folder / "mlflow.json").read_text())["run_id"]


def reached(record, step: int) -> None:
    deadline, path = time.monotonic() + 180, record.folder / "mlflow.json"
    while not (path.exists() and json.loads(path.read_text()).get("step") == step):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_training_through_kill_outage_and_resume_is_one_run_with_one_value_a_step(
    runs, tiny_run, server, capsys
):
    first, second = runs.begin(tiny_run, steps=600), runs.begin(replace(tiny_run, name="gdn"))
    mirrors = [Mirror(record, server.uri) for record in (first, second)]
    for mirror in mirrors:  # both first: they create the experiment at once
        mirror.start(0.1)
    reached(first, 600)
    reached(second, 3)
    mirrors[1].stop("KILLED")

    server.stop()
    runs.write(first, 601, 610)
    assert sync(second, server.uri) is None
    assert "not mirrored" in capsys.readouterr().err
    server.start()
    reached(first, 610)
    mirrors[0].stop("KILLED")
    client = MlflowClient(server.uri)
    assert client.get_run(identifier(first)).info.status == "KILLED"

    first.rewind(605)  # the resume goes back to its checkpoint
    runs.write(first, 606, 700)
    runs.finish(first)
    assert sync(first, server.uri) == identifier(first)

    experiments = [e for e in client.search_experiments() if e.name == "mdn-smoke"]
    assert len(experiments) == 1
    found = {run.info.run_name: run for run in client.search_runs([experiments[0].experiment_id])}
    assert {name: run.info.status for name, run in found.items()} == {"mdn": "FINISHED", "gdn": "KILLED"}
    history = client.get_metric_history(identifier(first), "train/loss")
    assert sorted(point.step for point in history) == list(range(1, 701))
    assert found["mdn"].data.params["lr"] == str(tiny_run.lr)
    assert found["mdn"].data.metrics["final/validation_loss"] == 2.5
    artifacts = {item.path for item in client.list_artifacts(identifier(first))}
    assert artifacts == {"config.yaml", "manifest.json", "metrics.json", "figures", "weights"}
    assert client.get_model_version_by_alias("mdn-smoke-mdn", "current").run_id == identifier(first)
    there = Path(client.download_artifacts(identifier(first), "config.yaml"))
    assert there.read_bytes() == (first.folder / "config.yaml").read_bytes()
