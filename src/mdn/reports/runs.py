"""Run folders as the report reads them. Nothing here computes or changes a result."""

import gzip
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mdn.config import Params
from mdn.tracking.record import ARCHIVE, Record


@dataclass(frozen=True)
class Run:
    """One training and its evaluations. state: absent, unfinished, failed or finished. campaign: the
    folder of results/ that it lies in, if it was made on another machine."""

    scale: str
    name: str
    state: str
    folder: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    failure: dict[str, Any] = field(default_factory=dict)
    mlflow: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)  # by suite
    metrics: dict[str, float] = field(default_factory=dict)
    campaign: str | None = None

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        return Record(self.folder).log()

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml as it was written: a run may be older than today's options."""
        found = OmegaConf.to_container(OmegaConf.create(self.config_text))
        return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}

    @property
    def title(self) -> str:
        """scale/model, also of a run in the archive, whose folder is called otherwise."""
        name = f"{self.config.get('scale', self.scale)}/{self.config.get('name', self.name)}"
        return name if self.folder.name == name.split("/")[1] else f"{name} ({self.folder.name[:12]})"

    @property
    def last_step(self) -> int:
        return int(self.log[-1]["step"]) if self.log else 0

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole training."""
        budget = self.config.get("training", {})
        return budget["tokens"] // budget["batch_tokens"] if budget else None

    @property
    def kernel(self) -> str | None:
        versions = self.manifest.get("kernels") or {}
        return ", ".join(f"{op}: {version}" for op, version in sorted(versions.items())) or None

    @property
    def hardware(self) -> str:
        """What it ran on, and whether alone; with the date, if not here."""
        name = self.manifest.get("gpu") or self.manifest.get("cpu") or ("CPU" if self.manifest else "")
        if (shared := self.manifest.get("gpu_shared_by", 1)) > 1:
            name += f" shared by {shared} trainings"
        return f"{name}, {self.manifest.get('started', 'no date')[:10]}" if self.campaign else name

    @property
    def commit(self) -> str | None:
        commit = self.manifest.get("commit")
        return f"{commit} + local changes" if commit and self.manifest.get("dirty") else commit

    def foreign(self, suite: str) -> bool:
        """Is an evaluation there that is of another training than the one beside it?"""
        evaluation = self.evaluations.get(suite, {})
        weights, identity = self.manifest.get("weights"), evaluation.get("identity")
        if evaluation and evaluation.get("fingerprint") != self.manifest.get("fingerprint"):
            return True
        return bool(weights and identity and not identity.startswith(f"{weights}-"))

    def samples(self, suite: str) -> list[dict[str, Any]]:
        """The rows that an evaluation of this training left beside its results.

        Raises:
            ValueError: if the file cannot be read; names it.
        """
        path = self.folder / "evaluation" / f"{suite}.samples.jsonl.gz"
        if self.state != "finished" or self.foreign(suite) or not path.exists():
            return []
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path}: not readable ({error}); repeat its stage") from None

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one quantity of the log; a value that was not finite is left out."""
        found = [(line["step"], line[key]) for line in self.log if isinstance(line.get(key), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]


def read_run(root: Path, scale: str, name: str, campaign: str | None = None) -> Run:
    """The run in `root/scale/name`; campaign: if `root` is a folder of results/, its name.

    Raises:
        ValueError: if one of its files is not what its name says; names the file.
    """
    folder = root / scale / name
    failure = _mapping(folder / "failed.json")
    manifest = _mapping(folder / "manifest.json")
    config = folder / "config.yaml"
    if failure:  # one that diverged has metrics.json too, of its last finite weights
        state = "failed"
    elif (folder / "metrics.json").exists():
        state = "unfinished" if manifest.get("cut") else "finished"
    else:
        state = "unfinished" if manifest else "absent"
    suites = sorted((folder / "evaluation").glob("*.json"))
    return Run(
        scale,
        name,
        state,
        folder,
        manifest,
        config.read_text() if config.exists() else "",
        failure,
        _mapping(folder / "mlflow.json"),
        {path.stem: _mapping(path) for path in suites},
        _mapping(folder / "metrics.json"),
        campaign,
    )


def read_runs(params: Params, root: Path, results: Path | None = None) -> dict[tuple[str, str], Run]:
    """By (scale, model), every model of params.yaml at every scale; by (mqar-<scale>, <model>/<cell>) and
    (efficiency-<scale>, <model>) and (scaling-<scale>, <cell>) those that have a record.

    What `root` lacks is taken from the folders of `results`, which are laid out like it: the last one by name
    that has it.
    """
    folders = sorted((path for path in results.glob("*") if path.is_dir()), reverse=True) if results else []
    roots: list[tuple[Path, str | None]] = [(root, None), *((path, path.name) for path in folders)]
    wanted = [(scale, name) for scale in params.scales for name in params.models]
    for at, _ in roots:
        for path in sorted(at.glob("mqar-*/*/*/manifest.json")):
            *_, scale, model, cell, _ = path.parts
            wanted.append((scale, f"{model}/{cell}"))
        for kind in ("efficiency", "scaling"):
            wanted += [path.parts[-3:-1] for path in sorted(at.glob(f"{kind}-*/*/manifest.json"))]  # type: ignore[misc]
    found = {(scale, name): read_run(root, scale, name) for scale, name in wanted}
    for at, campaign in roots[1:]:
        for (scale, name), run in found.items():
            if run.state == "absent":
                other = read_run(at, scale, name, campaign)
                found[scale, name] = run if other.state == "absent" else other
    return found


def recorded(root: Path) -> list[Run]:
    """Every training under `root`, those in the archive last."""
    found = [*sorted(root.glob("*/*/manifest.json")), *sorted((root / ARCHIVE).glob("*/*/*/manifest.json"))]
    places = [path.parent for path in found if "/efficiency-" not in path.as_posix()]
    return [read_run(place.parent.parent, place.parent.name, place.name) for place in places]


def active(params: Params, runs: dict[tuple[str, str], Run], scale: str) -> list[str]:
    """Models that are asked for at a scale, or have been run there."""
    wanted = params.runs.get(scale, {})
    return [name for name in params.models if name in wanted or runs[scale, name].state != "absent"]


def results(run: Run, suite: str) -> list[dict[str, Any]]:
    """The rows of a suite's evaluation of this very training; none if there is no such evaluation."""
    if run.state != "finished" or run.foreign(suite):
        return []
    return list(run.evaluations.get(suite, {}).get("results", []))


def _mapping(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); restore it or repeat its stage") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a mapping is wanted, found {type(value).__name__}; repeat its stage")
    return value
