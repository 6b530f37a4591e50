"""The training batches of one rank, read from memory maps ahead of the training."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mdn.config import Machine, RunConfig
from mdn.data import gpt2
from mdn.data.order import Order, window_count
from mdn.data.shards import TokenSplit, open_split

Batch = dict[str, Tensor]


def packed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows [B, T] as one row [1, B T] and the offsets `cu_seqlens` [N + 1] of the documents in it.

    A document begins with the end-of-text token before it, as a prompt does in the evaluations; a row's first
    begins with the row. So each token's label is still the next token: the last token of a document predicts
    its end, and end-of-text alone predicts how the next one begins.
    """
    ids_BT = batch["ids"]
    begins_BT = ids_BT == gpt2.EOT
    begins_BT[:, 0] = True
    offsets = [*begins_BT.flatten().nonzero()[:, 0].tolist(), ids_BT.numel()]
    flat = {name: rows.reshape(1, -1) for name, rows in batch.items()}
    return flat | {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}


class TrainingWindows(Dataset[dict[str, Tensor]]):
    """Item i is the rank's part of optimizer step first_step + i; steps [first_step, last_step), from 0.

    An item is {"ids": [batch / world_size, context], "labels": the same, one token further}, int64. The
    global batch of a step is the same for any number of ranks: each takes its contiguous part. For a
    DataLoader with batch_size=None and no shuffling.

    Raises:
        ValueError: if order and split do not belong together, or the ranks do not divide the batch.
    """

    def __init__(
        self,
        split: TokenSplit,
        context: int,
        order: Order,
        first_step: int,
        last_step: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        windows = window_count(len(split), context)
        if order.windows != windows:
            raise ValueError(
                f"order.windows: {order.windows}, but split {split.split} has {windows} windows of {context} "
                f"tokens; use Order({windows}, …)"
            )
        if order.batch % world_size:
            raise ValueError(
                f"world_size: {world_size} does not divide a batch of {order.batch} windows; use a divisor"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: {rank} is not below world_size {world_size}; ranks start at 0")
        if not 0 <= first_step <= last_step:
            raise ValueError(f"first_step: {first_step} is not between 0 and last_step {last_step}")
        self.split, self.context, self.order = split, context, order
        self.first_step, self.last_step = first_step, last_step
        share = order.batch // world_size
        self._part = slice(rank * share, (rank + 1) * share)

    def __len__(self) -> int:
        return self.last_step - self.first_step

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):  # IndexError also ends a plain for loop
            raise IndexError(f"item {i} of {len(self)} steps")
        starts = self.order.indices(self.first_step + i)[self._part] * self.context
        rows = np.stack([self.split.tokens(start, start + self.context + 1) for start in starts.tolist()])
        tokens = torch.from_numpy(rows.astype(np.int64))
        return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


class MicroBatches:
    """The batches of optimizer steps, `micro` sequences at a time, read ahead by threads.

    Reading is waiting for a disk and copying, both of which leave other threads alone. Each thread reads
    whole steps; they come out in order, whatever the number of threads.

    Without a length on purpose: Lightning compares a length with the batches that it counted before a
    resume, and would end the training early.
    """

    def __init__(self, steps: TrainingWindows, micro: int, packing: bool, readers: int) -> None:
        self.steps, self.micro, self.packing, self.readers = steps, micro, packing, readers
        self.gpu = torch.cuda.current_device() if torch.cuda.is_available() else None  # of this rank
        self.waited = 0.0  # seconds that the training has waited for a batch so far

    def __iter__(self) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self.readers, "reader", initializer=self._begin)
        try:
            ahead: deque[Future[list[Batch]]] = deque()
            for step in range(len(self.steps)):
                ahead.append(pool.submit(self._read, step))
                if len(ahead) > self.readers:
                    yield from self._wait(ahead.popleft())
            while ahead:
                yield from self._wait(ahead.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        if self.gpu is not None:  # a thread begins at the first one, and would open it for pinned memory
            torch.cuda.set_device(self.gpu)

    def _read(self, step: int) -> list[Batch]:
        whole = self.steps[step]
        parts = [
            {name: rows[start : start + self.micro] for name, rows in whole.items()}
            for start in range(0, len(whole["ids"]), self.micro)
        ]
        if self.packing:
            parts = [packed(part) for part in parts]
        if self.gpu is not None:
            parts = [{name: rows.pin_memory() for name, rows in part.items()} for part in parts]
        return parts

    def _wait(self, step: "Future[list[Batch]]") -> list[Batch]:
        since = time.perf_counter()
        batches = step.result()
        self.waited += time.perf_counter() - since
        return batches


def training_batches(
    run: RunConfig, machine: Machine, folder: Path, first_step: int = 0, rank: int = 0, world_size: int = 1
) -> MicroBatches:
    """One rank's micro-batches of a training from optimizer step `first_step` on, from the token set in
    `folder`; in pinned memory where there is a GPU."""
    budget, split = run.training, open_split(folder, "train")
    steps = TrainingWindows(
        split,
        budget.context,
        Order(window_count(len(split), budget.context), budget.batch, run.seed),
        first_step=first_step,
        last_step=budget.steps,
        rank=rank,
        world_size=world_size,
    )
    return MicroBatches(steps, machine.micro_batch, budget.packing, machine.readers)
