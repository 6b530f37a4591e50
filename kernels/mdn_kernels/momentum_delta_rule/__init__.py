"""The momentum delta rule, the operator of MDN: README.md has the derivation and the versions.

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

import torch
from torch import Tensor

from mdn_kernels.common.check import check_inputs
from mdn_kernels.registry import KernelVersion, register, register_torch, select

OP = "momentum_delta_rule"

register_torch(OP, __name__, "recurrent", "step by step; the oracle, and decoding")
register_torch(
    OP,
    __name__,
    "v1_logspace",
    "the paper's Algorithm 1 as printed, for reproduction; wrong or NaN in float32 where mu decays "
    "faster than alpha over a chunk",
    automatic=False,
)
register_torch(
    OP,
    __name__,
    "v2_segsum",
    "chunks with Γ = L_alpha diag(beta) L_mu: no positive exponent, no subtraction",
)
register(
    KernelVersion(
        op=OP,
        name="v3_triton",
        module=f"{__name__}.v3_triton",
        devices=("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        max_key=256,
        note="v2_segsum's chunks in Triton, with a backward written by hand",
    )
)
for name, automatic, note in (
    ("v4_hopper", True, "v3_triton with scans in Gluon that never wait for memory"),
    ("v4_recompute", False, "v4_hopper that computes the residuals again for its backward"),
):
    register(
        KernelVersion(
            op=OP,
            name=name,
            module=f"{__name__}.{name}",
            devices=("cuda",),
            dtypes=(torch.bfloat16, torch.float16),
            keys=(64, 128, 256),
            value_step=64,
            capability=(9, 0),
            automatic=automatic,
            note=note,
        )
    )
register(
    KernelVersion(
        op=OP,
        name="step_triton",
        module=f"{__name__}.step_triton",
        devices=("cuda",),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        max_key=256,
        decodes=True,
        note="decoding: one token in one launch, each state read and written once",
    )
)


def momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    log_mu: Tensor,
    eta: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    normalize_qk: bool = False,
    version: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The delta rule with stepwise momentum (arXiv 2605.05838, Eqs. 3–5), per head:

        ṽ_t = v_t − α_t S_{t−1}ᵀ k_t
        M_t = μ_t M_{t−1} − η_t k_t ṽ_tᵀ
        S_t = α_t S_{t−1} − β_t M_t
        o_t = scale · S_tᵀ q_t

    Args:
        q, k: [B, T, H, K] queries and keys. Stable with keys of norm ≤ 1.
        v: [B, T, H, V] values; q, k and v have one dtype.
        log_alpha, log_mu: [B, T, H] logarithms of the gates, from 0 to −inf.
        beta, eta: [B, T, H] step size and gradient scale. All gates float32 (float64 if q is).
        scale: of the queries; None: K**-0.5.
        initial_state: (S, M), [N, H, K, V] each, in the gates' dtype; None: zeros.
        output_final_state: also return the states after each sequence's last token.
        cu_seqlens: [N + 1] offsets of N sequences packed along T in a batch of 1; None: N = B.
        normalize_qk: divide q and k by their L2 norms first.
        version: a registered version's name; None: the newest automatic one that fits.

    Returns:
        o [B, T, H, V] in v's dtype, and (S, M), or None without `output_final_state`. Everything is
        differentiable with respect to every tensor; for a log gate of −inf the gradient is 0.

    Raises:
        ValueError: before any computing, for shapes, dtypes or devices that do not match, a positive log
            gate, invalid cu_seqlens, an unknown version, or one that does not fit the call.
    """
    if initial_state is not None and not (isinstance(initial_state, tuple) and len(initial_state) == 2):
        raise ValueError(f"initial_state is a {type(initial_state).__name__}; expected the tuple (S, M)")
    check_inputs(
        keys={"q": q, "k": k},
        v=v,
        gates={"log_alpha": log_alpha, "beta": beta, "log_mu": log_mu, "eta": eta},
        states=None if initial_state is None else dict(zip("SM", initial_state, strict=True)),
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
        log_mu,
        eta,
        scale=K**-0.5 if scale is None else scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        normalize_qk=normalize_qk,
    )
