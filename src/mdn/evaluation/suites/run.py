"""One suite on one trained model: runs/<scale>/<model>/evaluation/<suite>.json and its samples."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.metrics import bootstrap_stderr, weighted_perplexity
from lm_eval.evaluator import evaluate
from lm_eval.utils import hash_string
from tokenizers import Tokenizer

from mdn.config import Evaluation
from mdn.data.shards import open_split, read_index
from mdn.evaluation import data
from mdn.evaluation.harness import Harness
from mdn.evaluation.perplexity import heldout
from mdn.evaluation.scoring import Progress, precision
from mdn.evaluation.suites import HELDOUT, TASKS
from mdn.evaluation.suites.tasks import PREFIXED, build
from mdn.tracking.manifest import code_digest, environment, file_digest
from mdn.tracking.record import Record, read_json, write_json

if TYPE_CHECKING:
    from mdn.models.lm import LanguageModel

BOOTSTRAPS = 1000  # resamples behind the standard error of a perplexity

Show = Callable[[str], Progress]  # name of a task -> what shows its progress
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """A trained model and what it is evaluated with."""

    record: Record
    model: LanguageModel
    tokenizer: Tokenizer
    evaluation: Evaluation
    raw: Path  # data/raw
    tokens: Path  # data/tokens/<set>

    def tasks(self, suite: str) -> list[str]:
        """Names of the suite's tasks; held-out splits are tasks of the suites that score them."""
        splits = read_index(self.tokens)["splits"] if suite in HELDOUT else ()
        return [*TASKS[suite], *(name for name in splits if name.startswith("heldout"))]


def run_suite(cell: Cell, suite: str, show: Show) -> Path:
    """Evaluates, unless the file is there already with the same identity, and returns its path.

    A finished task is kept in <suite>.partial/ until the suite is complete: an interrupted evaluation goes on
    with the next one. A model whose likelihoods are not finite ends the suite with a "failed" entry.

    Raises:
        ValueError: if evaluation or held-out data are missing or damaged.
    """
    folder = cell.record.folder / "evaluation"
    path, partial = folder / f"{suite}.json", folder / f"{suite}.partial"
    _rehearse(cell.model)
    identity = _identity(cell, suite)
    if path.exists() and read_json(path)["identity"] == identity:
        return path

    report: dict[str, Any] = {
        "suite": suite,
        "identity": identity,
        "fingerprint": cell.record.config.fingerprint(),
        "window": cell.evaluation.window,
        "harness": f"lm-eval {version('lm-eval')}",
        "manifest": {**environment(), "code": code_digest()},
        "seconds": 0.0,
        "results": [],
    }
    samples: Rows = []
    for name in cell.tasks(suite):
        try:
            done = _finished(partial / f"{name}.json", identity) or _run(cell, name, show(name))
        except ArithmeticError as error:  # NaN, or a perplexity beyond float64: a result of this model
            report["failed"] = f"{name}: {error}"
            break
        write_json(partial / f"{name}.json", {"identity": identity, **done})
        report["seconds"] += done["seconds"]
        report["results"] += done["results"]
        samples += done["samples"]
    report["seconds"] = round(report["seconds"], 2)
    _write(folder, report, samples)
    shutil.rmtree(partial, ignore_errors=True)
    return path


def write_failed(record: Record, suite: str, reason: str) -> Path:
    """The suite's file of a training that left no weights."""
    report: dict[str, Any] = {"suite": suite, "identity": None, "failed": reason, "results": []}
    return _write(record.folder / "evaluation", report, [])


def _write(folder: Path, report: dict[str, Any], samples: Rows) -> Path:
    """Samples, the bare figures for `dvc metrics`, and last the suite's file, whose path is returned."""
    suite, figures = report["suite"], dict[str, dict[str, float]]()
    for result in report["results"]:
        figures.setdefault(result["task"], {})[result["metric"]] = result["value"]
    write_samples(folder / f"{suite}.samples.jsonl.gz", samples)
    write_json(folder / "metrics" / f"{suite}.json", figures)
    write_json(folder / f"{suite}.json", report)
    return folder / f"{suite}.json"


def write_samples(path: Path, rows: Rows) -> None:
    """Gzipped JSON lines, the same bytes for the same rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())
    temporary.replace(path)


def _rehearse(model: LanguageModel) -> None:
    """One tiny forward pass loads the operators' modules, so that the code digest covers them."""
    device = next(model.parameters()).device
    with torch.inference_mode(), precision(device):
        model.hidden(torch.zeros(1, 8, dtype=torch.long, device=device))


