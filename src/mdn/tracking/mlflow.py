"""Mirrors run folders to MLflow. The folder stays the truth: a store that is down costs but a warning.

`sync` sends what the store has not got yet. A training calls it every few seconds through `Mirror`, and
`mdn sync` for all run folders: there is no other way into the store. What was sent is kept in mlflow.json:

    run_id, uri, experiment, experiment_id, status
    step, lines      the largest step sent, and how many lines of log.jsonl with that step
    nonfinite        values that were NaN or infinite, which a store never sees
    sending          the last point of a batch under way, and step, lines and nonfinite once it has arrived
    files            name -> digest of what was sent
    evaluations      suite -> run_id, digest
    weights          where they were when they were registered, size and digest

A training is one MLflow run in experiment `mdn-<scale>`, across kills, requeues and resumes; evaluations are
runs nested under it. Final weights are a version of the registered model `mdn-<scale>-<model>`, which says
where they lie and holds no copy; its alias `current` is the run that stands in the tables. Only MlflowClient
is used, so no global state is touched.

Where artifacts are: MLflow makes a local path absolute when it creates an experiment, so a checkout that
moves would lose its figures. Ours lie beside the store, in `mlartifacts/<experiment>`, and opening the store
here (`mdn sync`, `mdn ui`, any training) corrects the paths of one that was moved.
"""

import json
import logging
import math
import os
import re
import select
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdn.files import locked
from mdn.tracking.manifest import file_digest
from mdn.tracking.record import ARCHIVE, Record, flat, identity, read_json, write_json

if TYPE_CHECKING:  # importing MLflow takes seconds
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from mlflow.entities import Metric

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow's own defaults wait for minutes when a server is gone.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
SQLITE = "sqlite:///"
ARTIFACTS = "mlartifacts"
# Of one request; MLflow refuses larger ones.
MAX_METRICS, MAX_PARAMS = 1000, 100
MAX_PARAM, MAX_TAG = 6000, 8000


def sync(
    record: Record, uri: str | None, *, status: str | None = None, experiment: str | None = None
) -> str | None:
    """Sends what the store at `uri` lacks of a run folder and returns the id of its MLflow run.

    A record with a failed.json is FAILED, even a finished one (it diverged); any other finished one FINISHED;
    of the rest `status` says RUNNING or KILLED, and without it they keep what they had. None for uri sends
    nothing. No error is raised: a warning goes to stderr, None is returned and the next call sends the rest.
    """
    if uri is None or not (record.folder / "manifest.json").exists():
        return None
    try:
        with locked(record.folder / "mlflow.json.lock"):
            return _send(record, uri, status, experiment)
    except Exception as error:  # whatever a store, a network or a driver raises: training must go on
        _warn(record.folder, uri, error)
        return None


def sync_all(runs: Path, uri: str) -> dict[Path, str | None]:
    """`sync` of every run folder, archived ones too: folder -> run id, None where it failed."""
    sent = {}
    for path in sorted(runs.rglob("manifest.json")):
        archived = ARCHIVE in path.relative_to(runs).parts
        sent[path.parent] = sync(Record(path.parent), uri, status="KILLED" if archived else None)
    return sent


class Mirror:
    """Calls `sync` while a training writes its record.

    It does so in a process of its own: a thread would take the interpreter's lock from the training for the
    seconds that MLflow needs to start, and for every batch. And a process sees a training die that had no
    time to say so, and marks its run as KILLED.
    """

    def __init__(self, record: Record, uri: str | None):
        self._record, self._uri = record, uri
        self._process: subprocess.Popen[str] | None = None

    def start(self, every_seconds: float = 15) -> None:
        if self._uri is None:
            return
        command = [sys.executable, "-m", "mdn.tracking.mlflow", str(self._record.folder), str(every_seconds)]
        # Everyone on a machine sees the arguments of a process, and a password in them.
        environment = os.environ | {"MLFLOW_TRACKING_URI": self._uri}
        try:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            _warn(self._record.folder, self._uri, error)

    def stop(self, status: str | None = None) -> None:
        """Sends the rest and ends. status: "KILLED", or None to derive it from the record."""
        if self._process is not None:
            self._process.communicate(json.dumps(status) + "\n")
            if self._process.returncode:  # it was killed itself
                sync(self._record, self._uri, status=status)


