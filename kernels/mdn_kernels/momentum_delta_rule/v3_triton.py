"""The momentum delta rule in Triton, forward and backward, by the chunk form of v2_segsum.

What changed from v2_segsum: what needs no state (Γ, T⁻¹, the scores Q Kᵀ ⊙ Γ ⊙ η) is computed for all chunks
at once, one scan carries S and M in registers and stores them before each chunk, and the outputs follow for
all chunks at once. The backward is written by hand: the same scan restores the states from the residuals Ṽ, a
reverse scan carries dS and dM, and two kernels that are parallel over chunks do the rest. The states of the
chunks are not kept from forward to backward.

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from mdn_kernels.common.normalize import l2norm
from mdn_kernels.momentum_delta_rule import v3_kernels as kernels

CHUNK = kernels.C.value

Launch = dict[str, int | str]


@dataclass(frozen=True)
class Chunks:
    """Where the chunks are, for tokens in one row; see v3_kernels. Sizes depend on no values."""

    owner: Tensor  # [count], sequence of each chunk; N for those that are not used
    first: Tensor  # [N + 1], first chunk of each sequence
    starts: Tensor  # [N + 1], first token of each sequence
    sequences: int

    @property
    def count(self) -> int:
        return self.owner.shape[0]

    @classmethod
    def of(cls, q: Tensor, cu_seqlens: Tensor | None) -> "Chunks":
        B, T = q.shape[:2]
        if cu_seqlens is None:
            each = triton.cdiv(T, CHUNK)
            starts, first = (
                torch.arange(0, (B + 1) * step, step, device=q.device, dtype=torch.int32)
                for step in (T, each)
            )
            owner = torch.arange(B * each, device=q.device, dtype=torch.int32) // each
            return cls(owner, first, starts, B)
        sequences = cu_seqlens.shape[0] - 1
        starts = cu_seqlens.to(q.device, torch.int32)
        counts = (starts.diff() + CHUNK - 1) // CHUNK
        first = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        chunk = torch.arange(T // CHUNK + sequences, device=q.device)  # at least as many as there can be
        return cls(torch.searchsorted(first[1:], chunk.int(), right=True).int(), first, starts, sequences)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.owner, self.first, self.starts, self.sequences


def launches(dtype: torch.dtype, K: int, V: int) -> dict[str, Launch]:
    """Tile sizes (powers of two of at least 16), launch options and float32 precision of each kernel.

    On Hopper, tensor-core products outside a pipelined loop (num_stages=1, or a loop of one step) can come
    out wrong, or end in an illegal memory access, with ptxas 12.8, which Triton 3.6 and 3.7 bring along; not
    with ptxas 13.0. So half inputs use two stages or more, and small heads the tiles of 64 channels
    (inner_backward failed with a tile of 32 × 64); float32 does without tensor cores. Test changes on a card.
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
            "reverse_scan": scan,
            "outer_backward": tiles,
            "inner_backward": tiles,
        }
    # What leaves the C × C arithmetic is rounded to 8 or 11 bits anyway: tf32 is enough inside.
    common = {"PRECISION": "tf32", "num_warps": 8, "num_stages": 2}
    scan = common | {"BK": whole_K, "BV": min(32, whole_V), "num_warps": 4}
    tiles = common | {"BK": min(64, whole_K), "BV": min(64, whole_V)}
    return {
        "prepare": common | {"BK": tiles["BK"], "num_warps": 4},
        "scan": scan | {"BV": 16},
        "restore": scan,
        "output": tiles | {"BV": min(128, whole_V)},
        "reverse_scan": scan,
        "outer_backward": tiles | {"num_stages": 3},
        "inner_backward": tiles | {"num_stages": 3},
    }


def _pair(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=dtype)


def _prepare(
    q: Tensor, k: Tensor, gates: list[Tensor], scale: float, chunks: Chunks, launch: dict[str, Launch]
) -> tuple[Tensor, Tensor, Tensor]:
    """T⁻¹ and the scores [H, tokens, C], and the coefficients [6, H, tokens]."""
    B, T, H, K = q.shape
    inverse, scores = _pair(q, H, B * T, CHUNK)
    coefficients = q.new_empty(6, H, B * T, dtype=torch.float32)
    kernels.prepare[chunks.count, H](
        q, k, *gates, inverse, scores, coefficients, *chunks.tables, B * T, scale,
        H=H, K=K, **launch["prepare"],
    )  # fmt: skip
    return inverse, scores, coefficients


def _scan(
    k: Tensor,
    v: Tensor | None,
    inverse: Tensor,
    coefficients: Tensor,
    residual: Tensor,
    initial: tuple[Tensor | None, Tensor | None],
    final: tuple[Tensor | None, Tensor | None],
    chunks: Chunks,
    launch: dict[str, Launch],
) -> tuple[Tensor, Tensor]:
    """The states before each chunk [chunks, H, K, V]; with v also the residuals, without it from them."""
    B, T, H, K = k.shape
    V = residual.shape[-1]
    options = launch["restore" if v is None else "scan"]
    states = _pair(k, chunks.count, H, K, V)
    kernels.scan[triton.cdiv(V, options["BV"]), chunks.sequences * H](
        k, v, inverse, coefficients, residual, *initial, *states, *final, chunks.first, chunks.starts, B * T,
        H=H, K=K, V=V, SOLVE=v is not None, **options,
    )  # fmt: skip
    return states


