"""One cell from data to record, on one device: adopt, resume or begin; train; ask the test's questions.

As Zoology trains: AdamW with weight decay 0.1, a cosine over epochs down to zero, batches of one length, an
end as soon as validation accuracy passes a threshold. Ours beside it: gradients are clipped at 1 and a step
without a finite gradient changes nothing, as in the language models' training; no dropout on the embedding;
validation asks what the test asks, of other examples, so that the test chooses neither learning rate nor end.

B batch · T tokens · P pairs · D width · V vocabulary
"""

import math
import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdn.files import locked
from mdn.models.lm import LanguageModel
from mdn.models.loss import cross_entropy
from mdn.mqar.cells import Cell
from mdn.mqar.data import Recall, batches, open_split, read_index
from mdn.tracking.manifest import code_digest, environment
from mdn.tracking.record import LOCK, Record, open_record, write_json
from mdn.training import checkpoint
from mdn.training.optim import build_optimizer
from mdn_kernels.registry import loaded

CLIP = 1.0
LOG_EVERY = 50  # steps of a line in log.jsonl
MAX_SKIPPED = 10  # steps in a row without a finite gradient, after which a training counts as diverged
EVALUATION_TOKENS = 2**16  # of a forward pass
FIRST_RESERVE = 30.0  # seconds kept for the test before any evaluation has been timed


def build(cell: Cell) -> LanguageModel:
    """The language model of the main runs without MLPs and, as in Zoology, with one matrix for embedding and
    head. Initial values are drawn on the CPU, from torch's global generator."""
    model = LanguageModel(cell.run(), cell.data.vocabulary)
    model.head.weight = model.embedding.weight
    return model


def learning_rate(cell: Cell, epoch: int) -> float:
    """Of epoch 0, 1, …: a cosine from the peak that would be zero after the last epoch."""
    return cell.lr * 0.5 * (1 + math.cos(math.pi * epoch / cell.training.epochs))


def answers(model: LanguageModel, ids_BT: Tensor, queries_BP: Tensor) -> Tensor:
    """Hidden states at the queries, [B, P, D]: the head has nothing to say elsewhere."""
    hidden_BTD, _ = model.hidden(ids_BT)
    return hidden_BTD.gather(1, queries_BP[..., None].expand(-1, -1, hidden_BTD.shape[-1]))


