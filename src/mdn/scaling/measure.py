"""One cell on its ranks: the training's own code for STEPS steps, and what its log does not tell."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mdn.config import RunConfig
from mdn.data.shards import read_index
from mdn.models.lm import GPT2_VOCABULARY, build
from mdn.scaling.cells import PROFILED, STEPS, Cell
from mdn.tracking.manifest import code_digest, environment
from mdn.tracking.record import Record, open_record, write_json
from mdn.training import launch
from mdn.training.callbacks import WARM_UP, Recorder, completes_a_step
from mdn.training.datamodule import TokenData
from mdn.training.lit import LitLanguageModel
from mdn.training.train import quiet, rehearse, trainer_for
from mdn_kernels.registry import loaded

Span = tuple[float, float]  # begin and end


def measure(cell: Cell, *, runs: Path, tokens: Path) -> None:
    """Trains the cell and writes its record. Every rank calls it, after `launch.enter`."""
    with launch.group():
        _measure(cell, runs, tokens)


def _measure(cell: Cell, runs: Path, tokens: Path) -> None:
    quiet()
    run, machine = cell.run, cell.machine
    record, todo = launch.share(lambda: _open(cell, runs, tokens))
    if todo == "finished":
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    L.seed_everything(run.seed, verbose=False)
    model = build(run, device)
    rehearse(model, run, machine, device)
    module = LitLanguageModel(model, run, machine, launch.StopRequest())
    data = TokenData(run, machine, tokens) if cell.tokens == "shards" else Synthetic(run, machine.micro_batch)
    watch = Watch()
    trainer_for(run, machine, [Recorder(record, run), watch]).fit(module, datamodule=data)
    # Not module.device: after a training Lightning has its module on the CPU, of which NCCL knows nothing.
    wait, peak = _most([mean(watch.waits[WARM_UP:STEPS]), watch.peak], device)
    if not launch.leads():
        return
    figures = {"data_wait": wait, **communication(watch.spans, watch.seconds), **summary(record.log())}
    if device.type == "cuda":
        figures["peak_gib"] = peak / 2**30
    kernels = {version.op: version.name for version in loaded()}
    write_json(record.folder / "manifest.json", record.manifest | {"kernels": kernels, "finished": _now()})
    record.finish(figures)


def _open(cell: Cell, runs: Path, tokens: Path) -> tuple[Record, str]:
    data = read_index(tokens / cell.run.data)["digest"][:12] if cell.tokens == "shards" else cell.tokens
    record, todo = open_record(runs, cell, data=data, code=(code := code_digest()))
    if todo != "finished":
        record.rewind(0)
        (record.folder / "failed.json").unlink(missing_ok=True)
        config = asdict(replace(cell.run, scale=cell.scale, name=cell.name))
        write_json(record.folder / "config.yaml", config | {"machine": asdict(cell.machine)})
        manifest = {"fingerprint": cell.fingerprint(), "data": data, "code": code, "weights": None}
        manifest |= {"cell": cell.about(), "started": _now(), **environment()}
        write_json(record.folder / "manifest.json", manifest)
    return record, todo


class Synthetic(L.LightningDataModule):
    """One batch of random tokens, on the device already, again and again: no loader."""

    waited = 0.0

    def __init__(self, run: RunConfig, micro_batch: int) -> None:
        super().__init__()
        self.seed, self.shape = run.seed, (micro_batch, run.training.context + 1)

    def train_dataloader(self) -> Iterable[dict[str, torch.Tensor]]:
        assert self.trainer is not None
        generator = torch.Generator().manual_seed(self.seed + self.trainer.global_rank)
        tokens = torch.randint(GPT2_VOCABULARY, self.shape, generator=generator)
        tokens = tokens.to(self.trainer.strategy.root_device)
        return itertools.repeat({"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})


class Watch(Callback):
    """Of this rank: waits for data, the most memory, and a profile of the steps behind the timed ones."""

    def __init__(self) -> None:
        self.waits: list[float] = []  # shares of each step
        self.peak = 0.0  # bytes
        self.seconds = 0.0  # of the profiled steps
        self.spans: list[tuple[str, Span]] = []  # what ran on the device then
        self._profile: profile | None = None

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not completes_a_step(trainer, batch_idx):
            return
        self.waits.append(module.last["train/data_wait"])
        on_gpu = module.device.type == "cuda"
        if trainer.global_step == STEPS:
            if on_gpu:
                self.peak = torch.cuda.max_memory_allocated()
            self._profile = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
            self._profile.start()
        elif trainer.global_step == STEPS + PROFILED and self._profile is not None:
            if on_gpu:
                torch.cuda.synchronize()
            self._profile.stop()
            kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
            self.spans = [
                (event.name, (event.time_range.start / 1e6, event.time_range.end / 1e6))
                for event in self._profile.events()
                # Gloo's messages are annotations; on a GPU those span whole parts of the training.
                if event.device_type == kind and not (on_gpu and event.is_user_annotation)
            ]
            ends = [end for _, (_, end) in self.spans]
            self.seconds = max(ends) - min(begin for _, (begin, _) in self.spans)


def communication(spans: Iterable[tuple[str, Span]], seconds: float) -> dict[str, float]:
    """Shares of `seconds` in which messages were under way, and in which nothing else ran meanwhile."""
    named = list(spans)
    talk = [span for name, span in named if name.startswith(("nccl", "gloo:"))]
    work = [span for name, span in named if not name.startswith(("nccl", "gloo:"))]
    if not seconds:
        return {}
    both = covered(talk + work)
    return {
        "communication": covered(talk) / seconds,
        "communication_alone": (both - covered(work)) / seconds,
    }


def covered(spans: Iterable[Span]) -> float:
    """The length of what intervals cover together."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def summary(log: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the timed steps without the first ones, and the loss of the last."""
    lines = log[:STEPS]
    names = {"train/tokens_per_second": "tokens_per_second", "train/mfu": "mfu"}
    found = {
        name: median(line[key] for line in lines[WARM_UP:]) for key, name in names.items() if key in lines[-1]
    }
    loss = lines[-1]["train/loss"]
    return found | ({"loss": loss} if isinstance(loss, float) else {})


def _most(values: list[float], device: torch.device) -> list[float]:
    """The largest of each over all ranks."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    if launch.grouped():
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.tolist()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