@torch.library.custom_op("mdn_kernels::momentum_delta_rule_v3", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    log_mu: Tensor,
    eta: Tensor,
    S: Tensor | None,
    M: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    save_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final S and M, the residuals Ṽ, and what `_prepare` returns. All tensors are contiguous.

    `save_residual` is for the backward only.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    chunks, launch = Chunks.of(q, cu_seqlens), launches(q.dtype, K, V)
    o, residual = torch.empty_like(v), torch.empty_like(v)
    final = _pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
    with torch.cuda.device_of(q):
        inverse, scores, coefficients = _prepare(q, k, [log_alpha, beta, log_mu, eta], scale, chunks, launch)
        states = _scan(k, v, inverse, coefficients, residual, (S, M), final, chunks, launch)
        kernels.output[triton.cdiv(V, launch["output"]["BV"]), chunks.count, H](
            q, scores, coefficients, residual, *states, o, *chunks.tables, B * T, scale,
            H=H, K=K, V=V, **launch["output"],
        )  # fmt: skip
    return o, *final, residual, inverse, scores, coefficients


@torch.library.custom_op("mdn_kernels::momentum_delta_rule_v3_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    log_mu: Tensor,
    eta: Tensor,
    S: Tensor | None,
    M: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor,
    scores: Tensor,
    coefficients: Tensor,
    scale: float,
    values_are_residuals: bool,
    do: Tensor,
    dS: Tensor | None,
    dM: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the gates, and the initial S and M; `values` are the residuals Ṽ or v."""
    B, T, H, K = q.shape
    V = values.shape[-1]
    gates = [log_alpha, beta, log_mu, eta]
    chunks, launch = Chunks.of(q, cu_seqlens), launches(q.dtype, K, V)
    residual = values if values_are_residuals else torch.empty_like(values)
    dr = torch.empty_like(values)
    initial = _pair(q, chunks.sequences, H, K, V, dtype=torch.float32)
    states_d = _pair(q, chunks.count, H, K, V)
    K_blocks = triton.cdiv(K, launch["outer_backward"]["BK"])
    sums = q.new_empty(5, K_blocks, H, B * T, dtype=torch.float32)
    inner = q.new_empty(3, K_blocks, chunks.count, H, dtype=torch.float32)
    dq_outer, dk_outer = _pair(q, B, T, H, K, dtype=torch.float32)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dlog_alpha, dbeta, dlog_mu, deta = dgates = [torch.empty_like(x) for x in gates]
    with torch.cuda.device_of(q):
        v = None if values_are_residuals else values
        states = _scan(k, v, inverse, coefficients, residual, (S, M), (None, None), chunks, launch)
        kernels.reverse_scan[triton.cdiv(V, launch["reverse_scan"]["BV"]), chunks.sequences * H](
            q, k, do, inverse, scores, coefficients, dr, dS, dM, *states_d, *initial,
            chunks.first, chunks.starts, B * T, scale,
            H=H, K=K, V=V, **launch["reverse_scan"],
        )  # fmt: skip
        kernels.outer_backward[K_blocks, chunks.count, H](
            q, k, do, dr, residual, coefficients, *states, *states_d, dq_outer, dk_outer, sums, inner,
            *chunks.tables, B * T, scale, H=H, K=K, V=V, **launch["outer_backward"],
        )  # fmt: skip
        kernels.inner_backward[chunks.count, H](
            q, k, *gates, do, dr, residual, sums, inner, dq_outer, dk_outer, dq, dk, *dgates,
            *chunks.tables, B * T, scale, H=H, K=K, V=V, BLOCKS=K_blocks, **launch["inner_backward"],
        )  # fmt: skip
    return dq, dk, dr, dlog_alpha, dbeta, dlog_mu, deta, *initial


def _fake_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _pair(q, N, *q.shape[2:], v.shape[-1], dtype=torch.float32)


@_forward.register_fake
def _(q, k, v, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *_):
    B, T, H, _ = q.shape
    coefficients = q.new_empty(6, H, B * T, dtype=torch.float32)
    o, residual = _pair(v, *v.shape)
    return o, *_fake_states(q, v, cu_seqlens), residual, *_pair(q, H, B * T, CHUNK), coefficients


@_backward.register_fake
def _(q, k, values, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *_):
    gradients = (torch.empty_like(x) for x in (q, k, values, log_alpha, beta, log_mu, eta))
    return *gradients, *_fake_states(q, values, cu_seqlens)


def _setup_context(ctx, inputs, output):
    q, k, v, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, ctx.scale, ctx.save_residual = inputs
    _, _, _, residual, *prepared = output
    values = residual if ctx.save_residual else v
    ctx.save_for_backward(q, k, values, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *prepared)
    ctx.set_materialize_grads(False)  # most outputs have no gradient


def _differentiate(ctx, do, dS, dM, *_):
    values, S = ctx.saved_tensors[2], ctx.saved_tensors[7]
    do = torch.zeros_like(values) if do is None else do.contiguous()
    if dS is not None or dM is not None:
        dS, dM = (torch.zeros_like(y) if x is None else x.contiguous() for x, y in ((dS, dM), (dM, dS)))
    *gradients, dS, dM = _backward(*ctx.saved_tensors, ctx.scale, ctx.save_residual, do, dS, dM)
    if S is None:
        dS = dM = None
    return *gradients, dS, dM, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    log_mu: Tensor,
    eta: Tensor,
    *,
    scale: float,
    initial_state: tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    normalize_qk: bool,
    save_residual: bool = True,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """`save_residual`: keep Ṽ for the backward instead of v, or solve for it again there."""
    if normalize_qk:
        q, k = (l2norm(x.float()).to(x.dtype) for x in (q, k))
    tensors = [x.contiguous() for x in (q, k, v, log_alpha, beta, log_mu, eta)]
    initial = (None, None) if initial_state is None else [x.contiguous() for x in initial_state]
    o, S, M, *_ = _forward(*tensors, *initial, cu_seqlens, scale, save_residual)
    return o, (S, M) if output_final_state else None
