"""One token of the delta rules in one Triton launch: gates to output, every state read and written once.

What decoding costs is the states' traffic. A program holds all key channels of a block of value channels, so
that both products with the state are sums inside it.

B batch · H heads · K key channels · V value channels
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

import mdn_kernels
from mdn_kernels.common import step_kernels as kernels

# Programs that a GPU should have at least to keep its memory busy: two for each of an H200's processors.
ENOUGH = 264


def _rows(x: Tensor) -> Tensor:
    """x [B, 1, H, ·] with its heads and channels in a row, copied only if they are not."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def _filled(xs: list[Tensor], count: int) -> list[Tensor | None]:
    """xs and as many None as it takes."""
    return [*xs, *[None] * (count - len(xs))]


def launch(B: int, H: int, K: int, V: int) -> dict[str, int]:
    """Tile sizes (powers of two) and warps."""
    BV = min(32, triton.next_power_of_2(V))
    if BV > 16 and B * H * triton.cdiv(V, BV) < ENOUGH:
        BV = 16
    return {"BK": triton.next_power_of_2(K), "BV": BV, "num_warps": 8 if K * BV > 4096 else 4}


def step(
    recurrent: Callable,
    *tensors: Tensor,
    momentum: bool,
    scale: float,
    initial_state: Tensor | tuple[Tensor, ...] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor | tuple[Tensor, ...] | None]:
    """The `forward` of an operator for T = 1; its tensors are q, k, v, (p,) log_alpha, beta, (log_mu, eta).

    `recurrent` is the operator's version of that name, which computes where gradients are wanted, and packed
    sequences.
    """
    states = () if initial_state is None else initial_state
    states = states if isinstance(states, tuple) else (states,)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *states))
    if wanted or cu_seqlens is not None:
        return recurrent(
            *tensors,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            normalize_qk=normalize_qk,
        )
    q, k, v, *others = tensors
    B, _, H, K = q.shape
    V = v.shape[-1]
    q, k, v = map(_rows, (q, k, v))
    p = _rows(others.pop(0)) if others[0].dim() == 4 else None
    gates = [x.contiguous() for x in others]
    initial = [x.contiguous() for x in states]
    final = initial
    if not (mdn_kernels.OVERWRITE_STATES and initial):
        final = [q.new_empty(B, H, K, V, dtype=torch.float32) for _ in range(1 + momentum)]
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    options = launch(B, H, K, V)
    with torch.cuda.device_of(q):
        kernels.step[triton.cdiv(V, options["BV"]), B * H](
            q, k, v, p, *_filled(gates, 4), *_filled(initial, 2), o, *_filled(final, 2),
            *(x.stride(0) for x in (q, k, v, q if p is None else p)), scale,
            H=H, K=K, V=V, NORMALIZE=normalize_qk, **options,
        )  # fmt: skip
    if not output_final_state:
        return o, None
    return o, tuple(final) if momentum else final[0]
