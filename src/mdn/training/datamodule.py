"""Batches for Lightning: the global order cut into this rank's micro-batches, from the step at hand on."""

from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from mdn.config import Machine, RunConfig
from mdn.data.loader import MicroBatches, packed, training_batches
from mdn.data.order import window_count
from mdn.data.shards import TokenSplit, open_split, read_index


class TokenData(L.LightningDataModule):
    """Token shards as micro-batches. `trainer.global_step` says where to begin, so a resumed training sees
    the very batches that an uninterrupted one would."""

    def __init__(self, run: RunConfig, machine: Machine, tokens: Path) -> None:
        super().__init__()
        self.run, self.machine, self.folder = run, machine, tokens / run.data
        self._batches: MicroBatches | None = None

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for a batch so far."""
        return self._batches.waited if self._batches else 0.0

    def train_dataloader(self) -> MicroBatches:
        assert self.trainer is not None
        at = self.trainer
        self._batches = training_batches(
            self.run, self.machine, self.folder, at.global_step, at.global_rank, at.world_size
        )
        return self._batches

    def check(self) -> None:
        """
        Raises:
            FileNotFoundError, ValueError: if a shard is missing or not as long as it should be, or the text
                is too short to train or to validate on.
        """
        split, budget = open_split(self.folder, "train"), self.run.training
        windows = window_count(len(split), budget.context)
        if windows < budget.batch:
            raise ValueError(
                f"{self.folder}: train has {len(split)} tokens, {windows} windows of {budget.context}, fewer "
                f"than the {budget.batch} of a step; prepare more text or lower batch_tokens"
            )
        self.held_out()

    def held_out(self) -> list[TokenSplit]:
        """The splits to validate on.

        Raises:
            ValueError: if there is none, or one of them is shorter than a window.
        """
        names = [name for name in read_index(self.folder)["splits"] if name.startswith("heldout")]
        if not names:
            raise ValueError(f"{self.folder}: no held-out split; give a part a holdout and prepare it again")
        splits, context = [open_split(self.folder, name) for name in names], self.run.training.context
        for split in splits:
            if not window_count(len(split), context):
                raise ValueError(
                    f"{self.folder}: {split.split} has {len(split)} tokens, fewer than the {context + 1} of "
                    "a window (context and a label); raise its holdout, or set it to 0, and prepare it again"
                )
        return splits

    def val_dataloader(self) -> DataLoader:
        """The first windows of every held-out split, `validation_tokens` in all; the same on every rank."""
        budget, micro = self.run.training, self.machine.micro_batch
        splits = self.held_out()
        share = budget.validation_tokens // budget.context // len(splits)
        rows = []
        for split in splits:
            for window in range(min(max(1, share), window_count(len(split), budget.context))):
                start = window * budget.context
                tokens = split.tokens(start, start + budget.context + 1)
                rows.append(torch.from_numpy(tokens.astype("int64")))
        windows = torch.stack(rows)
        batches = [{"ids": part[:, :-1], "labels": part[:, 1:]} for part in windows.split(micro)]
        if budget.packing:
            batches = [packed(batch) for batch in batches]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a data set
