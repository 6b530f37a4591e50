"""What happens around the steps: the record, checkpoints, the progress bar."""

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mdn.config import Machine, RunConfig
from mdn.models.cost import flops_per_token, peak_flops
from mdn.tracking.record import Record
from mdn.training import checkpoint
from mdn.training.launch import Stopped

WARM_UP = 3  # steps left out of a throughput: allocation, compilation, caches


def completes_a_step(trainer: L.Trainer, batch: int) -> bool:
    """Whether a micro-batch is the last of its optimizer step."""
    return (batch + 1) % trainer.accumulate_grad_batches == 0


class Recorder(Callback):
    """One line of log.jsonl an optimizer step, and one a validation.

    Throughput is that of the whole step, all its micro-batches and the wait for their data, whose share is
    logged as well; validations and checkpoints between steps do not count.
    """

    def __init__(self, record: Record, run: RunConfig) -> None:
        self.record, self.tokens = record, run.training.batch_tokens
        self.flops = self.tokens * flops_per_token(run, run.training.context)
        self._since: tuple[float, float] | None = None  # clock and seconds waited, at the step's begin

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._since is None:
            self._since = _clock(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not completes_a_step(trainer, batch_idx) or self._since is None:
            return
        now = _clock(trainer)
        seconds, waited = (a - b for a, b in zip(now, self._since, strict=True))
        self._since = now
        module.last["train/tokens_per_second"] = self.tokens / seconds
        module.last["train/data_wait"] = waited / seconds
        peak = peak_flops(module.device)
        if peak is not None:
            module.last["train/mfu"] = self.flops / seconds / (peak * trainer.world_size)
        if trainer.is_global_zero:
            self.record.append(trainer.global_step, module.last)

    def on_save_checkpoint(self, *_: Any) -> None:
        self._since = None

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self._since = None
        if trainer.is_global_zero and not trainer.sanity_checking:
            loss = float(trainer.callback_metrics["validation/loss"])
            self.record.append(trainer.global_step, {"validation/loss": loss})


def _clock(trainer: L.Trainer) -> tuple[float, float]:
    assert trainer.datamodule is not None  # type: ignore[attr-defined]
    return time.perf_counter(), trainer.datamodule.waited  # type: ignore[attr-defined]


class Checkpointer(Callback):
    """A checkpoint every N optimizer steps, and one when a rank was told to stop, which ends the training.

    It follows the validation of its step, if there is one: a resumed training does not repeat that.
    """

    def __init__(self, record: Record, run: RunConfig, machine: Machine) -> None:
        self.record, self.machine, self.validate_every = record, machine, run.training.validate_every

    def save(self, trainer: L.Trainer, module: Any) -> None:
        if not module.stopping and trainer.global_step % self.machine.checkpoint_every:
            return
        folder, keep = self.record.checkpoints, self.machine.keep_checkpoints
        if trainer.is_global_zero:
            self.record.flush()
            checkpoint.save(folder, trainer.global_step, trainer.save_checkpoint, keep)
        else:  # takes part in collecting the state; only the first rank writes
            trainer.save_checkpoint(folder / "none")

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if module.stopping:
            raise Stopped

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if completes_a_step(trainer, batch_idx) and trainer.global_step % self.validate_every:
            self.save(trainer, module)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.global_step % self.validate_every == 0:  # not the one after the last step
            self.save(trainer, module)


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
        if trainer.is_global_zero and completes_a_step(trainer, batch_idx):
            last = module.last
            figures = f"loss {last['train/loss']:.3f}  lr {last['train/lr']:.1e}"
            figures += f"  {last['train/tokens_per_second']:,.0f} tokens/s"
            self.bar.update(self.task, completed=trainer.global_step, figures=figures)

    def teardown(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        self.bar.stop()
