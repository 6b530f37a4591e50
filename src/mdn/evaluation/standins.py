"""Items made of texts that are here, in the shape of sets that no package carries. More are in data.py."""

import hashlib
import json
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from mdn.data.shards import open_split, read_index
from mdn.evaluation.data import Item

NUMBER = re.compile(r"\b([A-Za-z]+ [A-Za-z]+ [A-Za-z]+) (\d[\d,]*\d)\b")
PYTHON = f"standard library of Python {platform.python_version()}"


def first_heldout(tokens: Path) -> str | None:
    """The first held-out split of a token set, if it has one."""
    return next((name for name in read_index(tokens)["splits"] if name.startswith("heldout")), None)


def numbers(tokens: Path, split: str, tokenizer: Tokenizer) -> Iterator[Item]:
    """Key, value and text, the fields of FDA and SWDE: of each document of a split the first number of two or
    more digits that occurs once, and the three words before it, which occur once too."""
    for document in open_split(tokens, split).documents():
        text = tokenizer.decode(document[:-1].tolist())  # without end-of-text
        for key, value in NUMBER.findall(text):
            if text.lower().count(key.lower()) == text.count(value) == 1:
                yield {"key": key, "value": value, "text": text}
                break


def standard_library(folder: Path | None = None) -> list[Item]:
    """The fields of LongBench's LCC: of each module of Python's standard library the first line after three
    quarters of it that says something, and all lines before it."""
    found = []
    for path in sorted((folder or Path(sysconfig.get_paths()["stdlib"])).glob("*.py")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        for number in range(len(lines) * 3 // 4, len(lines)):
            answer = lines[number].rstrip("\r\n")
            if len(answer.strip()) >= 10 and not answer.lstrip().startswith("#"):
                context = "".join(lines[:number])
                found.append({"context": context, "input": "", "answers": [answer], "all_classes": None})
                break
    return found


def digest(items: list[Item]) -> str:
    """Twelve hex digits of items."""
    return hashlib.sha256(json.dumps(items, ensure_ascii=False).encode()).hexdigest()[:12]
