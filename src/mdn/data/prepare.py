"""Text to token shards, a group of files at a time, in memory that does not grow with the text.

tokens/.<set>.partial/<identity>/survey.json   what was read of all parts before the first was tokenized
                                /00003/        shards and group.json of a finished group
                                /.00003.<…>/   a group that a process works on
                                /set/          shards that are being put together
tokens/<set>/                                  the finished set

A group is renamed when it is finished, so a kill costs the groups at work, and two processes that work on one
group are harmless; what killed ones leave goes when the set is finished. The identity covers what decides the
tokens: groups of another configuration, of files that changed or of other code are never taken over. The
finished set has the same bytes whatever number of processes made its groups, in whatever order.
"""

import errno
import hashlib
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mdn.config import ConfigError, DataSet
from mdn.data import selection
from mdn.data.groups import Groups, Source, Watch, groups
from mdn.data.selection import HELD_OUT, LEFT_OUT, TRAIN
from mdn.data.shards import (
    Shard,
    ShardWriter,
    check_sizes,
    open_split,
    own,
    read_index,
    renamed,
    write_index,
    write_json,
)
from mdn.data.tokenization import encode

BATCH_CHARACTERS = 1_000_000  # encoded at once; a longer document goes alone
RECORD = "group.json"

Say = Callable[[str], None]
Batch = list[tuple[str, str]]  # (fate, text) of documents


@dataclass
class Count:
    """What became of the documents of one part."""

    documents: int = 0
    tokens: int = 0


@dataclass
class Tally:
    """One source in index.json. `sha256` covers its documents that are used, in order; of a source in several
    groups, the digests of the groups."""

    name: str
    license: str
    train: Count = field(default_factory=Count)
    heldout: Count = field(default_factory=Count)
    blank: int = 0  # documents without text
    repeated: int = 0  # the same as a held-out one, so not trained on
    unselected: int = 0  # outside the share that is kept
    sha256: str = ""


@dataclass(frozen=True)
class Finished:
    """The record of a finished group."""

    splits: dict[str, list[Shard]]
    sources: list[Tally]


@dataclass(frozen=True)
class Work:
    """A set that is being made."""

    name: str
    tokens: Path
    groups: Groups
    identity: str
    made: Tokenizer
    shard_tokens: int

    @property
    def finished(self) -> Path:
        return self.tokens / self.name

    @property
    def partial(self) -> Path:
        return self.tokens / f".{self.name}.partial"

    @property
    def folder(self) -> Path:
        return self.partial / self.identity

    @property
    def whole(self) -> Path:
        return self.folder / "set"

    def group(self, number: int) -> Path:
        return self.folder / f"{number:05d}"


def task(text: str) -> slice:
    """The groups I, I + N, … of a job array's task I of N, written "I/N" and counted from 0.

    Raises:
        ConfigError: if the text is something else.
    """
    first, _, count = text.partition("/")
    if first.isdecimal() and count.isdecimal() and int(first) < int(count):
        return slice(int(first), None, int(count))
    raise ConfigError(f"--task: {text!r} is not I/N with I from 0 to N - 1; write for example 0/64 to 63/64")


def prepare(
    name: str,
    data: DataSet,
    *,
    raw: Path,
    tokens: Path,
    made: Tokenizer,
    watch: Watch,
    code: str,
    say: Say = print,
    force: bool = False,
) -> dict[str, Any]:
    """Makes the groups that are missing, puts all together as tokens/<name>, and returns its index. A set
    that is there is adopted if it is undamaged and of the same identity, else replaced at the end.

    Args:
        code: digest of the code that makes tokens of text.
        force: adopt no set; finished groups of an unfinished one are taken all the same.

    Raises:
        ConfigError: if the set or one of its parts cannot work as configured.
        ValueError, OSError: if a source is missing, empty or damaged, or the disk is full.
    """
    with _explained(name, tokens):
        work = _open(name, data, raw, tokens, made, code)
        old = tokens / f".{name}.old"
        if old.exists() and not work.finished.exists():  # killed between the two renames of `_replace`
            old.rename(work.finished)
        if not force and _intact(work, watch, say):
            say(f"{name}: adopted, nothing has changed")
        else:
            if not _is(work.whole, work.identity):
                if work.whole.exists():
                    _take_back(work)
                _tokenize(work, range(len(work.groups)), watch, say)
                _put_together(work)
            _replace(work.finished, work.whole, old)
        for rest in (work.partial, old):
            shutil.rmtree(rest, ignore_errors=True)
        return read_index(work.finished)


