"""The record of a run's measurements: a run folder without weights.

log.jsonl       a line a sample: {"step": 7, "round": 1, "train/4x4096/seconds": 0.35, …}
metrics.json    their medians, and of seconds p20 and p80; of trainings tokens/s and utilisation
manifest.json   as of a training, and `failures`: cell -> reason
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from mdn.config import RunConfig
from mdn.tracking.record import Record, open_record, write_json

CUT = "not everything is measured yet"
TRAININGS = ("train", "loader", "compiled")


def measured(record: Record, cell: str, number: int) -> bool:
    """Has the cell its samples of a round?"""
    return any(line["round"] == number and f"{cell}/seconds" in line for line in record.log())


def add(record: Record, cell: str, number: int, samples: Iterable[Mapping[str, float]]) -> None:
    """The samples of a round."""
    log = record.log()
    for step, sample in enumerate(samples, len(log) + 1):
        record.append(step, {"round": number, **{f"{cell}/{name}": value for name, value in sample.items()}})


def summarize(record: Record, cell: str, flops: int, peak: float | None) -> dict[str, float]:
    """What metrics.json says of a cell. flops: of a trained token; peak: FLOP/s of the device, if known."""
    samples: dict[str, list[float]] = {}
    for line in record.log():
        for name, value in line.items():
            if name.startswith(f"{cell}/"):
                samples.setdefault(name, []).append(value)
    found = {name: median(values) for name, values in samples.items()}
    seconds = samples[f"{cell}/seconds"]
    p20, *_, p80 = quantiles(seconds, n=5, method="inclusive") if len(seconds) > 1 else seconds * 2
    found |= {f"{cell}/seconds_p20": p20, f"{cell}/seconds_p80": p80, f"{cell}/samples": len(seconds)}
    kind, shape = cell.split("/")
    if kind in TRAININGS:
        B, T = map(int, shape.split("x"))
        speed = found[f"{cell}/tokens_per_second"] = B * T / found[f"{cell}/seconds"]
        if peak:
            found[f"{cell}/mfu"] = speed * flops / peak
    return found


def update(record: Record, figures: Mapping[str, float]) -> None:
    """Adds figures to metrics.json."""
    known: dict[str, float] = record.metrics if (record.folder / "metrics.json").exists() else {}
    record.finish({**known, **figures})


def begin(runs: Path, run: RunConfig, code: str, about: Mapping[str, Any]) -> Record:
    """The record of a run; one of other code or another configuration moves to the archive, finished or not:
    times of two codes must not mix."""
    data = f"random-{code}"  # an unfinished record is continued where its data are the same
    record, todo = open_record(runs, run, data=data, code=code)
    if todo == "new":
        write_json(record.folder / "config.yaml", asdict(run))
        manifest: dict[str, Any] = {
            "fingerprint": run.fingerprint(),
            "data": data,
            "code": code,
            "weights": None,
        }
        manifest |= {"cut": CUT, "failures": {}, "started": now(), **about}
        write_json(record.folder / "manifest.json", manifest)
    return record


def fail(record: Record, cells: Iterable[str], reason: str) -> None:
    """The first reason of a cell stays."""
    manifest = record.manifest
    failures = dict.fromkeys(cells, reason) | manifest["failures"]
    write_json(record.folder / "manifest.json", manifest | {"failures": failures})


def forgive(record: Record) -> None:
    """What failed in an earlier call may be tried again."""
    if (record.folder / "manifest.json").exists() and record.manifest["failures"]:
        write_json(record.folder / "manifest.json", record.manifest | {"failures": {}, "cut": CUT})


def finish(record: Record, missing: int) -> None:
    """missing: cells that a deadline has left out."""
    cut = f"the deadline left out {missing} of its cells" if missing else None
    write_json(record.folder / "manifest.json", record.manifest | {"finished": now(), "cut": cut})


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
