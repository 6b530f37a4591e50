"""The run folder `runs/{scale}/{model}`: the truth about a training, whatever tracking server is up.

    config.yaml        the resolved RunConfig
    manifest.json      fingerprint, code digest, commit, versions, hardware, digests of data and tokenizer
    log.jsonl          one line an optimizer step: {"step": 1, "train/loss": 10.8, …}
    metrics.json       final figures
    checkpoints/       to resume from; not a result
    model.safetensors  final weights
    evaluation/        one JSON a suite, and its samples
    mlflow.json        what the mirror has been sent
    .lock              who trains here, or was the last to; whether it still does, the kernel knows

`open_record` decides what a training has to do: adopt a finished run of the same fingerprint, resume an
unfinished one, or archive what is there and start at step 0. Nothing is ever deleted, and going back to an
earlier configuration brings its folder back from the archive.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from mdn.config import RunConfig
from mdn.files import flush, replacing

ARCHIVE = ".archive"
LOCK = ".lock"


def forced() -> bool:
    """Whether a finished result is made again and not adopted: MDN_FORCE=1, which the report's commands set.
    DVC's own --force runs a stage, which then would find its result already there."""
    return os.environ.get("MDN_FORCE") == "1"


def write_json(path: Path, value: Any) -> None:
    """Strict JSON, written to a temporary name and renamed.

    Raises:
        ValueError: if a number is NaN or infinite.
    """
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def flat(values: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{inside}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


class Experiment(Protocol):
    """What a record needs to know of a configuration: where it belongs and which experiment it is."""

    @property
    def scale(self) -> str: ...
    @property
    def name(self) -> str: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class Record:
    """Reader and writer of one run folder."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def config(self) -> RunConfig:
        return RunConfig.from_yaml(self.folder / "config.yaml")

    @property
    def manifest(self) -> dict[str, Any]:
        return read_json(self.folder / "manifest.json")

    @property
    def metrics(self) -> dict[str, float]:
        return read_json(self.folder / "metrics.json")

    @property
    def finished(self) -> bool:
        """Figures and weights are there. A manifest may say that weights are not kept (`"weights": null`), or
        that a time limit cut the training short (`cut`): its figures then are those of a part of it."""
        if not (self.folder / "metrics.json").exists():
            return False
        manifest = self.manifest
        return (self.weights.exists() or manifest.get("weights", "") is None) and not manifest.get("cut")

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a line to log.jsonl. A value that is not finite is written as its name, never as a number."""
        line = {"step": step, **{k: v if math.isfinite(v) else str(v) for k, v in values.items()}}
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Waits until the disk has the log: no checkpoint may be ahead of it."""
        flush(self.folder / "log.jsonl")

    def log(self, first: int = 0) -> list[dict[str, Any]]:
        """The lines of log.jsonl from step `first` on; a last line that a kill cut short is left out."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return []
        text = path.read_text()
        lines: list[dict[str, Any]] = []
        for line in reversed(text[: text.rfind("\n") + 1].splitlines()):
            lines.append(json.loads(line))
            if lines[-1]["step"] < first:
                lines.pop()
                break  # the mirror asks every few seconds; parsing it all would cost
        return lines[::-1]

    def rewind(self, step: int) -> None:
        """Drops log lines after `step`: a resumed training writes them again."""
        kept = [line for line in self.log() if line["step"] <= step]
        _write_lines(self.folder / "log.jsonl", kept)

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Writes metrics.json, the mark of a finished training; call it last."""
        write_json(self.folder / "metrics.json", {k: v for k, v in metrics.items() if math.isfinite(v)})


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def identity(folder: Path) -> str | None:
    """Fingerprint, code and data of the run in `folder`, as one string; None if there is none."""
    path = folder / "manifest.json"
    if not path.exists():
        return None
    manifest = read_json(path)
    return "-".join(manifest[key] for key in ("fingerprint", "data", "code"))


def open_record(root: Path, config: Experiment, *, data: str, code: str) -> tuple[Record, str]:
    """The record of a training and what is left to do: "finished", "resume" or "new".

    data and code are digests of the token set and of the source that computes. A finished run is adopted
    only if configuration, data and code are the same; an unfinished one is resumed if configuration and data
    are (a fix in the code must not throw days of training away; the manifest then says both digests). If
    `forced`, a finished run is archived and made again, and none comes back.
    """
    folder = root / config.scale / config.name
    wanted = f"{config.fingerprint()}-{data}"
    here, record = identity(folder), Record(folder)
    if here == f"{wanted}-{code}" and record.finished and forced():
        _archive(root, folder, here)
        return record, "new"
    if here is not None:
        if here == f"{wanted}-{code}" or (here.startswith(wanted + "-") and not record.finished):
            return record, "finished" if record.finished else "resume"
        _archive(root, folder, here)
    earlier = root / ARCHIVE / config.scale / config.name / f"{wanted}-{code}"
    if earlier.exists() and not forced():
        _move_contents(earlier, folder)
        earlier.rmdir()
        return record, "finished" if record.finished else "resume"
    folder.mkdir(parents=True, exist_ok=True)
    return record, "new"


def _archive(root: Path, folder: Path, name: str) -> None:
    target = root / ARCHIVE / folder.relative_to(root) / name
    if target.exists():  # an earlier run of the very same identity: keep both
        target = target.with_name(f"{name}-{datetime.now():%Y%m%d%H%M%S}")
    _move_contents(folder, target)


def _move_contents(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name not in (".gitignore", LOCK):  # DVC's and ours: of the place and not of the run
            shutil.move(path, target / path.name)