def _identity(cell: Cell, suite: str) -> str:
    """Digests of weights, evaluation, data and code in one string."""
    setting = cell.evaluation
    wanted = [suite, setting.limit, setting.window]  # batch_tokens changes no result
    used = [data.digest(task, cell.raw) for task in TASKS[suite]]
    if suite in HELDOUT:
        wanted.append(setting.heldout_tokens)
        used.append(read_index(cell.tokens)["digest"])
    parts = [
        file_digest(cell.record.weights),
        cell.record.config.fingerprint(),
        _digest(wanted),
        _digest(used),
        code_digest(),
    ]
    return "-".join(parts)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _finished(path: Path, identity: str) -> dict[str, Any] | None:
    """What an interrupted evaluation of the same identity has left of a task."""
    kept = read_json(path) if path.exists() else {}
    if kept.pop("identity", None) != identity:
        return None
    return kept


def _run(cell: Cell, name: str, progress: Progress) -> dict[str, Any]:
    start = time.perf_counter()
    run = _run_heldout if name.startswith("heldout") else _run_task
    results, samples = run(cell, name, progress)
    return {"results": results, "samples": samples, "seconds": time.perf_counter() - start}


def _run_task(cell: Cell, name: str, progress: Progress) -> tuple[Rows, Rows]:
    """An lm-eval task: a result for each of its metrics, a sample for each document."""
    source, setting = data.load(name, cell.raw), cell.evaluation
    task = build(name, source.items[: setting.limit], source.split)
    harness = Harness(
        cell.model,
        cell.tokenizer,
        window=setting.window,
        batch_tokens=setting.batch_tokens,
        prefix=name in PREFIXED,
        progress=progress,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # lm-eval announces its bootstrap
        found = evaluate(harness, {"tasks": {name: task}, "groups": {}}, bootstrap_iters=BOOTSTRAPS)
    documents = found["samples"][name]
    hashes = "".join(d["doc_hash"] + d["prompt_hash"] + d["target_hash"] for d in documents)
    shared = {
        "task": name,
        "n": len(documents),
        "limit": setting.limit,
        "truncated": len({task.instances[number].doc_id for number in harness.cut}),
        "task_hash": hash_string(hashes)[:12],  # as lm-eval computes it
        "data": f"{source.title}, sha256 {source.digest}",
    }
    scores = found["results"][name]
    results = []
    for key in task.aggregation():
        (column,) = (column for column in scores if column.split(",")[0] == key)
        error = scores[column.replace(key, f"{key}_stderr", 1)]
        results.append(
            {
                **shared,
                "metric": key,
                "value": float(scores[column]),
                "stderr": float(error) if error != "N/A" else None,
            }
        )
    return results, [_sample(name, document) for document in documents]


def _sample(name: str, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": name,
        "id": document["doc_id"],
        "prompts": document["arguments"],  # (prompt, answer) pairs
        "target": document["target"],
        "scores": document["filtered_resps"],  # (log-likelihood, greedy) of each pair
        **{metric: document[metric] for metric in document["metrics"]},
    }


def _run_heldout(cell: Cell, name: str, progress: Progress) -> tuple[Rows, Rows]:
    """A held-out split: one result, one sample for each window."""
    setting, index = cell.evaluation, read_index(cell.tokens)
    windows = heldout(
        cell.model,
        open_split(cell.tokens, name),
        window=setting.window,
        limit=setting.heldout_tokens,
        batch_tokens=setting.batch_tokens,
        progress=progress,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        error = bootstrap_stderr(weighted_perplexity, windows.pairs, BOOTSTRAPS)
    result = {
        "task": name,
        "metric": "perplexity",
        "value": windows.perplexity,
        "stderr": error if len(windows.tokens) > 1 and math.isfinite(error) else None,
        "n": sum(windows.tokens),
        "limit": setting.heldout_tokens,
        "truncated": 0,
        "task_hash": None,
        "data": f"{cell.tokens.name}, {name}, sha256 {index['digest'][:12]}",
    }
    samples = [
        {"task": name, "window": number, "tokens": tokens, "loglikelihood": value}
        for number, (value, tokens) in enumerate(windows.pairs)
    ]
    return [result], samples
