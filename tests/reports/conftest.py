"""Made-up run folders: six systems and some variants at smoke scale, two at 400M."""

import gzip
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mdn.config import SUITES, Params, load
from mdn.reports.layout import ACCURACIES, LONGBENCH, RETRIEVAL, STAND_INS
from mdn.reports.render import render

NOT_HERE = "its data set is not here"
PARAMS = Path(__file__).parents[2] / "params.yaml"
SMOKE = {
    "transformer": 0.30,
    "mamba2": 0.26,
    "gdn": 0.275,
    "comba": 0.29,
    "kda": 0.25,
    "mdn": 0.325,
    "mdn-no-correction": 0.30,
    "gdn-h-3to1": 0.28,
    "mdn-tau-d": 0.31,
}


@pytest.fixture(scope="session")
def params() -> Params:
    """The project's own, but for the lists that a user edits and the smallest scale's limit."""
    wanted = {*SMOKE, "mdn-no-momentum", "mdn-h-3to1"}
    found = load(PARAMS)
    smoke = {name: found.models[name].base or name for name in wanted}
    few = replace(found.scales["smoke"].evaluation, limit=40)
    scales = {**found.scales, "smoke": replace(found.scales["smoke"], evaluation=few)}
    return replace(found, scales=scales, runs={"smoke": smoke, "400m": {"gdn": "gdn"}}, suites=list(SUITES))


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, allow_nan=False))


def result(
    task: str, metric: str, value: float | None, stderr: float | None, n: int, limit: int | None
) -> dict:
    return {
        "task": task,
        "metric": metric,
        "value": value,
        "stderr": stderr,
        "n": n,
        "limit": limit,
        "truncated": 0,
        "task_hash": hashlib.sha256(task.encode()).hexdigest()[:12],
        "data": "d" * 12,
    }


def write_training(params: Params, root: Path, scale: str, name: str, *, steps: int = 60) -> Path:
    """A run folder up to its log: what a training that was killed leaves."""
    folder, config = root / scale / name, params.run(scale, name)
    folder.mkdir(parents=True)
    config.to_yaml(folder / "config.yaml")
    op = {"mdn": "momentum_delta_rule", "gdn": "gated_delta_rule"}.get(config.pattern.split(":")[0])
    manifest = {
        "fingerprint": config.fingerprint(),
        "code": "c0de" * 3,
        "data": "da7a" * 3,
        "commit": "0123456789ab",
        "dirty": False,
        "versions": {"torch": "2.13.0"},
        "host": "node-1",
        "gpu": None,
        "kernels": {op: "v2_segsum" if op == "momentum_delta_rule" else "chunk"} if op else {},
        "started": "2026-11-02T09:00:00",
        "finished": "2026-11-02T09:02:00",
        "seconds": 120.5,
        "tokens_per_second": 1020.0,
        "parameters": 6_500_000,
    }
    write(folder / "manifest.json", manifest)
    shift = sum(name.encode()) % 7 / 10
    lines = []
    for step in range(1, steps + 1):
        line: dict = {
            "step": step,
            "train/loss": 10.8 - (2.5 + shift) * (1 - math.exp(-step / 20)) + 0.2 * math.sin(step * 1.7),
            "train/lr": 3e-3 * min(1, step / 6),
            "train/grad_norm": 1 + 1 / step,
            "train/tokens_per_second": 1000.0,
        }
        lines.append(line)
        if step % 20 == 0:
            lines.append({"step": step, "validation/loss": line["train/loss"] + 0.1})
    lines[4]["train/loss"] = "nan"
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_run(params: Params, root: Path, scale: str, name: str, accuracy: float) -> Path:
    """A finished run with all evaluations; every accuracy is `accuracy`, with a standard error of 4 %. Sets
    of the Hub are not there."""
    folder = write_training(params, root, scale, name)
    write(folder / "metrics.json", {"validation/loss": 7.5})
    write(folder / "mlflow.json", {"run_id": f"{len(name):032x}", "uri": "sqlite:///mlflow.db"})
    limit = params.scales[scale].evaluation.limit
    n = limit or 1000
    head = {
        "fingerprint": params.run(scale, name).fingerprint(),
        "window": 1024,
        "harness": "lm-eval 0.4.13",
        "seconds": 12.3,
        "manifest": {"commit": "0123456789ab"},
    }
    lm = [
        result("lambada_openai", "perplexity", 41.7 / accuracy / 3, 0.9, n, limit),
        result("lambada_openai", "acc", accuracy, 0.04, n, limit),
        *(
            result(f"heldout_{part}", "perplexity", 900 / accuracy, None, 16384, None)
            for part in ("wiki", "c4", "speeches")
        ),
    ]
    tasks = [
        result(column.task, column.metric, accuracy, 0.04, n, limit)
        for column in ACCURACIES
        if column.suite == "commonsense"
    ]
    not_run = {"wikitext": NOT_HERE}
    write(folder / "evaluation" / "lm.json", {"suite": "lm", **head, "not_run": not_run, "results": lm})
    for suite, originals, window in (("retrieval", RETRIEVAL, 256), ("longbench", LONGBENCH, 512)):
        rows = [
            result(column.task, column.metric, accuracy, 0.04, 8, 8)
            | {"window": window, "truncated": 3 if window == 512 else 0}
            for column in STAND_INS
            if column.suite == suite
        ]
        not_run = {column.task: NOT_HERE for column in originals}
        told = {"suite": suite, **head, "harness": None, "not_run": not_run, "results": rows}
        write(folder / "evaluation" / f"{suite}.json", told)
    write(folder / "evaluation" / "commonsense.json", {"suite": "commonsense", **head, "results": tasks})
    return folder


