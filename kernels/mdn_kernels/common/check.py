"""Validation of the operators' arguments, before anything is computed.

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

import weakref
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

import mdn_kernels


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of gates, states and inner arithmetic: float64 for float64 inputs, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def values_can_be_read(x: Tensor) -> bool:
    """Whether Python may look at values: not while torch.compile traces or a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_inputs(
    keys: Mapping[str, Tensor],
    v: Tensor,
    gates: Mapping[str, Tensor],
    states: Mapping[str, Tensor] | None,
    cu_seqlens: Tensor | None,
    channel_gates: Mapping[str, Tensor] | None = None,
) -> None:
    """Raises ValueError, which names the argument, unless an operator can be run on these.

    keys: [B, T, H, K] each, the first one is the reference for the others; v: [B, T, H, V].
    gates: [B, T, H] each, channel_gates: [B, T, H, K] each; those called `log_…` must be ≤ 0
        (looked at only while `mdn_kernels.CHECK_GATES`).
    states: initial states, [N, H, K, V] each, N = B, or the number of sequences with cu_seqlens.
    cu_seqlens: [N + 1] integers, token offsets of the sequences packed in a batch of one.

    Values (of log gates and cu_seqlens) are not looked at where `values_can_be_read` is false.
    """
    channel_gates = channel_gates or {}
    for name, x in {**keys, "v": v, **gates, **channel_gates}.items():
        _check_type(name, x)
    reference, q = next(iter(keys.items()))
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"{reference} has shape {list(q.shape)}; expected [B, T, H, K], none of them 0")
    if not q.is_floating_point():
        raise ValueError(f"{reference} is {q.dtype}; convert it to a floating-point dtype")
    B, T, H, K = q.shape
    if v.dim() != 4 or v.shape[:3] != q.shape[:3] or v.shape[3] == 0:
        raise ValueError(
            f"v has shape {list(v.shape)}; expected [B, T, H, V] = [{B}, {T}, {H}, V] as in {reference}"
        )
    for name, x in keys.items():
        _check_tensor(name, x, (B, T, H, K), q.dtype, q.device)
    _check_tensor("v", v, tuple(v.shape), q.dtype, q.device)
    gate_dtype = working_dtype(q.dtype)
    for name, x in gates.items():
        _check_tensor(name, x, (B, T, H), gate_dtype, q.device)
    for name, x in channel_gates.items():
        _check_tensor(name, x, (B, T, H, K), gate_dtype, q.device)
    N = B
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
        N = len(cu_seqlens) - 1
    for name, x in (states or {}).items():
        _check_type(f"initial_state {name}", x)
        _check_tensor(f"initial_state {name}", x, (N, H, K, v.shape[3]), gate_dtype, q.device)
    if mdn_kernels.CHECK_GATES and values_can_be_read(q):
        for name, x in {**gates, **channel_gates}.items():
            if name.startswith("log_") and x.detach().amax() > 0:
                raise ValueError(
                    f"{name} has a positive value ({x.max().item():.4g}); pass the logarithm of a gate ≤ 1 "
                    "(mdn_kernels.CHECK_GATES = False switches this check off)"
                )


def check_cu_seqlens(cu_seqlens: Tensor, B: int, T: int) -> None:
    """Raises ValueError unless cu_seqlens [N + 1] divides the T tokens of a batch of one into sequences."""
    _check_type("cu_seqlens", cu_seqlens)
    if B != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, not B={B}; pack the sequences along T")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "expected [N + 1] offsets as int32 or int64, N ≥ 1"
        )
    if not values_can_be_read(cu_seqlens):
        return
    offsets = _offsets(cu_seqlens)
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens starts at {offsets[0]}; it must start at 0")
    if any(stop < start for start, stop in pairwise(offsets)):
        raise ValueError(f"cu_seqlens decreases: {offsets}; sort the offsets")
    if offsets[-1] != T:
        raise ValueError(f"cu_seqlens ends at {offsets[-1]}; it must end at T={T}")


# The last offsets that were read from a GPU: the tensor, its version then, its values.
_last: tuple[weakref.ref[Tensor], int, list[int]] | None = None


def _offsets(cu_seqlens: Tensor) -> list[int]:
    """Its values. Reading them waits for all that the GPU still has to do, and every layer asks."""
    global _last
    if not cu_seqlens.is_cuda or cu_seqlens.is_inference():  # the latter have no version
        return cu_seqlens.tolist()
    if _last is None or _last[0]() is not cu_seqlens or _last[1] != cu_seqlens._version:
        _last = weakref.ref(cu_seqlens), cu_seqlens._version, cu_seqlens.tolist()
    return _last[2]


def _check_type(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; pass a tensor")


def _check_tensor(name: str, x: Tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {list(shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}; expected {dtype}, convert it")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; expected {device}, move it")
