"""The delta rules with one state in Triton, forward and backward: gated_delta_rule and comba.

Both are chunks of the same form. With L_ij = Π_{j<s≤i} α_s (lower triangular) and a_i = Π_{s≤i} α_s, and for
what the residuals read, P and L'_ij, r_i (strictly lower triangular):

    gated delta rule   P = K   L'_ij = L_ij         r_i = a_i
    Comba              P = P   L'_ij = L_{i−1,j}    r_i = a_{i−1}

    [I + (P Kᵀ) ⊙ L' ⊙ β_j] Ṽ = V − r ⊙ P S₀                       T Ṽ = R
    O = a ⊙ Q S₀ + [(Q Kᵀ) ⊙ L ⊙ β_j] Ṽ
    S_C = a_C S₀ + (w ⊙ K)ᵀ Ṽ,  w = L_{C,:} ⊙ β

T⁻¹, the scores (Q Kᵀ) ⊙ L ⊙ β and the coefficients a, r, w are computed for all chunks at once, a scan
carries S, and the outputs follow for all chunks at once. In the backward the scan restores the states from
the residuals Ṽ, a reverse scan carries dS, and one kernel does the rest for all chunks at once. The reverse
scan needs dR = T⁻ᵀ dṼ = T⁻ᵀ (w ⊙ K) dS + T⁻ᵀ scoresᵀ dO; the factors without dS are computed before. States
of the chunks are in the inputs' dtype and not kept from forward to backward.

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

from functools import partial

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from mdn_kernels.common import delta_kernels as kernels
from mdn_kernels.common.chunk_tables import CHUNK, Chunks
from mdn_kernels.common.normalize_triton import normalize

Launch = dict[str, int | str]


def launches(dtype: torch.dtype, K: int, V: int) -> dict[str, Launch]:
    """Tile sizes (powers of two of at least 16), launch options and float32 precision of each kernel.

    Half inputs use two stages or more and tiles of at least 64 channels (but for V in the scans), because of
    what ptxas 12.8 does with less on Hopper (momentum_delta_rule/README.md). Test changes on a card.
    """
    smallest = 16 if dtype == torch.float32 else 64
    whole_K, whole_V = (max(smallest, triton.next_power_of_2(x)) for x in (K, V))
    if dtype == torch.float32:
        common: Launch = {"PRECISION": "ieee", "num_warps": 8, "num_stages": 1}
        scan = common | {"BK": whole_K, "BV": 16, "num_warps": 8 if K <= 64 else 16}
        tiles = common | {"BK": min(32, whole_K), "BV": min(32, whole_V)}
        return {
            "prepare": common | {"BK": tiles["BK"]},
            "scan": scan,
            "restore": scan,
            "output": tiles,
            "solve_transposed": tiles,
            "reverse_scan": scan,
            "backward": tiles,
        }
    # What leaves the C × C arithmetic is rounded to 8 or 11 bits anyway: tf32 is enough inside.
    common = {"PRECISION": "tf32", "num_warps": 8, "num_stages": 2}
    scan = common | {"BK": whole_K, "BV": min(32, whole_V), "num_warps": 4}
    tiles = common | {"BK": min(64, whole_K), "BV": min(64, whole_V)}
    return {
        "prepare": common | {"BK": tiles["BK"], "num_warps": 4},
        "scan": scan,
        "restore": scan,
        "output": tiles | {"BV": min(128, whole_V)},
        "solve_transposed": tiles | {"num_warps": 4},
        "reverse_scan": scan,
        "backward": tiles | {"num_stages": 3},
    }


def _scan(
    k: Tensor,
    p: Tensor | None,
    v: Tensor | None,
    inverse: Tensor,
    coefficients: Tensor,
    residual: Tensor,
    initial: Tensor | None,
    final: Tensor | None,
    chunks: Chunks,
    launch: dict[str, Launch],
) -> Tensor:
    """The states before each chunk [chunks, H, K, V]; with v also the residuals, without it from them."""
    B, T, H, K = k.shape
    V = residual.shape[-1]
    options = launch["restore" if v is None else "scan"]
    states = k.new_empty(chunks.count, H, K, V)
    kernels.scan[triton.cdiv(V, options["BV"]), chunks.sequences * H](
        k, p, v, inverse, coefficients, residual, initial, states, final,
        chunks.first, chunks.starts, B * T,
        H=H, K=K, V=V, SOLVE=v is not None, **options,
    )  # fmt: skip
    return states


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    beta: Tensor,
    S: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final S, the residuals Ṽ, T⁻¹ and the scores [H, tokens, C], the coefficients [3, H, tokens].

    All tensors are contiguous.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    chunks, launch = Chunks.of(q, cu_seqlens), launches(q.dtype, K, V)
    o, residual = torch.empty_like(v), torch.empty_like(v)
    final = q.new_empty(chunks.sequences, H, K, V, dtype=torch.float32)
    inverse, scores = (q.new_empty(H, B * T, CHUNK) for _ in range(2))
    coefficients = q.new_empty(3, H, B * T, dtype=torch.float32)
    with torch.cuda.device_of(q):
        kernels.prepare[chunks.count, H](
            q, k, p, log_alpha, beta, inverse, scores, coefficients, *chunks.tables, B * T, scale,
            H=H, K=K, **launch["prepare"],
        )  # fmt: skip
        states = _scan(k, p, v, inverse, coefficients, residual, S, final, chunks, launch)
        kernels.output[triton.cdiv(V, launch["output"]["BV"]), chunks.count, H](
            q, scores, coefficients, residual, states, o, *chunks.tables, B * T, scale,
            H=H, K=K, V=V, **launch["output"],
        )  # fmt: skip
    return o, final, residual, inverse, scores, coefficients


def _backward(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    beta: Tensor,
    S: Tensor | None,
    cu_seqlens: Tensor | None,
    residual: Tensor,
    inverse: Tensor,
    scores: Tensor,
    coefficients: Tensor,
    scale: float,
    do: Tensor,
    dS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, p (empty without p), log_alpha, beta and the initial S."""
    B, T, H, K = q.shape
    V = residual.shape[-1]
    chunks, launch = Chunks.of(q, cu_seqlens), launches(q.dtype, K, V)
    written, dr = torch.empty_like(k), torch.empty_like(residual)
    initial_d = q.new_empty(chunks.sequences, H, K, V, dtype=torch.float32)
    states_d = q.new_empty(chunks.count, H, K, V)
    dq, dk, dp = torch.empty_like(q), torch.empty_like(k), q.new_empty(0 if p is None else p.shape)
    K_blocks = triton.cdiv(K, launch["backward"]["BK"])
    dlog_alpha, dbeta = (x.new_empty(K_blocks, *x.shape) for x in (log_alpha, beta))
    with torch.cuda.device_of(q):
        states = _scan(k, p, None, inverse, coefficients, residual, S, None, chunks, launch)
        kernels.solve_transposed[chunks.count, H](
            k, do, inverse, scores, coefficients, written, dr, *chunks.tables, B * T,
            H=H, K=K, V=V, **launch["solve_transposed"],
        )  # fmt: skip
        kernels.reverse_scan[triton.cdiv(V, launch["reverse_scan"]["BV"]), chunks.sequences * H](
            q, k if p is None else p, written, do, coefficients, dr, dS, states_d, initial_d,
            chunks.first, chunks.starts, B * T, scale,
            H=H, K=K, V=V, **launch["reverse_scan"],
        )  # fmt: skip
        kernels.backward[K_blocks, chunks.count, H](
            q, k, p, log_alpha, beta, do, dr, residual, states, states_d,
            dq, dk, dp, dlog_alpha, dbeta, *chunks.tables, B * T, scale,
            H=H, K=K, V=V, **launch["backward"],
        )  # fmt: skip
    return dq, dk, dr, dp, dlog_alpha.sum(0), dbeta.sum(0), initial_d


