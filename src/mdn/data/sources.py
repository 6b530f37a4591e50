"""Texts from files and from the Hub, one document at a time.

Memory is bounded by the largest document, not by the corpus, except where a file is one value: `json` (the
whole file), `text` (the file is the document) and `parquet` (a row group or two; polars decodes them whole).
"""

import json
from collections.abc import Callable, Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from polars.exceptions import ColumnNotFoundError, PolarsError

from mdn.config import ConfigError, DataSet, Part

if TYPE_CHECKING:
    from datasets import IterableDataset

BATCH_ROWS = 256  # rows that polars hands over at once


def part_files(part: Part, root: Path) -> list[Path]:
    """The files of a part in the order of their names; a relative path starts at `root`.

    Raises:
        ConfigError: if the format is unknown or no file matches.
        ValueError: if a file is empty.
    """
    if part.format not in FORMATS:
        raise ConfigError(
            f"parts.{part.name}.format: {part.format!r} is unknown; use one of {', '.join(FORMATS)}"
        )
    found = sorted(root / name for name in glob(part.path, root_dir=root, recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        raise ConfigError(
            f"parts.{part.name}.path: no file matches {root / part.path}; fetch it or correct the path"
        )
    for path in files:
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: empty; fetch it again or take it out of part {part.name}")
    return files


def documents(part: Part, files: Iterable[Path]) -> Iterator[str]:
    """Every document of some files of a part in a fixed order, blank ones too.

    Raises:
        ConfigError: if rows or records lack the field.
        ValueError: if a file is not of the part's format.
    """
    for path in files:
        try:
            yield from FORMATS[part.format](path, part)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error.reason}); convert it") from None


def hub_rows(data: DataSet) -> tuple["IterableDataset", list[Any]]:
    """The rows of a data set of the Hub (or of a local folder in one of its layouts), to be streamed, and
    what its files are: their addresses with commits, or with times of change.

    Raises:
        ConfigError: if the repository is not named.
        OSError: if it cannot be reached.
    """
    from datasets import load_dataset_builder  # slow to import, and no other source needs it

    if not data.repository:
        raise ConfigError("repository: missing; source huggingface needs it, as owner/name")
    try:
        builder = load_dataset_builder(data.repository, revision=data.revision)
        rows = builder.as_streaming_dataset(split="train")
    except OSError as error:
        raise OSError(
            f"repository: {data.repository} cannot be opened ({error}); check name, revision and network, or "
            "name a folder with a copy of its files"
        ) from None
    files = builder.config.data_files["train"]
    return rows, [[str(file), *origin] for file, origin in zip(files, files.origin_metadata, strict=True)]


def hub_documents(data: DataSet, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The documents in rows of `hub_rows`.

    Raises:
        ConfigError: if the rows have no such field.
    """
    for row in rows:
        if data.text not in row:
            raise ConfigError(
                f"text: rows of {data.repository} have no {data.text!r}; use one of {', '.join(row)}"
            )
        yield row[data.text] or ""


def _tagged(path: Path, part: Part) -> Iterator[str]:
    """Text between a line `<doc …>` and a line `</doc>`, as WikiExtractor writes it."""
    lines: list[str] | None = None
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.startswith("<doc ") and lines is None:
                lines = []
            elif line.startswith("</doc>") and lines is not None:
                yield "".join(lines).strip()
                lines = None
            elif lines is not None:
                lines.append(line)
            elif line.strip():
                raise ValueError(f"{path}: line {number} is outside <doc …> and </doc>; use another format")
    if lines is not None:
        raise ValueError(f"{path}: ends inside a document, </doc> is missing; fetch it again")


def _lines(path: Path, part: Part) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.rstrip("\r\n")


def _text(path: Path, part: Part) -> Iterator[str]:
    yield path.read_text(encoding="utf-8")


def _json(path: Path, part: Part) -> Iterator[str]:
    """A mapping or a list whose values are texts, or records with the text in the part's field."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); fetch it again") from None
    if not isinstance(values, dict | list):
        raise ValueError(f"{path}: neither a mapping nor a list; use another format")
    for value in values.values() if isinstance(values, dict) else values:
        text = value.get(part.field) if isinstance(value, dict) else value
        if isinstance(value, dict) and text is None:
            raise _no_field(part, path, list(value))
        if not isinstance(text, str):
            raise ValueError(f"{path}: {str(text)[:40]!r} is not a text; use texts or records that hold one")
        yield text


def _jsonl(path: Path, part: Part) -> Iterator[str]:
    """Plain or .zst, which polars decompresses as it reads. Rows without the field are blank documents."""
    yield from _column(path, part, pl.scan_ndjson(path, schema={part.field: pl.String}))


def _parquet(path: Path, part: Part) -> Iterator[str]:
    yield from _column(path, part, pl.scan_parquet(path, glob=False).select(part.field))


def _column(path: Path, part: Part, frame: pl.LazyFrame) -> Iterator[str]:
    try:
        for batch in frame.collect_batches(chunk_size=BATCH_ROWS, maintain_order=True):
            for text in batch[part.field]:
                yield text or ""
    except ColumnNotFoundError:
        raise _no_field(part, path, pl.read_parquet_schema(path)) from None
    except (PolarsError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"{path}: cannot be read ({why}); check the file and the part's format") from None


def _no_field(part: Part, path: Path, there: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"parts.{part.name}.field: {part.field!r} is not in {path}; use one of {', '.join(there)}"
    )


FORMATS: dict[str, Callable[[Path, Part], Iterator[str]]] = {
    "documents": _tagged,
    "lines": _lines,
    "json": _json,
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
}
