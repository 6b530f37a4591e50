"""Token shards: what `prepare` writes and training and evaluation read through memory maps.

tokens/<set>/<split>-00000.bin   uint16 little-endian tokens, each document followed by end-of-text
tokens/<set>/<split>-00000.idx   uint64 little-endian offsets of its documents: 0, …, number of tokens
tokens/<set>/index.json          splits, shards, digests, sources; written last

A set is made in tokens/.<set>.partial, group by group: see mdn.data.prepare.
"""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mdn.data import gpt2
from mdn.files import settle

INDEX = "index.json"
VERSION = 1
TOKEN = np.dtype("<u2")
OFFSET = np.dtype("<u8")
OPEN_MAPS = 64  # each holds a file descriptor, and 100B tokens have a thousand shards


@dataclass(frozen=True)
class Shard:
    """An entry of index.json. A document never spans two shards."""

    file: str
    tokens: int
    documents: int
    sha256: str
    document_offsets: str


class ShardWriter:
    """Writes one split. A document that would take a shard past `shard_tokens` opens the next one, so only a
    document longer than that makes a longer shard."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens: {shard_tokens} is not positive; use for example 100000000")
        self._folder, self._split, self._limit = folder, split, shard_tokens
        self._shards: list[Shard] = []
        self._open()

    def _open(self) -> None:
        self._name = f"{self._split}-{len(self._shards):05d}"
        self._file = (self._folder / f"{self._name}.bin.tmp").open("wb")
        self._sha256 = hashlib.sha256()
        self._offsets = [0]

    def write(self, tokens: np.ndarray) -> None:
        """Appends one document: uint16 tokens, end-of-text included."""
        if len(tokens) == 0:
            raise ValueError(f"{self._split}: a document without tokens; each ends with end-of-text")
        if self._offsets[-1] and self._offsets[-1] + len(tokens) > self._limit:
            self._close()
            self._open()
        data = tokens.astype(TOKEN, casting="safe").tobytes()
        self._file.write(data)
        self._sha256.update(data)
        self._offsets.append(self._offsets[-1] + len(tokens))

    def _close(self) -> None:
        self._file.close()
        offsets = self._folder / f"{self._name}.idx"
        temporary = offsets.with_name(offsets.name + ".tmp")
        temporary.write_bytes(np.array(self._offsets, dtype=OFFSET).tobytes())
        settle(temporary, offsets)
        path = self._folder / f"{self._name}.bin"
        settle(Path(self._file.name), path)
        self._shards.append(
            Shard(
                file=path.name,
                tokens=self._offsets[-1],
                documents=len(self._offsets) - 1,
                sha256=self._sha256.hexdigest(),
                document_offsets=offsets.name,
            )
        )

    def close(self) -> list[Shard]:
        """Finishes the last shard; all shards of the split."""
        self._close()
        return self._shards


def renamed(shard: Shard, split: str, number: int) -> Shard:
    """The shard as number `number` of its split."""
    name = f"{split}-{number:05d}"
    return replace(shard, file=f"{name}.bin", document_offsets=f"{name}.idx")


def own(path: Path) -> Path:
    """A name beside `path` that only this process uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is there as a whole or not at all, also where several processes write it."""
    temporary = own(path)
    try:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
        settle(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_index(
    folder: Path, splits: dict[str, list[Shard]], sources: list[dict[str, Any]], identity: str = ""
) -> dict[str, Any]:
    """Writes index.json, the mark of a complete set, and returns it.

    `digest` covers tokenizer and tokens: sets of the same digest train the same model. `identity` is that of
    what the set was made from, so that it can be told whether it would come out the same.
    """
    index: dict[str, Any] = {
        "version": VERSION,
        "tokenizer": {"name": gpt2.NAME, "sha256": gpt2.SHA256},
        "splits": {
            split: {
                "tokens": sum(shard.tokens for shard in shards),
                "documents": sum(shard.documents for shard in shards),
                "shards": [asdict(shard) for shard in shards],
            }
            for split, shards in splits.items()
        },
        "sources": sources,
        "identity": identity,
    }
    same = json.dumps([index["tokenizer"], index["splits"]], sort_keys=True, allow_nan=False)
    index["digest"] = hashlib.sha256(same.encode()).hexdigest()
    write_json(folder / INDEX, index)
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """index.json of a token set.

    Raises:
        FileNotFoundError, ValueError: if it is missing, damaged, of another version or another tokenizer.
    """
    path = folder / INDEX
    if not path.exists():
        raise FileNotFoundError(f"{path}: not found; `{_remedy(folder)}` prepares the set")
    try:
        index = json.loads(path.read_text())
        version, tokenizer = index["version"], index["tokenizer"]["sha256"]
        index["splits"], index["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged ({error!r}); `{_remedy(folder)}` writes it again") from None
    if version != VERSION:
        raise ValueError(f"{path}: version is {version}, not {VERSION}; `{_remedy(folder)}` writes it again")
    if tokenizer != gpt2.SHA256:
        raise ValueError(
            f"{path}: tokenizer sha256 is {tokenizer}, not {gpt2.SHA256}; `{_remedy(folder)}` tokenizes again"
        )
    return index


class TokenSplit:
    """One split as one long row of tokens, memory-mapped. Pickles as its path, for loader workers."""

    def __init__(self, folder: Path, split: str, shards: list[Shard]) -> None:
        self.folder, self.split, self.shards = folder, split, shards
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        self._map = lru_cache(OPEN_MAPS)(self._open)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple:
        return TokenSplit, (self.folder, self.split, self.shards)

    def _open(self, shard: int) -> np.ndarray:
        return np.memmap(self.folder / self.shards[shard].file, dtype=TOKEN, mode="r")

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens [start, stop) as uint16, across shards.

        Raises:
            ValueError: if the range leaves the split.
        """
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"tokens [{start}, {stop}) leave split {self.split}, which has {len(self)}")
        out = np.empty(stop - start, dtype=np.uint16)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < stop:
            first = int(self._starts[shard])
            end = min(stop, int(self._starts[shard + 1]))
            out[at - start : end - start] = self._map(shard)[at - first : end - first]
            at, shard = end, shard + 1
        return out

    def documents(self) -> Iterator[np.ndarray]:
        """Every document in order as uint16, its end-of-text included."""
        for number, shard in enumerate(self.shards):
            tokens = self._map(number)
            offsets = np.fromfile(self.folder / shard.document_offsets, dtype=OFFSET).tolist()
            for start, stop in pairwise(offsets):
                yield np.array(tokens[start:stop])


