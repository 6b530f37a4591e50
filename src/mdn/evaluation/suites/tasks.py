"""lm-eval's own task definitions, prompts, scoring and metrics, on local items.

A definition is read from lm-eval's YAML and built directly: lm-eval's TaskManager would index thousands of
tasks first.
"""

import logging
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import lm_eval
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from mdn.evaluation.data import Item

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it remarks on every task's defaults

DEFINITIONS = {  # below lm_eval/tasks
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "winogrande": "winogrande/default.yaml",
}
PREFIXED = {"lambada_openai"}  # read after an end-of-text token; GPT-2's tokenizer adds none by itself


def build(task: str, items: list[Item], split: str) -> ConfigurableTask:
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