def prepare_task(
    name: str,
    data: DataSet,
    share: slice,
    *,
    raw: Path,
    tokens: Path,
    made: Tokenizer,
    watch: Watch,
    code: str,
    say: Say = print,
) -> None:
    """Makes those of a share of the groups (see `task`) that are missing; `prepare` puts them together.
    Arguments and errors as there. Tasks that start at once each do the survey."""
    with _explained(name, tokens):
        work = _open(name, data, raw, tokens, made, code)
        if _is(work.finished, work.identity):
            say(f"{name}: the set is finished; remove {work.finished} to make it again")
        elif work.whole.exists():
            say(f"{name}: all groups are there and are being put together")
        else:
            numbers = range(len(work.groups))[share]
            _tokenize(work, numbers, watch, say)
            say(f"{name}: done with {len(numbers)} of {len(work.groups)} groups; `dvc repro` joins them")


def _open(name: str, data: DataSet, raw: Path, tokens: Path, made: Tokenizer, code: str) -> Work:
    read = groups(name, data, raw)
    tokenizer = hashlib.sha256(made.to_str().encode()).hexdigest()
    decides = json.dumps([asdict(data), read.files, tokenizer, code], sort_keys=True)
    identity = hashlib.sha256(decides.encode()).hexdigest()[:12]
    return Work(name, tokens, read, identity, made, data.shard_tokens)


@contextmanager
def _explained(name: str, tokens: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"data.sets.{name}.{error}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"{tokens}: no space is left; make room and repeat the command, which keeps finished groups"
        ) from None


def _tokenize(work: Work, numbers: Sequence[int], watch: Watch, say: Say) -> None:
    missing = [number for number in numbers if _finished(work.group(number)) is None]
    if len(missing) < len(numbers):
        say(f"{work.name}: {len(numbers) - len(missing)} of {len(numbers)} groups are there")
    if not missing:
        return
    work.groups.survey(work.folder, watch)
    known, done = work.groups.characters(missing), 0
    for place, number in enumerate(missing):
        guess = done * len(missing) // place if place else None  # as the groups so far
        done = _make(work, number, done, guess if known is None else known, watch)
    watch(f"tokenized {work.name}", done, done)


def _make(work: Work, number: int, done: int, total: int | None, watch: Watch) -> int:
    """Makes a group; `done` and the characters that it has."""
    folder = own(work.group(number))
    shutil.rmtree(folder, ignore_errors=True)  # of a killed process of the same number
    folder.mkdir(parents=True)
    try:
        done = _write(folder, work, number, done, total, watch)
        _name(folder, work.group(number))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done


def _name(folder: Path, group: Path) -> None:
    """Gives a finished group its name, unless another process has just made the same one."""
    if _finished(group) is None:
        shutil.rmtree(group, ignore_errors=True)  # damaged
    try:
        folder.rename(group)
    except OSError:
        if _finished(group) is None:
            raise


def _write(folder: Path, work: Work, number: int, done: int, total: int | None, watch: Watch) -> int:
    writers: dict[str, ShardWriter] = {}
    tallies = []
    for source in work.groups.sources(number):
        tally, digest = Tally(source.name, source.license), hashlib.sha256()
        tallies.append(tally)
        for batch, tokens in _tokenized(_batches(source, tally), work.made):
            for (fate, text), ids in zip(batch, tokens, strict=True):
                split = TRAIN if fate == TRAIN else f"{HELD_OUT}_{source.name}"
                if split not in writers:
                    writers[split] = ShardWriter(folder, split, work.shard_tokens)
                writers[split].write(ids)
                digest.update(selection.digest(text))
                count: Count = getattr(tally, fate)
                count.documents += 1
                count.tokens += len(ids)
                done += len(text)
            watch(f"tokenizing {source.name}", done, total)
        tally.sha256 = digest.hexdigest()
    splits = {split: writer.close() for split, writer in writers.items()}
    write_json(folder / RECORD, asdict(Finished(splits, tallies)))
    return done


def _tokenized(batches: Iterator[Batch], made: Tokenizer) -> Iterator[tuple[Batch, Iterator[np.ndarray]]]:
    """Each batch and its tokens. A thread tokenizes the next one meanwhile, so that the cores need not wait
    for reading and writing."""
    with ThreadPoolExecutor(1, "tokenizer") as ahead:
        waiting: deque[tuple[Batch, Future[Iterator[np.ndarray]]]] = deque()
        for batch in batches:
            waiting.append((batch, ahead.submit(encode, made, [text for _, text in batch])))
            if len(waiting) > 1:
                first, tokens = waiting.popleft()
                yield first, tokens.result()
        for last, tokens in waiting:
            yield last, tokens.result()


