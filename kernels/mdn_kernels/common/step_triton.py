"""One token of any operator in one Triton launch: gates to output, every state read and written once.

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


def launch(B: int, H: int, K: int, V: int) -> dict[str, int]:
    """Tile sizes (powers of two) and warps."""
    BV = min(32, triton.next_power_of_2(V))
    if BV > 16 and B * H * triton.cdiv(V, BV) < ENOUGH:
        BV = 16
    return {"BK": triton.next_power_of_2(K), "BV": BV, "num_warps": 8 if K * BV > 4096 else 4}


def step(
    recurrent: Callable,
    names: tuple[str, ...],
    *tensors: Tensor,
    scale: float,
    initial_state: Tensor | tuple[Tensor, ...] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor | tuple[Tensor, ...] | None]:
    """The `forward` of an operator for T = 1, whose tensors have these names; with log_mu it has momentum.

    `recurrent` is the operator's version of that name, which computes where gradients are wanted, and packed
    sequences.
    """
    given = () if initial_state is None else initial_state
    states = given if isinstance(given, tuple) else (given,)
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
    named = dict(zip(names, tensors, strict=True))
    q, k, v = (_rows(named[x]) for x in "qkv")
    p = _rows(named["p"]) if "p" in named else None
    gates = [named[x].contiguous() if x in named else None for x in ("log_alpha", "beta", "log_mu", "eta")]
    (B, _, H, K), V = q.shape, v.shape[-1]
    initial = [x.contiguous() for x in states]
    final = initial
    if not (mdn_kernels.OVERWRITE_STATES and initial):
        count = 2 if "log_mu" in named else 1
        final = [q.new_empty(B, H, K, V, dtype=torch.float32) for _ in range(count)]
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    S, M = (*initial, None, None)[:2]
    final_S, final_M = (*final, None)[:2]
    options = launch(B, H, K, V)
    with torch.cuda.device_of(q):
        kernels.step[triton.cdiv(V, options["BV"]), B * H](
            q, k, v, p, *gates, S, M, o, final_S, final_M,
            *(x.stride(0) for x in (q, k, v, q if p is None else p)), scale,
            H=H, K=K, V=V, NORMALIZE=normalize_qk, CHANNELS=named["log_alpha"].dim() == 4, **options,
        )  # fmt: skip
    if not output_final_state:
        return o, None
    return o, tuple(final) if len(final) > 1 else final[0]
