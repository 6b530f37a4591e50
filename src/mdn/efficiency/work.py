"""The process that measures: one turn after another until all are done or time is up."""

import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from mdn.config import Machine, RunConfig
from mdn.efficiency.cells import Part, Plan
from mdn.efficiency.measure import MEASUREMENTS
from mdn.efficiency.records import add, begin, fail, measured, summarize, update
from mdn.mixers import mixer_class
from mdn.models.cost import flops_per_token, parameters, peak_flops
from mdn.models.memory import training_bytes
from mdn.pattern import parse
from mdn.tracking.manifest import environment, source_digest
from mdn.tracking.record import Record
from mdn_kernels.registry import select

LAST_TURN = 8.0  # seconds before the deadline after which none begins
CODE = ("mdn_kernels", "mdn.mixers", "mdn.models", "mdn.efficiency")


class Turn(NamedTuple):
    part: Part
    run: RunConfig
    round: int


def turns(plan: Plan) -> Iterator[Turn]:
    by_name = {run.name: run for run in plan.runs}
    for part in plan.parts:
        for number in range(part.rounds):
            for name in part.models:
                yield Turn(part, by_name[name], number)


def work(plan: Plan, *, runs: Path, at: Path, deadline: float) -> None:
    """Measures what is missing. at: a file that says at any time which cells are at hand; deadline: after
    which no turn begins, as time.time() tells it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        from mdn_kernels.common.tuning import tune_quickly

        tune_quickly()
    code, told = source_digest(*CODE), environment()
    records = {run.name: begin(runs, run, code, _about(run, device) | told) for run in plan.runs}
    for turn in turns(plan):
        record = records[turn.run.name]
        failures = record.manifest["failures"]
        missing = [
            shape
            for shape in turn.part.shapes
            if (cell := turn.part.cell(shape)) not in failures and not measured(record, cell, turn.round)
        ]
        if missing and time.time() < deadline - LAST_TURN:
            gc.collect()  # of the turn before
            take(turn, missing, record, device, at)
    at.unlink(missing_ok=True)


def take(turn: Turn, shapes: list[tuple[int, int]], record: Record, device: torch.device, at: Path) -> None:
    """One turn of a model. What fails is noted, the rest measured; a broken device ends the process."""
    hand = [turn.part.cell(shape) for shape in shapes]
    measurement = None
    flops = {T: flops_per_token(turn.run, T) for _, T in shapes}
    for shape in shapes:
        at.write_text(json.dumps({"run": turn.run.name, "cells": hand}))
        try:
            if measurement is None:
                measurement = MEASUREMENTS[turn.part.kind](turn.run, device)
            hand = [turn.part.cell(shape)]
            add(record, hand[0], turn.round, list(measurement.samples(*shape, turn.part.samples)))
            figures = summarize(record, hand[0], flops[shape[1]], peak_flops(device))
            if turn.part.kind == "train":
                figures[f"{hand[0]}/estimated_gib"] = _estimated_gib(turn.run, *shape)
            update(record, figures)
            print(f"{turn.run.name:18}{hand[0]:20}{_told(hand[0], figures)}", flush=True)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            print(f"{turn.run.name}: {', '.join(hand)}: {reason}", file=sys.stderr, flush=True)
            fail(record, hand, reason)
            if "CUDA error" in reason:
                sys.exit(1)
            if measurement is None:
                return


def _estimated_gib(run: RunConfig, B: int, T: int) -> float:
    """What `mdn plan` says of such a step's memory."""
    run = replace(run, training=replace(run.training, context=T))
    return training_bytes(run, Machine(micro_batch=B))["total"] / 2**30


def _about(run: RunConfig, device: torch.device) -> dict:
    scale = run.scale.removeprefix("efficiency-")
    model = run.name if run.kernel == "auto" else f"{run.name.removesuffix(f'-{run.kernel}')}:{run.kernel}"
    plan = f"python -m mdn.efficiency plan --scale {scale} --models {model}"
    return {
        "command": f"{plan} | python -m mdn.efficiency run -",
        "parameters": parameters(run)["total"],
        "kernels": _kernels(run, device),
    }


def _kernels(run: RunConfig, device: torch.device) -> dict[str, str]:
    """The operators' versions that train the run here; none where none fits, which its first turn tells."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = None if run.kernel == "auto" else run.kernel
    found = {}
    for op in filter(None, (mixer_class(name).op for name in parse(run.pattern))):
        try:
            found[op] = select(op, kernel, device, dtype, 2, run.shape.head_k, run.shape.head_v).name
        except ValueError:
            continue
    return found


def _told(cell: str, figures: dict[str, float]) -> str:
    forms = {
        "seconds": lambda x: f"{x * 1e3:.4g} ms",
        "tokens_per_second": "{:,.0f} tokens/s".format,
        "mfu": "MFU {:.3f}".format,
        "peak_gib": "{:.1f} GiB".format,
    }
    return ", ".join(form(figures[f"{cell}/{x}"]) for x, form in forms.items() if f"{cell}/{x}" in figures)
