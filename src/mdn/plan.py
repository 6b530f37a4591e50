"""Tables of `mdn plan`: what the models of a scale cost before anything is spent."""

from collections.abc import Callable, Iterable
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
        f"{scale.title}: {budget.tokens / 1e9:,.4g}B tokens = {budget.steps:,} steps of "
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
        "GPU-hours by --throughput, a run of this scale on GPUs, or what mdn.scaling measured on one host"
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


def measured(runs: Path, run: RunConfig) -> float | None:
    """Tokens/s of a GPU in this cell's record; None if it has none, or was trained on a CPU."""
    record = Record(runs / run.scale / run.name)
    if not record.finished or not record.manifest.get("gpu"):
        return None
    return record.manifest["tokens_per_second"] / record.manifest["ranks"]


def scaled(roots: Iterable[Path], run: RunConfig, machine: Machine) -> float | None:
    """Tokens/s of a GPU that `python -m mdn.scaling` measured with as many devices of a host, by the same
    strategy; None if it has not. roots: folders of records, the first one that has it counts."""
    for root in roots:
        speeds = []
        for path in root.glob(f"scaling-{run.scale}/{run.name}-n{machine.devices}-*/metrics.json"):
            cell = read_json(path.with_name("manifest.json"))["cell"]
            same = all(cell[name] == getattr(machine, name) for name in ("devices", "strategy", "compile"))
            if cell["model"] == run.name and cell["tokens"] == "shards" and same:
                speeds.append(read_json(path)["tokens_per_second"] / machine.devices)
        if speeds:
            return max(speeds)  # of weak and strong scaling
    return None


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
