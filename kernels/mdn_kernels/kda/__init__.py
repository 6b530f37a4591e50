"""KDA, the operator of Kimi Delta Attention (a decay for each key channel): README.md has the derivation.

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

import torch
from torch import Tensor

from mdn_kernels.common.check import check_inputs
from mdn_kernels.common.fla import register_fla, trusted
from mdn_kernels.registry import KernelVersion, register, register_torch, select

OP = "kda"

register_torch(OP, __name__, "recurrent", "step by step; the oracle, and decoding")
register_torch(
    OP,
    __name__,
    "chunk",
    "chunks of 64, as gated_delta_rule's, in blocks of 8 where the decay cannot be factored",
)
register_fla(OP, __name__, "chunk_kda", automatic=trusted())
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


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    normalize_qk: bool = False,
    version: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule with channel-wise decay (arXiv 2510.26692), per head:

        S'_t = Diag(α_t) S_{t−1}
        S_t = S'_t + β_t k_t (v_t − S'_tᵀ k_t)ᵀ
        o_t = scale · S_tᵀ q_t

    Args:
        q, k: [B, T, H, K] queries and keys. Stable with keys of norm ≤ 1 and β ≤ 1.
        v: [B, T, H, V] values; q, k and v have one dtype.
        log_alpha: [B, T, H, K] logarithms of each key channel's decay, from 0 to −inf.
        beta: [B, T, H] step sizes. Both gates float32 (float64 if q is).
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
        gates={"beta": beta},
        channel_gates={"log_alpha": log_alpha},
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
        beta,
        scale=K**-0.5 if scale is None else scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        normalize_qk=normalize_qk,
    )
