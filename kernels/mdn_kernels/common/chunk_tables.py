"""Where the chunks of a batch are, for kernels that see all of its tokens in one row.

B batch · T tokens · N sequences
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def remembered(build: Callable) -> Callable:
    """`cache` for what holds tensors: those made while a CUDA graph is captured have no values until it runs,
    so they are not kept."""
    kept = cache(build)

    @wraps(build)
    def call(*arguments: object) -> object:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return (build if capturing else kept)(*arguments)

    return call


@dataclass(frozen=True)
class Chunks:
    """Tables that a program finds its chunk in. Their sizes depend on no values, as CUDA graphs want it."""

    owner: Tensor  # [count], sequence of each chunk; N for those that are not used
    first: Tensor  # [N + 1], first chunk of each sequence
    starts: Tensor  # [N + 1], first token of each sequence
    sequences: int

    @property
    def count(self) -> int:
        return self.owner.shape[0]

    @classmethod
    def of(cls, q: Tensor, cu_seqlens: Tensor | None) -> "Chunks":
        """q: [B, T, ...]; cu_seqlens: [N + 1] offsets along T in a batch of one, or None: N = B."""
        if cu_seqlens is None:
            return cls._of_batch(*q.shape[:2], q.device)
        sequences = cu_seqlens.shape[0] - 1
        starts = cu_seqlens.to(q.device, torch.int32)
        counts = (starts.diff() + CHUNK - 1) // CHUNK
        first = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        count = q.shape[1] // CHUNK + sequences  # at least as many as there can be
        chunk = torch.arange(count, device=q.device, dtype=torch.int32)
        return cls(torch.searchsorted(first[1:], chunk, right=True).int(), first, starts, sequences)

    @classmethod
    @remembered
    def _of_batch(cls, B: int, T: int, device: torch.device) -> "Chunks":
        each, sequence = -(-T // CHUNK), torch.arange(B + 1, device=device, dtype=torch.int32)
        owner = torch.arange(B * each, device=device, dtype=torch.int32) // each
        return cls(owner, sequence * each, sequence * T, B)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.owner, self.first, self.starts, self.sequences
