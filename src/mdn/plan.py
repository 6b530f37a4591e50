"""Tables of `mdn plan`: what the models of a scale cost before anything is spent."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from mdn.config import Machine, Params, RunConfig, Scale, check_machine
from mdn.models.cost import flops_per_token, parameters, state_bytes
from mdn.models.memory import fitting, training_bytes
from mdn.tracking.record import Record, read_json

GIB = 2**30
CHECKPOINT = 12  # bytes a parameter: float32 weights and AdamW's two moments
WEIGHTS = 4


class Needs(NamedTuple):
    table: Table
    remedies: list[str]  # for models that do not fit


def costs(scale: Scale, runs: list[RunConfig]) -> Table:
    """What a model costs wherever it is trained."""
    budget = scale.training
    table = _table(
        f"{scale.title}: {budget.tokens:,} tokens = {budget.steps:,} steps of "
        f"{budget.batch_tokens:,} ({budget.batch:,} sequences of {budget.context:,})",
        ["parameters", "outside\nvocabulary", "FLOPs\na token", "FLOPs\nin all", "decoding\nstate"],
    )
    for run in runs:
        parts, flops = parameters(run), flops_per_token(run, budget.context)
        table.add_row(
            run.name,
            f"{parts['total'] / 1e6:,.1f} M",
            f"{(parts['total'] - parts['embedding'] - parts['head']) / 1e6:,.1f} M",
            f"{flops / 1e9:.3g} G",
            f"{flops * budget.tokens:.2e}",
            f"{state_bytes(run, budget.context) / 2**20:,.3g} MiB",
        )
    return table


def machine(params: Params, scale: str, nodes: int | None) -> Machine:
    """The machine of a scale, with another number of nodes if one is given.

    Raises:
        ConfigError: if the batch cannot be spread over them.
    """
    at = params.scales[scale]
    if nodes is None:
        return at.machine
    launcher = "slurm" if nodes > 1 and at.machine.launcher == "local" else at.machine.launcher
    changed = replace(at.machine, nodes=nodes, launcher=launcher)
    check_machine(f"scales.{scale}.machine", changed, at.training)
    return changed


def needs(
    scale: Scale,
    machine: Machine,
    runs: list[RunConfig],
    available: int,
    speed: Callable[[RunConfig], float | None],
) -> Needs:
    """What a training needs of this machine. available: bytes of a GPU; speed: tokens/s of one, if known."""
    budget, ranks = scale.training, machine.devices * machine.nodes
    table = _table(
        f"on {machine.nodes} × {machine.devices} GPUs of {available / GIB:,.0f} GiB, {machine.strategy}, "
        f"micro_batch {machine.micro_batch}"
        + ", activation checkpointing"
        * machine.activation_checkpointing,
        [
            "weights,\noptimizer",
            "activa-\ntions",
            "GiB\na GPU",
            "fits",
            "GPU-\nhours",
            "days",
            "check-\npoints",
        ],
    )
    table.caption = (
        f"estimates in GiB; tokens on disk: {budget.tokens * 2 / GIB:,.3g} GiB;\n"
        "GPU-hours and days where a throughput was measured, or is given: --throughput"
    )
    remedies: dict[str, list[str]] = {}
    for run in runs:
        parts = training_bytes(run, machine)
        total, rate = parameters(run)["total"], speed(run)
        disk = (CHECKPOINT * (machine.keep_checkpoints + 1) + WEIGHTS) * total
        state = parts["weights"] + parts["gradients"] + parts["optimizer"]
        hours = budget.tokens / rate / 3600 if rate else None
        fits = parts["total"] <= available
        if not fits:
            found = fitting(run, machine, available)
            remedy = _changes(machine, found) if found else "more devices, and strategy: fsdp"
            remedies.setdefault(remedy, []).append(run.name)
        table.add_row(
            run.name,
            f"{state / GIB:,.1f}",
            f"{parts['activations'] / GIB:,.1f}",
            f"{parts['total'] / GIB:,.1f}",
            "yes" if fits else "no",
            f"{hours:,.0f}" if hours else "",
            f"{hours / ranks / 24:,.1f}" if hours else "",
            f"{disk / GIB:,.3g}",
        )
    lines = [f"does not fit: {', '.join(names)}; use {remedy}" for remedy, names in remedies.items()]
    return Needs(table, lines)


class Step(NamedTuple):
    """A training step that `mdn.efficiency` has measured on one GPU."""

    gpu: str
    shape: str  # sequences x tokens
    tokens_per_second: float
    peak_gib: float
    estimated_gib: float  # by this project when it was measured

    def __str__(self) -> str:
        shape = self.shape.replace("x", " × ")
        return (
            f"{shape} on {self.gpu}: {self.tokens_per_second:,.0f} tokens/s, {self.peak_gib:.1f} GiB "
            f"(estimated {self.estimated_gib:.1f})"
        )


def measured(runs: Path, run: RunConfig, results: Path, machine: Machine) -> float | None:
    """Tokens/s of a GPU: of this cell's own training on GPUs, of a host like the machine's, or else of a
    single one; None: none was measured."""
    record = Record(runs / run.scale / run.name)
    if record.finished and record.manifest.get("gpu"):
        return record.manifest["tokens_per_second"] / record.manifest["ranks"]
    roots = _roots(runs, results)
    if speed := next(filter(None, (_scaled(root, run, machine) for root in roots)), None):
        return speed
    step = measured_step(runs, run, results)
    return step.tokens_per_second if step else None


def measured_step(runs: Path, run: RunConfig, results: Path) -> Step | None:
    """At the scale's context, of the most sequences; from `runs` or the latest campaign in `results`."""
    for root in _roots(runs, results):
        record = Record(root / f"efficiency-{run.scale}" / run.name)
        if not (record.folder / "metrics.json").exists() or not record.manifest.get("gpu"):
            continue
        figures = record.metrics
        steps = [key.split("/")[1] for key in figures if re.fullmatch(r"train/\d+x\d+/peak_gib", key)]
        batches = [int(B) for B, T in (step.split("x") for step in steps) if int(T) == run.training.context]
        if batches:
            shape = f"{max(batches)}x{run.training.context}"
            names = ("tokens_per_second", "peak_gib", "estimated_gib")
            return Step(record.manifest["gpu"], shape, *(figures[f"train/{shape}/{name}"] for name in names))
    return None


def _scaled(root: Path, run: RunConfig, machine: Machine) -> float | None:
    """Tokens/s of a GPU that `mdn.scaling` measured with as many devices of a host, by the same strategy; the
    better of weak and strong scaling."""
    speeds = []
    for path in root.glob(f"scaling-{run.scale}/{run.name}-n{machine.devices}-*/metrics.json"):
        cell = read_json(path.with_name("manifest.json"))["cell"]
        same = all(cell[name] == getattr(machine, name) for name in ("devices", "strategy", "compile"))
        if cell["model"] == run.name and cell["tokens"] == "shards" and same:
            speeds.append(read_json(path)["tokens_per_second"] / machine.devices)
    return max(speeds, default=None)


def _roots(runs: Path, results: Path) -> list[Path]:
    return [runs, *sorted(results.glob("*"), reverse=True)]


def _changes(before: Machine, after: Machine) -> str:
    names = ("strategy", "activation_checkpointing", "micro_batch")
    changed = [
        (name, getattr(after, name)) for name in names if getattr(after, name) != getattr(before, name)
    ]
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in changed)


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title)
    table.add_column("model", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
