"""Which windows of text an optimizer step sees: a pure function of (seed, step), so that resuming, the number
of devices, workers and the micro-batch change nothing.

A window is `context` inputs and one more token for the last label; neighbours share that token. Each epoch
visits every window once in an order of its own; a step that begins in one epoch may end in the next.
"""

from dataclasses import dataclass

import numpy as np

ROUNDS = 6


def window_count(tokens: int, context: int) -> int:
    """Windows of `context` inputs and a last label in a row of tokens."""
    return max(0, tokens - 1) // context


@dataclass(frozen=True)
class Order:
    """windows: how many there are; batch: windows in an optimizer step over all devices."""

    windows: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch: {self.batch} is not positive; use at least one window a step")
        if self.windows < self.batch:
            raise ValueError(
                f"the split has {self.windows} windows, fewer than one batch of {self.batch}; "
                "prepare more text or lower batch_tokens"
            )

    def indices(self, step: int) -> np.ndarray:
        """[batch] int64 window numbers of optimizer step `step`, the first being 0."""
        if step < 0:
            raise ValueError(f"step: {step} is negative; the first is 0")
        place = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.uint64)
        epoch, within = np.divmod(place, np.uint64(self.windows))
        return _permute(within, self.windows, self.seed, epoch).astype(np.int64)


def _permute(x: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where a permutation of range(n), drawn by (seed, epoch), sends x.

    A Feistel network permutes a power of four; a value that lands outside range(n) goes round again, which
    leaves a permutation of range(n). It needs no table (25 million windows at the paper's scale), and its
    integer arithmetic is the same on every machine and in every version of numpy.
    """
    half = np.uint64(max(4, (n.bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    key = _mix(_mix(np.full_like(x, seed % (1 << 64))) + epoch)
    x = x.copy()
    todo = np.ones(x.shape, dtype=bool)
    while todo.any():
        left, right = x[todo] >> half, x[todo] & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(key[todo] + np.uint64(number) ^ _mix(right)) & mask)
        x[todo] = left << half | right
        todo = x >= n
    return x


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit moves every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
