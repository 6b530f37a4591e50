"""SSD, the operator of Mamba2: a decaying sum of outer products: README.md has the derivation.

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

import torch
from torch import Tensor

from mdn_kernels.common.check import check_inputs
from mdn_kernels.common.fla import register_fla, trusted
from mdn_kernels.registry import KernelVersion, register, register_torch, select

OP = "ssd"

register_torch(OP, __name__, "recurrent", "step by step; the oracle, and decoding")
register_torch(
    OP,
    __name__,
    "chunk",
    "chunks of 64: a masked product inside a chunk, a scan over the states between them",
)
register_fla(OP, __name__, "chunk_simple_gla", automatic=trusted())
register(
    KernelVersion(
        op=OP,
        name="step_triton",
        module=f"{__name__}.step_triton",
        devices=("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        max_key=256,
        decodes=True,
        note="decoding: one token in one launch, the state read and written once",
    )
)


def ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    normalize_qk: bool = False,
    version: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mamba2's state update with a scalar decay (arXiv 2405.21060), per head:

        S_t = α_t S_{t−1} + k_t v_tᵀ
        o_t = scale · S_tᵀ q_t

    In Mamba2's letters q = C, k = B, v = Δ·x and log α = Δ·A. All have the same heads: expand (a view) the
    q and k of a group.

    Args:
        q, k: [B, T, H, K] queries and keys.
        v: [B, T, H, V] values; q, k and v have one dtype.
        log_alpha: [B, T, H] logarithms of the decays, from 0 to −inf; float32 (float64 if q is).
        scale: of the queries; None: K**-0.5.
        initial_state: [N, H, K, V] S, in the gates' dtype; None: zeros.
        output_final_state: also return the state after each sequence's last token.
        cu_seqlens: [N + 1] offsets of N sequences packed along T in a batch of 1; None: N = B.
        normalize_qk: divide q and k by their L2 norms first.
        version: a registered version's name; None: the newest automatic one that fits.

    Returns:
        o [B, T, H, V] in v's dtype, and S, or None without `output_final_state`. Everything is differentiable
        with respect to every tensor; for a log gate of −inf the gradient is 0.

    Raises:
        ValueError: before any computing, for shapes, dtypes or devices that do not match, a positive log
            gate, invalid cu_seqlens, an unknown version, or one that does not fit the call.
    """
    check_inputs(
        keys={"q": q, "k": k},
        v=v,
        gates={"log_alpha": log_alpha},
        states=None if initial_state is None else {"S": initial_state},
        cu_seqlens=cu_seqlens,
    )
    T, K, V = q.shape[1], q.shape[3], v.shape[3]
    forward = select(OP, version, q.device, q.dtype, T, K, V).load()
    return forward(
        q,
        k,
        v,
        log_alpha,
        scale=K**-0.5 if scale is None else scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        normalize_qk=normalize_qk,
    )
