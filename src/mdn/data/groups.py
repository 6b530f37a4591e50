"""What a data set reads, cut into groups of consecutive files: the unit in which it is tokenized.

The groups follow from the set and its files alone, so they are the same for any number of processes.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mdn.config import ConfigError, DataSet, Part
from mdn.data import selection, sources
from mdn.data.selection import Survey
from mdn.data.shards import write_json

GROUP_BYTES = 2**30  # of files; a longer file is a group of its own
GROUP_FILES = 256  # of a set of the Hub, whose sizes are unknown; 0.5B of SlimPajama's tokens at keep 0.17
SURVEY = "survey.json"
ROOTS: dict[str, Callable[[Path], Path]] = {"wheels": lambda raw: raw, "local": lambda raw: Path()}

Watch = Callable[[str, int, int | None], None]  # what is done, how much so far, how much in all if known


@dataclass(frozen=True)
class Source:
    """What a group reads of one source."""

    name: str
    license: str
    documents: Callable[[], Iterator[tuple[str, str]]]  # (fate, text)


class Groups(ABC):
    files: list[Any]  # JSON: each file, and what tells it from another of the same name

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def survey(self, folder: Path, watch: Watch) -> None:
        """Reads what has to be known of all groups before the first is tokenized. It is kept in `folder`;
        processes that find nothing there, as tasks that start at once do, each read all."""

    @abstractmethod
    def characters(self, numbers: Iterable[int]) -> int | None:
        """How much text is in some groups, if the survey told."""

    @abstractmethod
    def sources(self, number: int) -> list[Source]:
        """What group `number` reads, after the survey."""


def groups(name: str, data: DataSet, raw: Path) -> Groups:
    """
    Raises:
        ConfigError, ValueError, OSError: if the set or one of its parts cannot work as configured.
    """
    if data.source == "huggingface":
        return HubGroups(name, data)
    if data.source in ROOTS:
        return FileGroups(data.parts, ROOTS[data.source](raw))
    raise ConfigError(f"source: {data.source!r} is unknown; use {', '.join(ROOTS)} or huggingface")


class FileGroups(Groups):
    """The files of all parts, in order. A group may span parts, a part groups; what a group has of a part is
    a stretch of it."""

    def __init__(self, parts: list[Part], root: Path) -> None:
        names = [part.name for part in parts]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"parts: {names} are not distinct names; name each part of a data set once")
        self.parts = {part.name: part for part in parts}
        self.files = []
        self._groups: list[dict[str, list[Path]]] = []  # the files of each part in a group
        room = -1
        for part in parts:
            for path in sources.part_files(part, root):
                found = path.stat()
                where = path.relative_to(root) if path.is_relative_to(root) else path
                self.files.append([part.name, str(where), found.st_size, found.st_mtime_ns])
                if room < found.st_size:
                    self._groups.append({})
                    room = GROUP_BYTES
                self._groups[-1].setdefault(part.name, []).append(path)
                room -= found.st_size

    def __len__(self) -> int:
        return len(self._groups)

    def survey(self, folder: Path, watch: Watch) -> None:
        try:
            stored = json.loads((folder / SURVEY).read_text())
            self._surveys = {
                name: Survey(**{**found, "held": [bytes.fromhex(key) for key in found["held"]]})
                for name, found in stored.items()
            }
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
            self._surveys = {
                name: selection.survey(name, self._stretches(part, watch), part.holdout)
                for name, part in self.parts.items()
            }
            stored = {
                name: {**asdict(found), "held": [key.hex() for key in found.held]}
                for name, found in self._surveys.items()
            }
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / SURVEY, stored)
        self._held = {key for found in self._surveys.values() for key in found.held}

    def _stretches(self, part: Part, watch: Watch) -> Iterator[Iterator[str]]:
        stretches = [group[part.name] for group in self._groups if part.name in group]
        whole = sum(path.stat().st_size for files in stretches for path in files)
        done = 0

        def read(files: list[Path]) -> Iterator[str]:
            nonlocal done
            for path in files:
                watch(f"reading {part.name}", done, whole)
                yield from sources.documents(part, [path])
                done += path.stat().st_size

        yield from map(read, stretches)

    def characters(self, numbers: Iterable[int]) -> int:
        return sum(
            self._surveys[name].characters[self._stretch(name, number)]
            for number in numbers
            for name in self._groups[number]
        )

    def sources(self, number: int) -> list[Source]:
        return [
            Source(name, self.parts[name].license, partial(self._read, name, number))
            for name in self._groups[number]
        ]

    def _read(self, name: str, number: int) -> Iterator[tuple[str, str]]:
        texts = sources.documents(self.parts[name], self._groups[number][name])
        return selection.by_place(texts, self._surveys[name], self._stretch(name, number), self._held)

    def _stretch(self, name: str, number: int) -> int:
        return sum(name in group for group in self._groups[:number])


class HubGroups(Groups):
    """Runs of the repository's files. The hash of a document decides what becomes of it, so there is nothing
    to survey."""

    def __init__(self, name: str, data: DataSet) -> None:
        self.name, self.data = name, data
        self.rows, self.files = sources.hub_rows(data)

    def __len__(self) -> int:
        return math.ceil(self.rows.num_shards / GROUP_FILES)

    def survey(self, folder: Path, watch: Watch) -> None:
        pass

    def characters(self, numbers: Iterable[int]) -> None:
        return None

    def sources(self, number: int) -> list[Source]:
        return [Source(self.name, f"see {self.data.repository}", partial(self._read, number))]

    def _read(self, number: int) -> Iterator[tuple[str, str]]:
        rows = self.rows.shard(len(self), number, contiguous=True)
        return selection.by_hash(sources.hub_documents(self.data, rows), self.data.keep, self.data.holdout)
