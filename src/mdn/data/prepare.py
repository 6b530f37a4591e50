"""Text to token shards: reads each part twice (once to count, once to tokenize), in memory that does not grow
with the text, and puts the finished set in place as a whole."""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mdn.config import ConfigError, DataSet, Part
from mdn.data import selection, sources
from mdn.data.selection import HELD_OUT, TRAIN, Survey
from mdn.data.shards import ShardWriter, write_index
from mdn.data.tokenization import encode

BATCH_CHARACTERS = 1_000_000  # encoded at once; a longer document goes alone
ROOTS: dict[str, Callable[[Path], Path]] = {"wheels": lambda raw: raw, "local": lambda raw: Path()}

Watch = Callable[[str, int, int | None], None]  # what is done, characters so far, characters in all if known


@dataclass
class Count:
    """What became of the documents of one part."""

    documents: int = 0
    tokens: int = 0


@dataclass
class Tally:
    """One source in index.json; `sha256` covers its documents that are used, in order."""

    name: str
    license: str
    train: Count = field(default_factory=Count)
    heldout: Count = field(default_factory=Count)
    blank: int = 0  # documents without text
    repeated: int = 0  # the same as a held-out one, so not trained on
    unselected: int = 0  # outside the share that is kept
    sha256: str = ""


@dataclass(frozen=True)
class Source:
    name: str
    license: str
    documents: Callable[[], Iterator[tuple[str, str]]]  # (fate, text)


def prepare(
    name: str, data: DataSet, *, raw: Path, tokens: Path, made: Tokenizer, watch: Watch
) -> dict[str, Any]:
    """Writes the token set tokens/<name> and returns its index. A set that is there is replaced at the end.

    Raises:
        ConfigError: if the set or one of its parts cannot work as configured.
        ValueError, OSError: if a source is missing, empty or damaged.
    """
    unfinished, folder = tokens / f".{name}.partial", tokens / name
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        if data.source == "huggingface":
            opened, characters = _hub(name, data)
        elif data.source in ROOTS:
            opened, characters = _parts(data, ROOTS[data.source](raw), watch)
        else:
            raise ConfigError(f"source: {data.source!r} is unknown; use {', '.join(ROOTS)} or huggingface")
        index = _write(unfinished, opened, characters, data.shard_tokens, made, watch)
        _replace(folder, unfinished)
    except ConfigError as error:
        raise ConfigError(f"data.sets.{name}.{error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return index


def _parts(data: DataSet, root: Path, watch: Watch) -> tuple[list[Source], int | None]:
    names = [part.name for part in data.parts]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"parts: {names} are not distinct names; name each part of a data set once")
    for part in data.parts:  # all of them, before the first is read
        sources.part_files(part, root)
    surveys, characters = [], 0
    for part in data.parts:
        watch(f"reading {part.name}", characters, None)
        surveys.append(selection.survey(part.name, sources.documents(part, root), part.holdout))
        characters += surveys[-1].characters
    held = {key for found in surveys for key in found.held}
    opened = [
        Source(part.name, part.license, partial(_read, part, root, found, held))
        for part, found in zip(data.parts, surveys, strict=True)
    ]
    return opened, characters


def _read(part: Part, root: Path, found: Survey, held: set[bytes]) -> Iterator[tuple[str, str]]:
    return selection.by_place(sources.documents(part, root), len(found.held), found.documents, held)


def _hub(name: str, data: DataSet) -> tuple[list[Source], int | None]:
    def split() -> Iterator[tuple[str, str]]:
        return selection.by_hash(sources.hub_documents(data), data.keep, data.holdout)

    return [Source(name, f"see {data.repository}", split)], None


def _write(
    folder: Path, opened: list[Source], characters: int | None, limit: int, made: Tokenizer, watch: Watch
) -> dict[str, Any]:
    writers: dict[str, ShardWriter] = {}
    tallies, done = [], 0
    for source in opened:
        tally, digest = Tally(source.name, source.license), hashlib.sha256()
        tallies.append(tally)
        for batch in _batches(source.documents(), tally):
            for (fate, text), ids in zip(batch, encode(made, [text for _, text in batch]), strict=True):
                split = TRAIN if fate == TRAIN else f"{HELD_OUT}_{source.name}"
                if split not in writers:
                    writers[split] = ShardWriter(folder, split, limit)
                writers[split].write(ids)
                digest.update(selection.digest(text))
                count: Count = getattr(tally, fate)
                count.documents += 1
                count.tokens += len(ids)
                done += len(text)
            watch(f"tokenizing {source.name}", done, characters)
        tally.sha256 = digest.hexdigest()
    if TRAIN not in writers:
        raise ValueError("the data set leaves no document to train on; raise keep or name more text")
    return write_index(
        folder,
        {split: writer.close() for split, writer in writers.items()},
        [asdict(tally) for tally in tallies],
    )


def _batches(documents: Iterator[tuple[str, str]], tally: Tally) -> Iterator[list[tuple[str, str]]]:
    """Documents to tokenize, about BATCH_CHARACTERS at a time; the others are counted in the tally."""
    batch, size = [], 0
    for fate, text in documents:
        if fate not in (TRAIN, HELD_OUT):
            setattr(tally, fate, getattr(tally, fate) + 1)
            continue
        batch.append((fate, text))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _replace(folder: Path, finished: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    finished.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
