"""Items of the Hub's data sets, read from the files that stage `hub` fetched or somebody put there."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdn.data.hub import FOLDER
from mdn.evaluation.suites import NotRun
from mdn.tracking.manifest import file_digest

Item = dict[str, Any]
MISSING = (  # one text for all sets: tables then say it once
    "its data set is not here; set data.hub.fetch, or put its files into data/raw/hub/<owner>/<name>"
)


@dataclass(frozen=True)
class HubSet:
    """One split of one configuration of a data set, in files below data/raw/hub/<repository>."""

    repository: str
    split: str
    fields: tuple[str, ...]  # that every item must have
    config: str | None = None

    @property
    def title(self) -> str:
        """As shown beside the scores."""
        return ", ".join(filter(None, (self.repository, self.config, self.split)))

    def files(self, raw: Path) -> list[Path]:
        """The split's files in order, in whichever way a repository or an export arranges them:
        <config>/<split>-00000-of-00001.parquet, <config>/<config>-<split>.parquet,
        <config>/<split>/0000.parquet, <config>.jsonl, <split>.jsonl.

        Raises:
            NotRun: if there are none.
        """
        folder = raw / FOLDER / self.repository
        for suffix in (".parquet", ".jsonl"):
            found = [p for p in sorted(folder.rglob(f"*{suffix}")) if self._holds(p.relative_to(folder))]
            if found:
                return found
        raise NotRun(MISSING)

    def _holds(self, path: Path) -> bool:
        folders, name = path.parts[:-1], path.stem
        split = self.split in folders or self.split in name.split("-")
        if self.config is None:
            return split
        return name == self.config or (self.config in folders and split)

    def digest(self, raw: Path) -> str:
        """Digests of the files, or "missing"."""
        try:
            return "+".join(file_digest(path) for path in self.files(raw))
        except NotRun:
            return "missing"

    def items(self, raw: Path) -> list[Item]:
        """Every item.

        Raises:
            NotRun: if there are no files.
            ValueError: if an item lacks a field, or a file is empty or not of its format.
        """
        found: list[Item] = []
        for path in self.files(raw):
            count = len(found)
            for item in _rows(path):
                if lacking := [name for name in self.fields if name not in item]:
                    raise ValueError(
                        f"{path}: an item has no {lacking[0]!r}, only {', '.join(item)}; "
                        f"it is not a file of {self.repository}"
                    )
                found.append(item)
            if len(found) == count:
                raise ValueError(f"{path}: no items; fetch it again")
        return found


def _rows(path: Path) -> Iterator[Item]:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            yield from pq.read_table(path).to_pylist()
        else:
            with path.open(encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
    except ValueError as error:  # pyarrow's errors and JSON's are some
        raise ValueError(f"{path}: not {path.suffix[1:]} ({error}); fetch it again") from None
