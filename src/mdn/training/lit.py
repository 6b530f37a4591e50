"""The LightningModule: forward, loss, log. Everything else is a callback or a function of the step."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mdn.config import Machine, RunConfig
from mdn.models.lm import LanguageModel
from mdn.training.launch import StopRequest
from mdn.training.optim import build_optimizer, learning_rate
from mdn.training.sharded import Sharded, shard

MAX_SKIPPED = 10  # steps in a row without finite loss and gradient, after which a training counts as diverged


class Diverged(RuntimeError):
    """Loss or gradient was not finite for MAX_SKIPPED steps in a row. A result, not a crash."""


class LitLanguageModel(L.LightningModule):
    """Trains `model` as `run` says.

    A step whose loss or gradient is not finite changes no weight: it is skipped and counted, its tokens are
    spent, and the learning rate goes on. Both are averaged over devices before they are looked at, so all
    ranks skip together.
    """

    def __init__(self, model: LanguageModel, run: RunConfig, machine: Machine, stop: StopRequest) -> None:
        super().__init__()
        self.model, self.run, self.stop = model, run, stop
        model.recompute(machine.activation_checkpointing)
        if machine.compile:
            # Gradients leave block by block already; DDP need not cut blocks into its buckets.
            torch._dynamo.config.optimize_ddp = False
            model.compile_blocks()
        self.stopping = False  # some rank was told to stop; the same on all ranks after a step
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.last: dict[str, float] = {}  # figures of the last optimizer step, for callbacks
        self._losses: list[Tensor] = []  # of its micro-batches

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.model.loss(batch["ids"], batch["labels"], batch.get("cu_seqlens"))
        self._losses.append(loss.detach())
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        loss = self.model.loss(batch["ids"], batch["labels"], batch.get("cu_seqlens"))
        self.log("validation/loss", loss, batch_size=batch["ids"].numel(), sync_dist=True)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, Sharded):
            strategy = self.trainer.strategy
            shard(self.model, strategy.device_mesh["data_parallel"], strategy.weights)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.run)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Sets the step's learning rate, clips, and drops the gradient of a step that is not finite."""
        rate = learning_rate(self.run, self.global_step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optimizer.clip)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        loss = torch.stack(self._losses).mean()
        self._losses.clear()
        # Means over devices, in one message.
        loss, stopping = self.trainer.strategy.reduce(torch.stack([loss, loss.new_tensor(self.stop.made)]))
        self.stopping = stopping.item() > 0
        self.last = {"train/loss": loss.item(), "train/lr": rate, "train/grad_norm": norm.item()}
        if torch.isfinite(norm) and torch.isfinite(loss):
            self.skipped_in_a_row = 0
            return
        optimizer.zero_grad(set_to_none=True)  # AdamW leaves a parameter without a gradient alone
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.last["train/skipped"] = self.skipped
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise Diverged(f"not finite for {MAX_SKIPPED} steps in a row, up to step {self.global_step + 1}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped"] = (self.skipped, self.skipped_in_a_row)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped, self.skipped_in_a_row = checkpoint["skipped"]
        # Lightning counts micro-batches; a step may have another number of them now.
        done = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in ("total", "current"):
            progress[counts] = dict.fromkeys(progress[counts], done)
