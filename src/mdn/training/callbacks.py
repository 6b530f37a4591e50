"""What happens around the steps: the record, checkpoints, the progress bar."""

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mdn.config import Machine
from mdn.tracking.record import Record
from mdn.training import checkpoint

WARM_UP = 3  # steps left out of a throughput: allocation, compilation, caches


def _completes_a_step(trainer: L.Trainer, batch: int) -> bool:
    return (batch + 1) % trainer.accumulate_grad_batches == 0


class Recorder(Callback):
    """One line of log.jsonl an optimizer step, and one a validation. Time spent on validation and on
    checkpoints does not count into tokens/s."""

    def __init__(self, record: Record, tokens_per_step: int) -> None:
        self.record, self.tokens_per_step = record, tokens_per_step
        self._started: float | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._started is None:
            self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _completes_a_step(trainer, batch_idx) or self._started is None:
            return
        seconds, self._started = time.perf_counter() - self._started, None
        module.last["train/tokens_per_second"] = self.tokens_per_step / seconds
        if trainer.is_global_zero:
            self.record.append(trainer.global_step, module.last)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["validation/loss"])
            self.record.append(trainer.global_step, {"validation/loss": loss})


class Checkpointer(Callback):
    """A checkpoint every N optimizer steps and when the process is told to stop (SIGTERM)."""

    def __init__(self, record: Record, machine: Machine) -> None:
        self.record, self.machine = record, machine
        self.saved: int | None = None

    def save(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        if step == self.saved:
            return
        folder, keep = self.record.checkpoints, self.machine.keep_checkpoints
        if trainer.is_global_zero:
            checkpoint.save(folder, step, trainer.save_checkpoint, keep)
        else:  # takes part in collecting the state; only the first rank writes
            trainer.save_checkpoint(folder / "none")
        self.saved = step

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = trainer.global_step % self.machine.checkpoint_every == 0
        if due and _completes_a_step(trainer, batch_idx):
            self.save(trainer)

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            self.save(trainer)


class Bar(Callback):
    """Progress with loss, learning rate, tokens/s and time left."""

    def __init__(self, title: str, steps: int) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.task = self.bar.add_task(title, total=steps, figures="")

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and _completes_a_step(trainer, batch_idx):
            last = module.last
            figures = f"loss {last['train/loss']:.3f}  lr {last['train/lr']:.1e}"
            figures += f"  {last['train/tokens_per_second']:,.0f} tokens/s"
            self.bar.update(self.task, completed=trainer.global_step, figures=figures)

    def teardown(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        self.bar.stop()