def _mirror(record: Record, uri: str, every_seconds: float) -> None:
    """The process of `Mirror`. Standard input brings the last status, or just ends if the training died."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # schedulers signal all processes; the training decides
    os.nice(15)  # on a busy machine the training comes first: one late thread holds all of a step up
    sync(record, uri, status="RUNNING")
    while not select.select([sys.stdin], [], [], every_seconds)[0]:
        sync(record, uri, status="RUNNING")
    last = sys.stdin.readline()
    sync(record, uri, status=json.loads(last) if last else "KILLED")


def attach(root: Path, uri: str | None, files: Iterable[Path], name: str = "report") -> str | None:
    """Puts figures and tables under `root` on the run `name` of experiment mdn-report, over earlier ones.

    Returns the run's id, or None (after a warning) if the store cannot be reached.
    """
    if uri is None:
        return None
    try:
        client = open_store(uri)
        experiment = _experiment(client, uri, "mdn-report")
        quoted = name.replace("'", "")
        found = client.search_runs([experiment], f"attributes.run_name = '{quoted}'", max_results=1)
        run = (found or [client.create_run(experiment, run_name=quoted)])[0].info.run_id
        for file in files:
            inside = file.relative_to(root).parent.as_posix()
            client.log_artifact(run, str(file), None if inside == "." else inside)
        client.set_terminated(run)
        return run
    except Exception as error:  # as in `sync`
        _warn(root, uri, error)
        return None


def artifact_page(uri: str, run: str, path: str) -> str:
    """Where MLflow's pages show an artifact of a run, as a link between them."""
    experiment = open_store(uri).get_run(run).info.experiment_id
    return f"#/experiments/{experiment}/runs/{run}/artifacts/{path}"


def describe(runs: Path, uri: str, texts: Mapping[str, str]) -> None:
    """Puts a description in Markdown on the MLflow run of each run folder, by "scale/name"; those that have
    not been sent go without."""
    try:
        client = open_store(uri)
        for name, text in texts.items():
            saved = runs / name / "mlflow.json"
            if saved.exists():
                client.set_tag(read_json(saved)["run_id"], "mlflow.note.content", _text(text, MAX_TAG))
    except Exception as error:  # as in `sync`
        _warn(runs, uri, error)


def experiment_pages(uri: str) -> dict[str, str]:
    """Where MLflow shows the runs of each of our experiments; its front page is for other things."""
    found = open_store(uri).search_experiments(filter_string="name LIKE 'mdn-%'", order_by=["name"])
    return {at.name: f"#/experiments/{at.experiment_id}?workflowType=machine_learning" for at in found}


def ui_command(uri: str) -> str:
    """The shell command that shows this store, from whatever folder it is started.

    Raises:
        ValueError: if the store is a server, which shows itself.
    """
    if uri.startswith("http"):
        raise ValueError(f"tracking.uri: {uri} is a server; open it in a browser")
    place = _place(uri)
    store = SQLITE + str(place) if place else uri
    return shlex.join(["mlflow", "ui", "--backend-store-uri", store, "--workers", "1"])


def _warn(folder: Path, uri: str, error: Exception) -> None:
    reason = _public(" ".join(str(error).split()))[:300]
    print(f"{folder}: not mirrored to {_public(uri)} ({reason}); `mdn sync` sends it later", file=sys.stderr)


