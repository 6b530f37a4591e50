"""Our items written as the package's files hold them."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from mdn.data.shards import ShardWriter, write_index
from mdn.evaluation import data

from .items import EXAMPLES
from .models import EOT


def write_arrow(path: Path, rows: list[dict]) -> None:
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


def write_requests(path: Path, requests: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(request) + "\n" for request in requests)


def write_json_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tokens_of(folder: Path, splits: dict[str, list[list[int]]]) -> None:
    """A token set of the documents given; end-of-text is added."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, documents in splits.items():
        writer = ShardWriter(folder, name, 1_000_000)
        for ids in documents:
            writer.write(np.array([*ids, EOT], dtype=np.uint16))
        written[name] = writer.close()
    write_index(folder, written, [])


def arc_requests(items: list[dict]) -> list[dict]:
    """One a choice, first all with their question, then all without it, as normalised scoring needs them."""
    requests = []
    for context in ("Question: {question}\nAnswer:", "Answer:"):
        for item in items:
            choices = item["choices"]["text"]
            doc = {
                "id": item["id"],
                "query": f"Question: {item['question']}\nAnswer:",
                "choices": choices,
                "gold": item["choices"]["label"].index(item["answerKey"]),
            }
            for choice in choices:
                request = {"context": context.format(**item), "continuation": f" {choice}"}
                requests.append({"doc": doc, "request": request})
    return requests


def lambada_requests(items: list[dict]) -> list[dict]:
    found = []
    for number, item in enumerate(items):
        context, _, word = item["text"].rpartition(" ")
        request = {"context": context, "continuation": f" {word}"}
        found.append({"doc": {"id": number, "query": context, "choices": [word]}, "request": request})
    return found


def write_all(raw: Path, monkeypatch) -> None:
    """Every task's file below `raw`; the numbers of items expected are set to ours."""
    for task, example in EXAMPLES.items():
        source = data.SOURCES[task]
        path = raw / data.PACKAGE / source.file
        if task.startswith("arc"):
            write_requests(path, arc_requests(example.items))
        elif task == "lambada_openai":
            write_requests(path, lambada_requests(example.items))
        elif task == "boolq":
            columns = [
                {"question": i["question"], "answer": bool(i["label"]), "passage": i["passage"]}
                for i in example.items
            ]
            write_arrow(path, columns)
        else:
            write_arrow(path, example.items)
        monkeypatch.setitem(data.SOURCES, task, replace(source, items=len(example.items)))
