"""Batches read ahead: in order whatever the number of threads, and an error where it belongs."""

import threading
import time

import pytest
import torch

from mdn.data.loader import MicroBatches


class Steps:
    """Step n is 4 sequences of the number n. The earlier of two takes longer, so that threads overtake."""

    def __init__(self, count, fails=None):
        self.count, self.fails, self.read = count, fails, []

    def __len__(self):
        return self.count

    def __getitem__(self, n):
        self.read.append(n)
        if n == self.fails:
            raise OSError("shard gone")
        time.sleep(0.002 * (n % 2 == 0))
        return {"ids": torch.full((4, 3), n), "labels": torch.full((4, 3), n)}


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("micro", [4, 2])
def test_batches_come_in_the_order_of_the_steps(readers, micro):
    batches = list(MicroBatches(Steps(9), micro, False, readers))
    assert all(batch["ids"].shape == (micro, 3) for batch in batches)
    assert [int(batch["ids"][0, 0]) for batch in batches] == [n for n in range(9) for _ in range(4 // micro)]


def test_no_more_is_read_ahead_than_there_are_readers():
    steps = Steps(50)
    batches = iter(MicroBatches(steps, 4, False, 2))
    next(batches)
    time.sleep(0.05)
    assert max(steps.read) <= 3


def test_an_error_of_a_reader_arrives_at_its_step_and_the_threads_end():
    before = threading.active_count()
    batches, seen = MicroBatches(Steps(9, fails=5), 4, False, 2), []
    with pytest.raises(OSError, match="shard gone"):
        seen.extend(int(batch["ids"][0, 0]) for batch in batches)
    deadline = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_wait_for_a_batch_is_counted():
    steps = Steps(3)
    batches = MicroBatches(steps, 4, False, 1)
    assert batches.waited == 0
    list(batches)
    assert 0 < batches.waited < 5
