"""What is measured: a cell is one model on some of a host's devices, trained for STEPS optimizer steps.

`plan` lists cells, the most telling first. Written to a JSON file they run on a machine that has neither
params.yaml nor what reads it.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mdn.config import (
    STRATEGIES,
    ConfigError,
    Machine,
    Optimizer,
    Params,
    RunConfig,
    Shape,
    Training,
    check_machine,
    fingerprint,
)

STEPS = 30
PROFILED = 2  # further steps, under a profiler
MODELS = ("mdn", "gdn", "transformer")
SCALES = ("1b3", "400m")
DEVICES = (1, 2, 4, 8)
TOKENS = ("shards", "synthetic")  # through the loader, or one batch that lies on the device


@dataclass(frozen=True)
class Cell:
    """One measurement; its record is in runs/scaling-<scale>/<name>."""

    run: RunConfig
    machine: Machine
    tokens: str

    def __post_init__(self) -> None:
        if self.tokens not in TOKENS:
            raise ValueError(f"tokens: {self.tokens!r} is unknown; use {', '.join(TOKENS)}")
        check_machine(self.name, self.machine, self.run.training)

    @property
    def scale(self) -> str:
        return f"scaling-{self.run.scale}"

    @property
    def name(self) -> str:
        words = [self.run.name, f"n{self.machine.devices}", self.machine.strategy]
        words += [f"b{self.run.training.batch}", self.tokens]
        return "-".join([*words, *["compiled"] * self.machine.compile])

    def fingerprint(self) -> str:
        return fingerprint(self)

    def about(self) -> dict[str, Any]:
        """What tells the cell from its neighbours, for the report."""
        return {
            "model": self.run.name,
            "devices": self.machine.devices,
            "strategy": self.machine.strategy,
            "batch": self.run.training.batch,
            "context": self.run.training.context,
            "micro_batch": self.machine.micro_batch,
            "tokens": self.tokens,
            "compile": self.machine.compile,
        }


def plan(
    params: Params,
    scales: Sequence[str] = SCALES,
    models: Sequence[str] = MODELS,
    devices: Sequence[int] = DEVICES,
    sequences: int = 4,
    data: str | None = None,
) -> list[Cell]:
    """Cells of weak scaling (`sequences` a device) by DDP on real shards; then what changes one thing of it:
    strong scaling (the batch of all devices), FSDP2, torch.compile, synthetic tokens.

    data: token set, if not the scale's.

    Raises:
        ConfigError: for a scale or model that does not exist.
    """
    most = sequences * max(devices)
    found: dict[tuple[str, str], Cell] = {}
    changes: Iterable[dict[str, Any]] = (
        {},
        {"batch": most},
        *({"strategy": strategy} for strategy in reversed(STRATEGIES) if strategy != "ddp"),
        {"compile": True},
        {"tokens": "synthetic"},
    )
    for change in changes:
        for scale, name, count in _each(scales, models, devices):
            run = params.run(scale, name)
            made = cell(replace(run, data=data or run.data), count, sequences, **change)
            found.setdefault((made.scale, made.name), made)
    return list(found.values())


def _each(
    scales: Sequence[str], models: Sequence[str], devices: Sequence[int]
) -> Iterator[tuple[str, str, int]]:
    for scale in scales:
        for name in models:
            for count in sorted(devices):
                yield scale, name, count


def cell(
    run: RunConfig,
    devices: int,
    sequences: int,
    batch: int | None = None,
    strategy: str = "ddp",
    compile: bool = False,
    tokens: str = "shards",
) -> Cell:
    """sequences: at most so many on a device at once; batch: sequences of a step, if not those of all
    devices."""
    batch = batch or sequences * devices
    step = batch * run.training.context
    budget = replace(
        run.training,
        batch_tokens=step,
        tokens=(STEPS + PROFILED) * step,
        warmup_tokens=STEPS * step // 2,
        validate_every=2 * STEPS,
        validation_tokens=run.training.context,
    )
    machine = Machine(
        micro_batch=min(sequences, batch // devices), devices=devices, strategy=strategy, compile=compile
    )
    return Cell(replace(run, training=budget), machine, tokens)


def to_json(cells: list[Cell]) -> str:
    return json.dumps([asdict(cell) for cell in cells], indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str) -> list[Cell]:
    """The cells that `to_json` wrote.

    Raises:
        ValueError: if they are not, for example of an earlier version of this code.
    """
    try:
        return [_cell(raw) for raw in json.loads(text)]
    except (TypeError, KeyError) as error:
        raise ValueError(f"cells: not what this version writes ({error}); plan them again") from None


def read(path: Path) -> list[Cell]:
    if not path.exists():
        raise ConfigError(f"{path}: not found; write it with `python -m mdn.scaling plan`")
    return from_json(path.read_text())


def _cell(raw: dict[str, Any]) -> Cell:
    nested = {"shape": Shape, "optimizer": Optimizer, "training": Training}
    run = raw["run"] | {key: kind(**raw["run"][key]) for key, kind in nested.items()}
    return Cell(RunConfig(**run), Machine(**raw["machine"]), raw["tokens"])