def write_dynamics(folder: Path, layers: int = 3, tokens: int = 50) -> None:
    """What the suite leaves of a model whose last layer is attention: MDN's gates, and some pairs."""
    head = json.loads((folder / "evaluation" / "lm.json").read_text())
    write(folder / "evaluation" / "dynamics.json", {**head, "suite": "dynamics", "results": []})
    rows: list[dict] = []
    for task in ("state_change", "transition"):
        for layer in range(layers):
            row: dict = {"task": task, "layer": layer, "mixer": "mdn"}
            if layer == layers - 1:
                row |= {"mixer": "attention", "absent": "keeps every key and value"}
            elif task == "state_change":
                row["change"] = [0.01 * (1 + layer) + 0.001 * (t % 7) for t in range(tokens)]
            else:
                row["quantiles"] = [0.05, 0.25, 0.5, 0.75, 0.95]
                logs, plain = [-2.0, -1.5, -1.0, -0.5, -0.1], [0.1, 0.2, 0.3, 0.4, 0.5]
                row["gates"] = {
                    "log_alpha": logs,
                    "beta": plain,
                    "log_mu": logs,
                    "eta": plain,
                    "key": [1.0] * 5,
                }
                row["along"] = {"real": [[0.1, 7], [0.94, 2]], "complex": [[0.5, 0.3, 4], [0.54, 0.3, 1]]}
                row["across"] = {"real": [[0.9, 12]], "complex": []}
            rows.append(row)
    with gzip.open(folder / "evaluation" / "dynamics.samples.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def write_all(params: Params, root: Path) -> Path:
    """mdn-no-momentum failed in training, mdn-h-3to1 was never started, mdn at 400M is no longer listed."""
    for name, accuracy in SMOKE.items():
        write_run(params, root, "smoke", name, accuracy)
    for name in ("gdn", "mdn", "mdn-no-correction"):
        write_dynamics(root / "smoke" / name)
    folder = write_training(params, root, "smoke", "mdn-no-momentum", steps=17)
    write(folder / "failed.json", {"error": "loss is <nan> & not finite", "step": 17})
    for name in ("gdn", "mdn"):
        write_run(params, root, "400m", name, 0.494)
    return root


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, params: Params) -> Path:
    return write_all(params, tmp_path_factory.mktemp("made") / "runs")


@pytest.fixture
def runs(tmp_path: Path, made: Path) -> Path:
    """Run folders that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


@pytest.fixture
def add_run(params: Params, runs: Path) -> Callable[[str, str, float], Path]:
    """Adds a finished run (scale, model, accuracy) to `runs`."""
    return partial(write_run, params, runs)


@pytest.fixture
def add_dynamics() -> Callable[..., None]:
    """Adds what suite dynamics leaves to a finished run (folder, layers, tokens)."""
    return write_dynamics


@pytest.fixture(scope="session")
def rendered(made: Path, params: Params) -> Path:
    """The whole report, rendered once."""
    return render(params, made, made.parent / "reports").parent