def autocast(device: torch.device) -> AbstractContextManager:
    """bfloat16 on a GPU, float32 on a CPU, as the language models are trained."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def accuracy(model: LanguageModel, parts: list[Recall], device: torch.device) -> dict[str, float]:
    """The share of queries whose answer is the most likely token, by part (`512x32`: tokens, pairs)."""
    found = {}
    for part in parts:
        size = max(1, EVALUATION_TOKENS // part.ids_NT.shape[1])
        right = torch.zeros((), dtype=torch.long, device=device)
        for start in range(0, len(part), size):
            ids_BT, queries_BP, answers_BP = _on(device, part, slice(start, start + size))
            with autocast(device):
                hidden_BPD = answers(model, ids_BT, queries_BP)
            logits_BPV = model.head(hidden_BPD.float())  # bfloat16 would make ties of what is close
            right += (logits_BPV.argmax(-1) == answers_BP).sum()
        found[part.name] = right.item() / part.answers_NP.size
    return found


def _on(device: torch.device, part: Recall, rows: slice | np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    arrays = (part.ids_NT[rows], part.queries_NP[rows], part.answers_NP[rows])
    ids, queries, wanted = (torch.from_numpy(np.array(array)).to(device).long() for array in arrays)
    return ids, queries, wanted


def mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)


@dataclass
class Progress:
    """Where a training stands; all of it is in a checkpoint."""

    step: int = 0
    seconds: float = 0.0  # of training, without evaluations
    validation: float = 0.0
    evaluation_seconds: float = 0.0  # of the last validation
    skipped: int = 0
    skipped_in_a_row: int = 0
    first_nonfinite: int | None = None
    window: list[tuple[float, float]] = field(default_factory=list)  # (loss, norm) since the last log line


class OutOfTime(Exception):
    """The time limit is near: what is left is for the test."""


class Diverged(Exception):
    """No finite gradient for MAX_SKIPPED steps in a row. A result, not a crash."""


def train(cell: Cell, *, runs: Path, data: Path, deadline: float = math.inf) -> Record:
    """Trains a cell on the folder `data` that `mdn.mqar.data.prepare` made, and returns its record in `runs`.

    deadline: the time (as time.time() tells it) by which the record has to be complete. A training that it
    cuts short is tested as it stands, says so in its manifest (`cut`) and goes on from its checkpoint when it
    is called again. A divergence ends with failed.json and the test of the last finite weights.

    Raises:
        Busy: before anything is written, if another process trains this cell.
    """
    with locked(runs / cell.scale / cell.name / LOCK, wait=False):
        return _train(cell, runs, data, deadline)


def _train(cell: Cell, runs: Path, data: Path, deadline: float) -> Record:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(cell.seed)
    model = build(cell).to(device)
    _rehearse(cell, model, open_split(data, cell.data, "validation"), device)
    index = read_index(data)
    code, digest = code_digest(), index["digest"][:12]
    record, todo = open_record(runs, cell, data=digest, code=code)
    if todo == "finished":
        print(f"{record.folder}: finished with the same configuration, data and code; adopted", flush=True)
        return record
    (record.folder / "failed.json").unlink(missing_ok=True)
    (record.folder / "metrics.json").unlink(missing_ok=True)
    training = _Training(cell, model, device, record, data, deadline)
    training.resume()
    manifest = _describe(record, cell, model, {"data": digest, "code": code})
    cut = None
    try:
        training.run()
    except OutOfTime:
        cut = f"stopped by the time limit after epoch {training.epochs:.2f} of {cell.training.epochs}"
    except Diverged as error:
        training.validate()
        write_json(record.folder / "failed.json", {"error": str(error), "step": training.at.step})
    training.finish(manifest, cut)
    return record


class _Training:
    def __init__(
        self,
        cell: Cell,
        model: LanguageModel,
        device: torch.device,
        record: Record,
        data: Path,
        deadline: float,
    ):
        self.cell, self.model, self.device, self.record = cell, model, device, record
        self.splits = {split: open_split(data, cell.data, split) for split in ("train", "validation", "test")}
        self.optimizer = build_optimizer(model, cell.run())
        self.deadline = deadline
        self.at = Progress()
        self.per_epoch = sum(-(-len(part) // cell.training.batch) for part in self.splits["train"])
        tokens = {split: sum(part.ids_NT.size for part in parts) for split, parts in self.splits.items()}
        self.test_share = tokens["test"] / tokens["validation"]

    @property
    def epochs(self) -> float:
        return self.at.step / self.per_epoch

    def resume(self) -> None:
        """From the newest checkpoint, if there is one."""
        found = checkpoint.newest(self.record.checkpoints)
        self.record.rewind(found[0] if found else 0)
        if found is None:
            return
        state = torch.load(found[1], map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.at = Progress(**state["progress"])
        print(f"{self.record.folder}: resuming after epoch {self.epochs:.2f}", flush=True)

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.at),
        }
        checkpoint.save(self.record.checkpoints, self.at.step, lambda path: torch.save(state, path), keep=1)

    def run(self) -> None:
        """Epochs from where the training stands until accuracy or their number ends them."""
        protocol = self.cell.training
        ended = self.at.step > 0 and self.at.step % self.per_epoch == 0
        if ended and self.at.validation > protocol.stop_above:
            return
        for epoch in range(self.at.step // self.per_epoch, protocol.epochs):
            self.epoch(epoch)
            self.validate()
            self.save()
            if self.at.validation > protocol.stop_above:
                return

    def epoch(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.cell, epoch)
        order = batches(self.splits["train"], self.cell.training.batch, self.cell.seed, epoch)
        for part, rows in order[self.at.step % self.per_epoch :]:
            if time.time() > self.deadline - self.reserve():
                self.save()
                self.validate()
                raise OutOfTime
            started = time.perf_counter()
            self.step(*_on(self.device, self.splits["train"][part], rows))
            self.at.seconds += time.perf_counter() - started
            if len(self.at.window) == LOG_EVERY:
                self.log()
            if self.at.skipped_in_a_row == MAX_SKIPPED:
                raise Diverged(
                    f"no finite gradient in {MAX_SKIPPED} steps in a row, up to step {self.at.step}"
                )

    def step(self, ids_BT: Tensor, queries_BP: Tensor, answers_BP: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device):
            loss = cross_entropy(answers(self.model, ids_BT, queries_BP), self.model.head.weight, answers_BP)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.at.step += 1
        values = torch.stack([loss.detach(), norm]).tolist()  # waits for the device once
        self.at.window.append((values[0], values[1]))
        if math.isfinite(values[1]):
            self.optimizer.step()
            self.at.skipped_in_a_row = 0
            return
        if self.at.first_nonfinite is None:
            self.at.first_nonfinite = self.at.step
            self.record.append(self.at.step, {"train/first_nonfinite_step": self.at.step})
        self.at.skipped += 1
        self.at.skipped_in_a_row += 1

    def log(self) -> None:
        """Mean loss, mean and largest gradient norm of the steps since the last line."""
        if not self.at.window:
            return
        losses, norms = zip(*self.at.window, strict=True)
        self.record.append(
            self.at.step,
            {
                "train/loss": sum(losses) / len(losses),
                "train/grad_norm": sum(norms) / len(norms),
                "train/grad_norm_max": max(norms, key=lambda x: x if math.isfinite(x) else math.inf),
                "train/lr": self.optimizer.param_groups[0]["lr"],
                "train/skipped": self.at.skipped,
            },
        )
        self.at.window.clear()

    def validate(self) -> None:
        self.log()
        started = time.perf_counter()
        found = accuracy(self.model, self.splits["validation"], self.device)
        self.at.validation, self.at.evaluation_seconds = mean(found), time.perf_counter() - started
        self.record.append(self.at.step, {"validation/accuracy": mean(found), **_named("validation/", found)})
        print(
            f"{self.cell.name}: epoch {self.epochs:.2f} of {self.cell.training.epochs}, "
            f"{self.at.seconds / max(1e-9, self.epochs):.1f} s an epoch, validation {mean(found):.4f}",
            flush=True,
        )

    def reserve(self) -> float:
        """Seconds that a last validation and the test may take, from how long the last validation took."""
        if not self.at.evaluation_seconds:
            return FIRST_RESERVE
        return 5 + 1.5 * (1 + self.test_share) * self.at.evaluation_seconds

    def finish(self, manifest: dict[str, Any], cut: str | None) -> None:
        """The test, then the manifest, and last of all metrics.json, which marks the record as complete."""
        self.log()
        started = time.perf_counter()
        found = accuracy(self.model, self.splits["test"], self.device)
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        metrics = {
            "steps": self.at.step,
            "epochs": self.epochs,
            "seconds": self.at.seconds,
            "test_seconds": time.perf_counter() - started,
            "skipped_steps": self.at.skipped,
            "validation/accuracy": self.at.validation,
            "test/accuracy": mean(found),
            **_named("test/", found),
        }
        if memory:
            metrics["peak_memory_gib"] = memory / 2**30
        if self.at.first_nonfinite is not None:
            metrics["first_nonfinite_step"] = self.at.first_nonfinite
        write_json(self.record.folder / "manifest.json", manifest | {"finished": _now(), "cut": cut})
        self.record.finish(metrics)
        if cut is None:
            shutil.rmtree(self.record.checkpoints, ignore_errors=True)
        hardest = list(found)[-1]
        print(
            f"{self.cell.name}: test {mean(found):.4f}, at {hardest} {found[hardest]:.4f}"
            + (f"; {cut}" if cut else ""),
            flush=True,
        )


def _named(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in values.items()}


def _rehearse(cell: Cell, model: LanguageModel, parts: list[Recall], device: torch.device) -> None:
    """A batch of every length: what cannot run fails here; operators' modules are loaded, so that the code
    digest covers them; kernels are compiled and tuned, so that the first evaluation is timed without it."""
    n = cell.training.batch
    some = [Recall(part.ids_NT[:n], part.queries_NP[:n], part.answers_NP[:n]) for part in parts]
    accuracy(model, some, device)


def _describe(record: Record, cell: Cell, model: LanguageModel, digests: dict[str, str]) -> dict[str, Any]:
    """config.yaml (JSON, which YAML includes) and manifest.json, before the first step; returns the
    latter."""
    write_json(record.folder / "config.yaml", asdict(cell))
    scale = cell.scale.removeprefix("mqar-")
    manifest = {
        "command": f"python -m mdn.mqar plan --scale {scale} --cell {cell.name} | python -m mdn.mqar run -",
        "fingerprint": cell.fingerprint(),
        **digests,
        "kernels": {version.op: version.name for version in loaded()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": None,  # not kept
        "started": _now(),
        **environment(),
    }
    write_json(record.folder / "manifest.json", manifest)
    return manifest


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