def open_split(folder: Path | str, split: str, verify: bool = False) -> TokenSplit:
    """Opens a split after checking index and file sizes; with `verify` also digests and offsets (reads all).

    Raises:
        FileNotFoundError, ValueError: one line that names the file, the value and the remedy.
    """
    folder = Path(folder)
    splits = read_index(folder)["splits"]
    if split not in splits:
        raise ValueError(f"{folder / INDEX}: no split {split!r}; it has {', '.join(splits)}")
    shards = [Shard(**entry) for entry in splits[split]["shards"]]
    for shard in shards:
        check_sizes(folder, shard)
        if verify:
            _verify(folder, shard)
    return TokenSplit(folder, split, shards)


def check_sizes(folder: Path, shard: Shard) -> None:
    """
    Raises:
        FileNotFoundError, ValueError: if a file of the shard is missing or not as long as it should be.
    """
    _check_size(folder, shard.file, shard.tokens * TOKEN.itemsize)
    _check_size(folder, shard.document_offsets, (shard.documents + 1) * OFFSET.itemsize)


def _check_size(folder: Path, name: str, wanted: int) -> None:
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: not found, index.json lists it; `{_remedy(folder)}` writes it again"
        )
    found = path.stat().st_size
    if found != wanted:
        raise ValueError(f"{path}: {found} bytes, not {wanted}; `{_remedy(folder)}` writes it again")


def _verify(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != shard.sha256:
        raise ValueError(
            f"{path}: sha256 is {found}, not {shard.sha256}; `{_remedy(folder)}` writes it again"
        )
    offsets = np.fromfile(folder / shard.document_offsets, dtype=OFFSET).astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != shard.tokens or (np.diff(offsets) < 1).any():
        raise ValueError(
            f"{folder / shard.document_offsets}: offsets do not rise from 0 to {shard.tokens}; "
            f"`{_remedy(folder)}` writes it again"
        )


def _remedy(folder: Path) -> str:
    return f"dvc repro -f prepare@{folder.name}"
