"""lm-eval's own task definitions, prompts, scoring and metrics, on local items, for the suites that use them.

A definition is read from lm-eval's YAML and built directly: lm-eval's TaskManager would index thousands of
tasks first.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import hash_string

from mdn.evaluation import data
from mdn.evaluation.harness import Harness

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites import Rows
    from mdn.evaluation.suites.run import Cell

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it remarks on every task's defaults

DEFINITIONS = {  # below lm_eval/tasks
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "wikitext": "wikitext/wikitext.yaml",
    "winogrande": "winogrande/default.yaml",
}
BOOTSTRAPS = 1000  # resamples behind the standard error of a perplexity
PREFIXED = {"lambada_openai"}  # read after an end-of-text token; GPT-2's tokenizer adds none by itself


def build(task: str, items: list[data.Item], split: str) -> ConfigurableTask:
    """lm-eval's task of that name on our items.

    Args:
        items: in the schema of the task's hub data set.
        split: what the items are, "test" or "validation".
    """
    definition = load_yaml(Path(str(files(lm_eval))) / "tasks" / DEFINITIONS[task])
    prepare: Callable[[Dataset], Dataset] | None = definition.pop("process_docs", None)
    documents = Dataset.from_list(items)
    if prepare:  # once here; lm-eval would do it anew at each access
        documents = prepare(documents)

    def dataset(**_: Any) -> Mapping[str, Dataset]:
        return {split: documents}

    splits = {f"{name}_split": name if name == split else None for name in ("training", "validation", "test")}
    return ConfigurableTask(config={**definition, **splits, "custom_dataset": dataset, "num_fewshot": 0})


def run_task(cell: Cell, name: str, progress: Progress) -> tuple[Rows, Rows]:
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