def _public(text: str) -> str:
    """Without the user and password of the addresses in it."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


# --- the store ---


def _place(uri: str) -> Path | None:
    """The file of a SQLite store."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def open_store(uri: str) -> "MlflowClient":
    """A client whose store exists, has its tables and knows where its artifacts are."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    place = _place(uri)
    if place is None:
        return MlflowClient(uri)
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.with_name(place.name + ".lock")):  # two first starts would both create the tables
        client = MlflowClient(SQLITE + str(place))
        _relocate(place)
    return client


def _relocate(place: Path) -> None:
    """Points experiments whose artifacts lie beside the store to where the store is now."""
    with closing(sqlite3.connect(place, timeout=20)) as store, store:
        for number, name, there in store.execute(
            "SELECT experiment_id, name, artifact_location FROM experiments"
        ).fetchall():
            here = str(place.parent / ARTIFACTS / name)
            if there and there != here and there.endswith(f"/{ARTIFACTS}/{name}"):
                store.execute(
                    "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (here, number)
                )
                store.execute(
                    "UPDATE runs SET artifact_uri = replace(artifact_uri, ?, ?) WHERE experiment_id = ?",
                    (there, here, number),
                )


def _experiment(client: "MlflowClient", uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        place = _place(uri)
        try:
            return client.create_experiment(name, str(place.parent / ARTIFACTS / name) if place else None)
        except MlflowException:  # another process was quicker
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def _known(client: "MlflowClient", run: str | None) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return run is not None and client.get_run(run).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


# --- one run folder ---


def _send(record: Record, uri: str, status: str | None, experiment: str | None) -> str:
    client, folder, saved = open_store(uri), record.folder, record.folder / "mlflow.json"
    from omegaconf import OmegaConf  # a machine that only trains may lack it

    config: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    state = read_json(saved) if saved.exists() else {}
    if not _known(client, state.get("run_id")):
        name = experiment or f"mdn-{config['scale']}"
        started = _milliseconds((folder / "manifest.json").stat().st_mtime)
        number = _experiment(client, uri, name)
        made = client.create_run(number, started, run_name=config["name"])
        state = {"run_id": made.info.run_id, "experiment": name, "experiment_id": number}
        state["status"] = "RUNNING"
        state |= {"step": -1, "lines": 0, "nonfinite": 0, "files": {}, "evaluations": {}}
    run = state["run_id"]
    state["uri"] = _public(uri)  # the report shows it
    write_json(saved, state)

    def new(name: str) -> Path | None:
        """The file, if it has to be sent; remembered as sent with the next write of mlflow.json."""
        path = folder / name
        digest = file_digest(path) if path.exists() else None
        if digest is None or state["files"].get(name) == digest:
            return None
        state["files"][name] = digest
        return path

    if path := new("config.yaml"):
        _params(client, run, config)
        client.log_artifact(run, str(path))
    if path := new("manifest.json"):
        manifest = record.manifest
        tags = {"scale": config["scale"], "model": config["name"], "pattern": config["pattern"]}
        tags["kernel"] = ", ".join(manifest.get("kernels", {}).values()) or config["kernel"]
        tags |= {"mdn.identity": identity(folder)} | flat(manifest)
        _tags(client, run, tags | {"mlflow.source.git.commit": manifest.get("commit")})
        client.log_artifact(run, str(path))
    _lines(client, record, state, saved)
    if path := new("metrics.json"):
        _metrics(client, run, {f"final/{k}": v for k, v in record.metrics.items()})
        client.log_artifact(run, str(path))
    for path in sorted((folder / "evaluation").glob("*.json")):
        if state["evaluations"].get(path.stem, {}).get("digest") != file_digest(path):
            _evaluation(client, state, saved, path)
    write_json(saved, state)

    failed = folder / "failed.json"
    cut = "KILLED" if record.manifest.get("cut") else None  # by a time limit
    wanted = "FINISHED" if record.finished else status or cut or state["status"]
    if failed.exists():
        wanted = "FAILED"
    if wanted != state["status"]:
        if wanted == "RUNNING":
            client.update_run(run, wanted)
        else:
            if wanted == "FAILED":
                _tags(client, run, {"mdn.failed": read_json(failed).get("error")})
            client.log_figure(run, _curve(record.log(), config["name"]), "figures/loss.png")
            ended = (folder / "metrics.json").stat().st_mtime if record.finished else time.time()
            client.set_terminated(run, wanted, _milliseconds(ended))
        state["status"] = wanted
        write_json(saved, state)
    if record.finished and record.weights.exists() and not failed.exists():
        _register(client, record, state, config["name"])
        write_json(saved, state)
    return run


def _register(client: "MlflowClient", record: Record, state: dict[str, Any], name: str) -> None:
    """The final weights as a version of a registered model; sent again when they have moved."""
    from mlflow.exceptions import MlflowException

    weights, manifest, run = record.weights.absolute(), record.manifest, state["run_id"]
    pointer = {"path": str(weights), "host": manifest.get("host"), "bytes": weights.stat().st_size}
    pointer["sha256"] = manifest.get("weights") or file_digest(weights)
    if pointer == state.get("weights"):
        return
    model, place = f"{state['experiment']}-{name}", f"{weights} on {manifest.get('host')}"
    client.log_dict(run, pointer, "weights/pointer.json")
    try:
        client.create_registered_model(model, description="Final weights of each training, newest last.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    found = client.search_model_versions(f"name = '{model}' and run_id = '{run}'")
    if found:
        version = found[0].version
        client.update_model_version(model, version, place)
    else:
        tags = {"mdn.identity": str(identity(record.folder)), "sha256": str(pointer["sha256"])}
        made = client.create_model_version(model, f"runs:/{run}/weights", run, tags, description=place)
        version = made.version
    if ARCHIVE not in record.folder.parts:
        client.set_registered_model_alias(model, "current", version)
    state["weights"] = pointer


def _lines(client: "MlflowClient", record: Record, state: dict[str, Any], saved: Path) -> None:
    """Sends the lines of log.jsonl that are new. A resumed training goes back to its checkpoint and writes
    lines again, so that position in the file says nothing: the step does, and how many lines it had."""
    run = state["run_id"]
    if open_end := state.pop("sending", None):  # the line broke or we were killed: did the store get it?
        name, at = open_end.pop("last")
        if any(point.step == at for point in client.get_metric_history(run, name)):
            state |= open_end
    before = dict(state)
    batch: list[Metric] = []

    def send() -> None:
        """A batch arrives whole or not at all; what was sent is remembered before and after."""
        nonlocal before, batch
        if batch:
            last = (batch[-1].key, batch[-1].step)
            reached = {key: state[key] for key in ("step", "lines", "nonfinite")}
            write_json(saved, before | {"sending": reached | {"last": last}})
            _batch(client, run, batch)
        write_json(saved, state)
        before, batch = dict(state), []

    skip = state["lines"]
    for line in record.log(first=state["step"]):
        if line["step"] == state["step"] and skip:
            skip -= 1
            continue
        values = {k: v for k, v in line.items() if k not in ("step", "time")}
        if batch and len(batch) + len(values) + 1 > MAX_METRICS:
            send()
        state["lines"] = state["lines"] + 1 if line["step"] == state["step"] else 1
        state["step"] = line["step"]
        finite = {k: v for k, v in values.items() if _finite(v)}
        if len(finite) < len(values):
            state["nonfinite"] += len(values) - len(finite)
            finite["nonfinite"] = state["nonfinite"]
        batch += _as_metrics(finite, line["step"], line.get("time"))
    send()


def _evaluation(client: "MlflowClient", state: dict[str, Any], saved: Path, path: Path) -> None:
    """One suite: a nested run, and its figures on the parent too, where the table of runs shows them."""
    found, suite, parent = read_json(path), path.stem, state["run_id"]
    nested = state["evaluations"].get(suite, {}).get("run_id")
    if not _known(client, nested):
        above = client.get_run(parent)
        tags = {"mlflow.parentRunId": parent, "suite": suite}
        tags |= {name: above.data.tags[name] for name in ("scale", "model")}
        nested = client.create_run(above.info.experiment_id, tags=tags, run_name=suite).info.run_id
        state["evaluations"][suite] = {"run_id": nested}
        write_json(saved, state)
    values: dict[str, Any] = {}
    for row in found.get("results", ()):
        name = f"{suite}/{row['task']}/{row['metric']}"
        values |= {name: row["value"], f"{name}_stderr": row.get("stderr")}
    for run in (nested, parent):
        _metrics(client, run, values)
    about = {k: v for k, v in found.items() if k not in ("results", "manifest", "suite")}
    _tags(client, nested, {"failed": "no", **flat(about)})
    client.log_artifact(nested, str(path))
    client.set_terminated(nested, "FAILED" if "failed" in found else "FINISHED")
    state["evaluations"][suite] = {"run_id": nested, "digest": file_digest(path)}
    write_json(saved, state)


def _params(client: "MlflowClient", run: str, config: Mapping[str, Any]) -> None:
    """Logs the configuration once; what a resume changed is tagged, since MLflow refuses new values."""
    from mlflow.entities import Param

    wanted = {k: _text(v, MAX_PARAM) for k, v in flat(config).items()}
    there = client.get_run(run).data.params
    missing = [Param(k, v) for k, v in wanted.items() if k not in there]
    for start in range(0, len(missing), MAX_PARAMS):
        client.log_batch(run, params=missing[start : start + MAX_PARAMS])
    drift = [f"{k}: {there[k]} → {v}" for k, v in wanted.items() if k in there and there[k] != v]
    if drift:
        _tags(client, run, {"mdn.drift": "; ".join(drift)})


def _tags(client: "MlflowClient", run: str, tags: Mapping[str, Any]) -> None:
    from mlflow.entities import RunTag

    given = [RunTag(_name(k), _text(v, MAX_TAG)) for k, v in tags.items() if v is not None]
    for start in range(0, len(given), MAX_PARAMS):
        client.log_batch(run, tags=given[start : start + MAX_PARAMS])


def _metrics(client: "MlflowClient", run: str, values: Mapping[str, Any]) -> None:
    """Logs those that have a value, as figures without a course: at step 0 MLflow draws them as bars."""
    _batch(client, run, _as_metrics({k: v for k, v in values.items() if _finite(v)}, step=0))


def _batch(client: "MlflowClient", run: str, metrics: "list[Metric]") -> None:
    for start in range(0, len(metrics), MAX_METRICS):
        client.log_batch(run, metrics=metrics[start : start + MAX_METRICS])


def _as_metrics(values: Mapping[str, float], step: int, seconds: float | None = None) -> "list[Metric]":
    from mlflow.entities import Metric

    now = _milliseconds(time.time() if seconds is None else seconds)
    return [Metric(_name(k), float(v), now, step) for k, v in values.items()]


def _curve(lines: Iterable[Mapping[str, Any]], title: str) -> "Figure":
    """Every loss of the log against the step."""
    from matplotlib.figure import Figure

    series: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name.endswith("loss") and _finite(value):
                series.setdefault(name, []).append((line["step"], value))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)", title=title)
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 50 else None)
    axes.grid(alpha=0.3)
    if series:
        axes.legend()
    return figure


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _name(name: str) -> str:
    """What MLflow takes as a name of a metric or tag."""
    return re.sub(r"[^\w/.\- :]", "_", name)


def _text(value: Any, limit: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"


if __name__ == "__main__":
    _mirror(Record(Path(sys.argv[1])), os.environ["MLFLOW_TRACKING_URI"], float(sys.argv[2]))
