"""Which documents are trained on, which are held out.

Files: the last share of a part is held out, and a document that repeats a held-out one is not trained on.
The Hub: the hash of the text decides, so that a subset is the same wherever and in whatever order it is read.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mdn.config import ConfigError

TRAIN, HELD_OUT = "train", "heldout"
LEFT_OUT = BLANK, REPEATED, UNSELECTED = "blank", "repeated", "unselected"  # why a document is in neither


def digest(text: str) -> bytes:
    """The sha256 that stands for a document.

    Raises:
        ValueError: if the text cannot be written as UTF-8.
    """
    try:
        return hashlib.sha256(text.encode()).digest()
    except UnicodeEncodeError:
        raise ValueError(f"document {text[:40]!r}: holds half a surrogate pair; correct the file") from None


@dataclass(frozen=True)
class Survey:
    """First pass over a part: how much is in each of its stretches, and the digests of what is held out."""

    documents: list[int]
    characters: list[int]
    held: list[bytes]


def survey(name: str, stretches: Iterable[Iterable[str]], holdout: float) -> Survey:
    """Counts the documents of a part that are not blank. Memory: 32 bytes for each held-out one.

    Args:
        stretches: the texts of the part, in order, in one or more runs.

    Raises:
        ConfigError: if the share is not in [0, 1) or leaves nothing to train on or to hold out.
        ValueError: if there is no document.
    """
    if not 0 <= holdout < 1:
        raise ConfigError(f"parts.{name}.holdout: {holdout} is not in [0, 1); use for example 0.01")
    documents, counts, characters = 0, [], []
    last: deque[bytes] = deque()
    for texts in stretches:
        before = documents
        characters.append(0)
        for text in texts:
            if not text.strip():
                continue
            documents += 1
            characters[-1] += len(text)
            if holdout:
                last.append(digest(text))
                while len(last) > _held_count(documents, holdout):
                    last.popleft()
        counts.append(documents - before)
    if documents == 0:
        raise ValueError(f"parts.{name}: no document with text; check its path, format and field")
    if holdout and not 0 < len(last) < documents:
        raise ConfigError(
            f"parts.{name}.holdout: {holdout} holds out {len(last)} of {documents} documents; "
            "choose a share that leaves both"
        )
    return Survey(counts, characters, list(last))


def by_place(
    texts: Iterable[str], found: Survey, stretch: int, held: set[bytes]
) -> Iterator[tuple[str, str]]:
    """(fate, text) of each document of a stretch of a part: the last ones of the part, as many as its survey
    holds out, are held out. `held` are the digests of all parts' held-out documents."""
    place, first_held = sum(found.documents[:stretch]), sum(found.documents) - len(found.held)
    for text in texts:
        if not text.strip():
            yield BLANK, text
            continue
        place += 1
        if place > first_held:
            yield HELD_OUT, text
        else:
            yield (REPEATED if held and digest(text) in held else TRAIN), text


def by_hash(texts: Iterable[str], keep: float, holdout: float) -> Iterator[tuple[str, str]]:
    """(fate, text) of each document: two independent numbers in [0, 1), from the text's hash, decide whether
    it is among the share that is kept and, if so, among the share of those that is held out.

    Raises:
        ConfigError: if a share is out of range.
    """
    if not 0 < keep <= 1:
        raise ConfigError(f"keep: {keep} is not in (0, 1]; use for example 0.17")
    if not 0 <= holdout < 1:
        raise ConfigError(f"holdout: {holdout} is not in [0, 1); use for example 0.0005")
    for text in texts:
        if not text.strip():
            yield BLANK, text
            continue
        key = digest(text)
        if _fraction(key[:8]) >= keep:
            yield UNSELECTED, text
        else:
            yield (HELD_OUT if _fraction(key[8:16]) < holdout else TRAIN), text


def _held_count(documents: int, holdout: float) -> int:
    """Rounded; grows by at most one a document, which lets `survey` forget all others."""
    return int(documents * holdout + 0.5)


def _fraction(key: bytes) -> float:
    return int.from_bytes(key, "big") / 2**64