def _batches(source: Source, tally: Tally) -> Iterator[Batch]:
    """Documents to tokenize, about BATCH_CHARACTERS at a time; the others are counted in the tally."""
    batch: Batch = []
    size = 0
    for fate, text in source.documents():
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


def _record(group: Path) -> Finished | None:
    """The record of a group; None without one, or with a damaged one."""
    try:
        record = json.loads((group / RECORD).read_text())
        splits = {split: [Shard(**shard) for shard in shards] for split, shards in record["splits"].items()}
        tallies = [
            Tally(**source | {fate: Count(**source[fate]) for fate in (TRAIN, HELD_OUT)})
            for source in record["sources"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Finished(splits, tallies)


def _finished(group: Path) -> Finished | None:
    """The record of a group whose shards are there as well."""
    record = _record(group)
    try:
        for shard in (shard for shards in (record.splits if record else {}).values() for shard in shards):
            check_sizes(group, shard)
    except (OSError, ValueError):
        return None
    return record


def _moves(work: Work, records: Sequence[Finished]) -> Iterator[tuple[Path, str, Shard, Shard]]:
    """(group's folder, split, shard, the same under its name in the set) of every shard, in order."""
    count: Counter[str] = Counter()
    for number, record in enumerate(records):
        for split, shards in record.splits.items():
            for shard in shards:
                yield work.group(number), split, shard, renamed(shard, split, count[split])
                count[split] += 1


def _put_together(work: Work) -> None:
    """Moves the shards of all groups into one folder and writes its index. A kill in between leaves what
    `_take_back` undoes."""
    records = [record for n in range(len(work.groups)) if (record := _finished(work.group(n)))]
    if len(records) < len(work.groups):
        raise ValueError(f"{work.folder}: a finished group was taken away; repeat the command")
    splits: dict[str, list[Shard]] = {}
    if not any(TRAIN in record.splits for record in records):
        raise ValueError("the data set leaves no document to train on; raise keep or name more text")
    work.whole.mkdir()
    for folder, split, shard, moved in _moves(work, records):
        (folder / shard.file).rename(work.whole / moved.file)
        (folder / shard.document_offsets).rename(work.whole / moved.document_offsets)
        splits.setdefault(split, []).append(moved)
    write_index(work.whole, splits, [asdict(tally) for tally in _total(records)], work.identity)


def _take_back(work: Work) -> None:
    """Moves shards back into their groups, after a kill while they were put together."""
    records = [record for n in range(len(work.groups)) if (record := _record(work.group(n)))]
    if len(records) == len(work.groups):  # else no name can be told, and what was moved is made again
        for folder, _, shard, moved in _moves(work, records):
            for old, new in ((shard.file, moved.file), (shard.document_offsets, moved.document_offsets)):
                if (work.whole / new).exists():
                    (work.whole / new).rename(folder / old)
    shutil.rmtree(work.whole)


def _total(records: Sequence[Finished]) -> list[Tally]:
    """The sources of all groups, in the order of their first."""
    parts: dict[str, list[Tally]] = {}
    for tally in (tally for record in records for tally in record.sources):
        parts.setdefault(tally.name, []).append(tally)
    for first, *others in parts.values():
        digests = [first.sha256, *(other.sha256 for other in others)]
        for other in others:
            for fate in (TRAIN, HELD_OUT):
                count: Count = getattr(first, fate)
                count.documents += getattr(other, fate).documents
                count.tokens += getattr(other, fate).tokens
            for why in LEFT_OUT:
                setattr(first, why, getattr(first, why) + getattr(other, why))
        if others:
            first.sha256 = hashlib.sha256("".join(digests).encode()).hexdigest()
    return [first for first, *_ in parts.values()]


def _is(folder: Path, identity: str) -> bool:
    """Whether a finished set of an identity lies in a folder, its files as long as they should be."""
    try:
        index = read_index(folder)
        for split in index["splits"]:
            open_split(folder, split)
    except (OSError, ValueError):
        return False
    return index.get("identity") == identity


def _intact(work: Work, watch: Watch, say: Say) -> bool:
    """Whether the finished set is of this identity and undamaged; reads all of it."""
    if not _is(work.finished, work.identity):
        return False
    splits = read_index(work.finished)["splits"]
    for place, split in enumerate(splits):
        watch(f"checking {split}", place, len(splits))
        try:
            open_split(work.finished, split, verify=True)
        except (OSError, ValueError) as error:
            say(f"{work.name}: damaged, so it is made again ({error})")
            return False
        watch(f"checking {split}", place + 1, len(splits))
    return True


def _replace(folder: Path, finished: Path, old: Path) -> None:
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    finished.rename(folder)
