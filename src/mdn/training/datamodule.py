"""Batches for Lightning: the global order cut into this rank's micro-batches, from the step at hand on."""

from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mdn.config import Machine, RunConfig
from mdn.data.loader import TrainingWindows, packed
from mdn.data.order import Order, window_count
from mdn.data.shards import open_split, read_index


class MicroBatches(IterableDataset):
    """The batches of optimizer steps, `micro` sequences at a time.

    Without a length on purpose: Lightning compares a length with the batches that it counted before a
    resume, and would end the training early.
    """

    def __init__(self, steps: TrainingWindows, micro: int, packing: bool) -> None:
        self.steps, self.micro, self.packing = steps, micro, packing

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(len(self.steps)):
            batch = self.steps[step]
            for start in range(0, len(batch["ids"]), self.micro):
                rows = {name: rows[start : start + self.micro] for name, rows in batch.items()}
                yield packed(rows) if self.packing else rows


class TokenData(L.LightningDataModule):
    """Token shards as micro-batches. `trainer.global_step` says where to begin, so a resumed training sees
    the very batches that an uninterrupted one would."""

    def __init__(self, run: RunConfig, machine: Machine, tokens: Path) -> None:
        super().__init__()
        self.run, self.machine, self.folder = run, machine, tokens / run.data

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        budget, split = self.run.training, open_split(self.folder, "train")
        steps = TrainingWindows(
            split,
            budget.context,
            Order(window_count(len(split), budget.context), budget.batch, self.run.seed),
            first_step=self.trainer.global_step,
            last_step=budget.steps,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
        batches = MicroBatches(steps, self.machine.micro_batch, budget.packing)
        return DataLoader(batches, batch_size=None, pin_memory=torch.cuda.is_available())

    def val_dataloader(self) -> DataLoader:
        """The first windows of every held-out split, `validation_tokens` in all; the same on every rank."""
        budget, micro = self.run.training, self.machine.micro_batch
        names = [name for name in read_index(self.folder)["splits"] if name.startswith("heldout")]
        if not names:
            raise ValueError(f"{self.folder}: no held-out split; give a part a holdout and prepare it again")
        share = budget.validation_tokens // budget.context // len(names)
        rows = []
        for name in names:
            split = open_split(self.folder, name)
            for window in range(min(max(1, share), window_count(len(split), budget.context))):
                start = window * budget.context
                tokens = split.tokens(start, start + budget.context + 1)
                rows.append(torch.from_numpy(tokens.astype("int64")))
        windows = torch.stack(rows)
        batches = [{"ids": part[:, :-1], "labels": part[:, 1:]} for part in windows.split(micro)]
        if budget.packing:
            batches = [packed(batch) for batch in batches]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a data set
