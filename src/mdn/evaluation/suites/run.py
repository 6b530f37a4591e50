"""One suite on one trained model: runs/<scale>/<model>/evaluation/<suite>.json and its samples."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from mdn.config import Evaluation
from mdn.evaluation.scoring import Progress, precision
from mdn.evaluation.suites import LM_EVAL, NotRun, Rows, Suite, module
from mdn.files import replacing
from mdn.tracking.manifest import code_digest, environment, file_digest
from mdn.tracking.record import Record, forced, read_json, write_json

if TYPE_CHECKING:
    from mdn.models.lm import LanguageModel

Show = Callable[[str], Progress]  # name of a task -> what shows its progress


@dataclass(frozen=True)
class Cell:
    """A trained model and what it is evaluated with."""

    record: Record
    model: LanguageModel
    tokenizer: Tokenizer
    evaluation: Evaluation
    raw: Path  # data/raw
    tokens: Path  # data/tokens/<set>


def run_suite(cell: Cell, suite: str, show: Show) -> Path:
    """Evaluates, unless the file is there already with the same identity and not `forced`; returns its path.

    A finished task is kept in <suite>.partial/ until the suite is complete: an interrupted evaluation goes on
    with the next one. A model whose likelihoods are not finite ends the suite with a "failed" entry; a task
    whose data are not here is listed under "not_run" with the reason.

    Raises:
        ValueError: if evaluation or held-out data are missing or damaged, or if prompts were cut of a suite
            that may not (`evaluation.fail_on_truncation`).
    """
    folder = cell.record.folder / "evaluation"
    path, partial = folder / f"{suite}.json", folder / f"{suite}.partial"
    tasks = module(suite)
    _rehearse(cell)
    identity = _identity(cell, suite)
    if forced():
        shutil.rmtree(partial, ignore_errors=True)
    elif path.exists() and (earlier := read_json(path))["identity"] == identity:
        _refuse_cut(cell, suite, earlier["results"])
        return path

    report: dict[str, Any] = {
        "suite": suite,
        "identity": identity,
        "fingerprint": cell.record.config.fingerprint(),
        "window": cell.evaluation.window,
        "batch_tokens": cell.evaluation.batch_tokens,
        "harness": _harness(suite),
        "manifest": {**environment(), "code": identity.split("-")[-1]},
        "seconds": 0.0,
        "not_run": {},
        "results": [],
    }
    samples: Rows = []
    for name in tasks.tasks(cell):
        try:
            done = _finished(partial / f"{name}.json", identity) or _run(tasks, cell, name, show(name))
        except NotRun as reason:
            report["not_run"][name] = str(reason)
            continue
        except ArithmeticError as error:  # NaN, or a perplexity beyond float64: a result of this model
            report["failed"] = f"{name}: {error}"
            break
        write_json(partial / f"{name}.json", {"identity": identity, **done})
        _refuse_cut(cell, suite, done["results"])
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
    with (
        replacing(path) as temporary,
        temporary.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,
    ):
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode())


def _rehearse(cell: Cell) -> None:
    """A forward pass and a step of decoding, which has kernels of its own, load the operators' modules, so
    that the code digest covers them. On a GPU the pass is one of a whole window: on its first call a kernel
    of FLA settles on what is fastest for it."""
    device = next(cell.model.parameters()).device
    tokens = cell.evaluation.window if device.type == "cuda" else 8
    ids_BT = torch.zeros(1, tokens, dtype=torch.long, device=device)
    with torch.inference_mode(), precision(device):
        cell.model.hidden(ids_BT)
        cell.model.hidden(ids_BT[:, :1], cell.model.init_states(1, device))


def _harness(suite: str) -> str | None:
    """The library whose prompts and metrics a suite has, if they are not ours."""
    return f"lm-eval {version('lm-eval')}" if suite in LM_EVAL else None


def _identity(cell: Cell, suite: str) -> str:
    """Digests of weights, configuration, settings with data and harness, and code in one string."""
    parts = [
        file_digest(cell.record.weights),
        cell.record.config.fingerprint(),
        _digest([suite, _harness(suite), *module(suite).identity(cell)]),
        code_digest(),
    ]
    return "-".join(parts)


def _refuse_cut(cell: Cell, suite: str, results: Rows) -> None:
    if suite in cell.evaluation.fail_on_truncation:
        for row in results:
            if row["truncated"]:
                window = row.get("window", cell.evaluation.window)
                raise ValueError(
                    f"{row['task']}: {row['truncated']} of {row['n']} prompts do not fit into the window of "
                    f"{window} tokens; use a larger one, or take {suite} out of evaluation.fail_on_truncation"
                )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _finished(path: Path, identity: str) -> dict[str, Any] | None:
    """What an interrupted evaluation of the same identity has left of a task."""
    kept = read_json(path) if path.exists() else {}
    if kept.pop("identity", None) != identity:
        return None
    return kept


def _run(tasks: Suite, cell: Cell, name: str, progress: Progress) -> dict[str, Any]:
    start = time.perf_counter()
    results, samples = tasks.run(cell, name, progress)
    return {"results": results, "samples": samples, "seconds": time.perf_counter() - start}
