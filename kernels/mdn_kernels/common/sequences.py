"""What the torch versions of all operators do around their arithmetic: precision, packed sequences, chunks.

All padding is zeros, which is neutral for every operator: a log gate of 0 keeps the state, and a token
without key, value and step size writes nothing.

B batch · T tokens · H heads · n chunks · C tokens of a chunk · N packed sequences
"""

import inspect
from collections.abc import Callable
from functools import wraps

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn_kernels.common.check import working_dtype
from mdn_kernels.common.normalize import l2norm

CHUNK = 64
NORMALIZED = ("q", "k", "p")


def dense(states: int) -> Callable[[Callable], Callable]:
    """Decorator: makes a version's `forward` of a function that knows neither dtypes nor packed sequences.

    The function gets, by position, the operator's tensors [B, T, H, ·] in float32 (float64 if q is float64),
    with q scaled, and q, k (and p) normalised if the caller asked for it, and then the initial states
    [B, H, K, V], of which there are `states`. It returns the output [B, T, H, V] and the final states.
    Packed sequences arrive as a batch padded to the longest of them. Autocast is off inside.
    """

    def decorate(core: Callable) -> Callable:
        names = list(inspect.signature(core).parameters)[:-states]

        @wraps(core)
        def forward(
            *tensors: Tensor,
            scale: float,
            initial_state: Tensor | tuple[Tensor, ...] | None,
            output_final_state: bool,
            cu_seqlens: Tensor | None,
            normalize_qk: bool,
        ) -> tuple[Tensor, Tensor | tuple[Tensor, ...] | None]:
            q, v = tensors[0], tensors[2]
            dtype = working_dtype(q.dtype)
            with torch.autocast(q.device.type, enabled=False):
                inputs = dict(zip(names, (x.to(dtype) for x in tensors), strict=True))
                if normalize_qk:
                    inputs |= {name: l2norm(inputs[name]) for name in NORMALIZED if name in inputs}
                inputs["q"] = inputs["q"] * scale
                if cu_seqlens is not None:
                    inputs = {name: unpack(x, cu_seqlens) for name, x in inputs.items()}
                if initial_state is None:
                    shape = (inputs["q"].shape[0], q.shape[2], q.shape[3], v.shape[3])
                    initial = (q.new_zeros(shape, dtype=dtype),) * states
                else:
                    initial = initial_state if isinstance(initial_state, tuple) else (initial_state,)
                o, *final = core(*inputs.values(), *initial)
                if cu_seqlens is not None:
                    o = pack(o, cu_seqlens)
                o = o.to(v.dtype)
            if not output_final_state:
                return o, None
            return o, (final[0] if states == 1 else tuple(final))

        return forward

    return decorate


def unpack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[1, T, ...] -> [N, longest, ...]: one row a packed sequence, zeros behind the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(x[0].split(cu_seqlens.diff().tolist()), batch_first=True)


def pack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N, longest, ...] -> [1, T, ...]: undoes `unpack`."""
    return torch.cat(
        [row[:length] for row, length in zip(x.unbind(0), cu_seqlens.diff().tolist(), strict=True)]
    )[None]


def to_chunks(x: Tensor, size: int = CHUNK) -> Tensor:
    """[B, T, H, ...] -> [B, H, n, C, ...] with C = size, the last chunk padded with zeros."""
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size)).movedim(3, 1).contiguous()


def from_chunks(x: Tensor, T: int) -> Tensor:
    """[B, H, n, C, ...] -> [B, T, H, ...]: undoes `to_chunks`."""
    return x.movedim(1, 3).flatten(1, 2)[:, :T]