def _setup_context(ctx, inputs, output):
    q, k, _, p, log_alpha, beta, S, cu_seqlens, ctx.scale = inputs
    ctx.save_for_backward(q, k, p, log_alpha, beta, S, cu_seqlens, *output[2:])
    ctx.set_materialize_grads(False)  # most outputs have no gradient


def _differentiate(backward, ctx, do, dS, *_):
    p, S, residual = (ctx.saved_tensors[i] for i in (2, 5, 7))
    do = torch.zeros_like(residual) if do is None else do.contiguous()
    dS = None if dS is None else dS.contiguous()
    dq, dk, dv, dp, dlog_alpha, dbeta, dS = backward(*ctx.saved_tensors, ctx.scale, do, dS)
    dp, dS = None if p is None else dp, None if S is None else dS
    return dq, dk, dv, dp, dlog_alpha, dbeta, dS, None, None


# The same as custom operators, which torch.compile takes as they are, and without what those cost a call.
_forward_op = torch.library.custom_op("mdn_kernels::delta_rule", _forward, mutates_args=())
_backward_op = torch.library.custom_op("mdn_kernels::delta_rule_backward", _backward, mutates_args=())
_forward_op.register_autograd(partial(_differentiate, _backward_op), setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(once_differentiable(partial(_differentiate, _backward)))  # type: ignore[assignment]


@_forward_op.register_fake
def _(q, k, v, p, log_alpha, beta, S, cu_seqlens, scale):
    B, T, H, _ = q.shape
    inverse, scores = (q.new_empty(H, B * T, CHUNK) for _ in range(2))
    coefficients = q.new_empty(3, H, B * T, dtype=torch.float32)
    residual = torch.empty_like(v)
    return torch.empty_like(v), _fake_state(q, v, cu_seqlens), residual, inverse, scores, coefficients


@_backward_op.register_fake
def _(q, k, p, log_alpha, beta, S, cu_seqlens, residual, *_):
    dp = q.new_empty(0 if p is None else p.shape)
    dq, dk, dv, dlog_alpha, dbeta = (torch.empty_like(x) for x in (q, k, residual, log_alpha, beta))
    return dq, dk, dv, dp, dlog_alpha, dbeta, _fake_state(q, residual, cu_seqlens)


def _fake_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty(N, *q.shape[2:], v.shape[-1], dtype=torch.float32)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor | None]:
    """Comba with p, the gated delta rule without; the keywords are those of their public functions."""
    if normalize_qk:
        q, k = normalize(q), normalize(k)
        p = None if p is None else normalize(p)
    q, k, v, log_alpha, beta = (x.contiguous() for x in (q, k, v, log_alpha, beta))
    p, initial = (None if x is None else x.contiguous() for x in (p, initial_state))
    run = _forward_op if torch.compiler.is_compiling() else _Eager.apply
    o, S, *_ = run(q, k, v, p, log_alpha, beta, initial, cu_seqlens, scale)
    return o, S if output_final_state else None
