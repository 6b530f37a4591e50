"""What the Triton versions share: the custom operator, its backward, and the kernels that need no recurrence.

What needs no state (Γ, T⁻¹, the scores Q Kᵀ ⊙ Γ ⊙ η) is computed for all chunks at once. A version brings the
scans over chunks (`Scans`): the forward, the states before each chunk again, which are not kept for the
backward, and the reverse scan for dS and dM. From them two kernels that are parallel over chunks form the
gradients.

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from mdn_kernels.common.normalize import l2norm
from mdn_kernels.momentum_delta_rule import v3_kernels as kernels

CHUNK = kernels.C.value

Launch = dict[str, int | str]
Pair = tuple[Tensor, Tensor]  # of S and of M


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

    @staticmethod
    def number(q: Tensor, cu_seqlens: Tensor | None) -> int:
        """How many chunks there are; of packed sequences the most that there can be."""
        B, T = q.shape[:2]
        if cu_seqlens is None:
            return B * triton.cdiv(T, CHUNK)
        return T // CHUNK + cu_seqlens.shape[0] - 1

    @classmethod
    def of(cls, q: Tensor, cu_seqlens: Tensor | None) -> "Chunks":
        if cu_seqlens is None:
            return cls._of_batch(*q.shape[:2], q.device)
        count, sequences = cls.number(q, cu_seqlens), cu_seqlens.shape[0] - 1
        starts = cu_seqlens.to(q.device, torch.int32)
        counts = (starts.diff() + CHUNK - 1) // CHUNK
        first = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        chunk = torch.arange(count, device=q.device)
        return cls(torch.searchsorted(first[1:], chunk.int(), right=True).int(), first, starts, sequences)

    @classmethod
    @cache
    def _of_batch(cls, B: int, T: int, device: torch.device) -> "Chunks":
        each = triton.cdiv(T, CHUNK)
        starts, first = (
            torch.arange(0, (B + 1) * step, step, device=device, dtype=torch.int32) for step in (T, each)
        )
        return cls(torch.arange(B * each, device=device, dtype=torch.int32) // each, first, starts, B)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.owner, self.first, self.starts, self.sequences


class Prepared(NamedTuple):
    """What needs no state, for each chunk; kept for the backward."""

    inverse: Tensor  # T⁻¹ [chunks, H, C, C]
    scores: Tensor  # scale · (Q Kᵀ) ⊙ Γ ⊙ η [chunks, H, C, C]
    coefficients: Tensor  # [6, chunks, H, C], rows as in v3_kernels


class Scans(Protocol):
    """A version: the kernels that carry the states from chunk to chunk. `initial` and `final` may be None."""

    paired: bool  # chunk states of S and M are one tensor, see v3_kernels.load_paired

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, initial, chunks: Chunks, scale: float
    ) -> tuple[Tensor, Tensor, Pair]:
        """o, the residuals Ṽ [B, T, H, V], and the final states [N, H, K, V]."""

    def states(
        self, k: Tensor, values: Tensor, solve: bool, prepared: Prepared, initial, chunks: Chunks
    ) -> tuple[Tensor, Pair]:
        """The residuals, and the states before each chunk [chunks, H, K, V]; solve: from v, else from Ṽ."""

    def gradients(
        self, q: Tensor, k: Tensor, do: Tensor, prepared: Prepared, final, chunks: Chunks, scale: float
    ) -> tuple[Tensor, Pair, Pair]:
        """dR = dV, and dS and dM after each chunk [chunks, H, K, V] and before the first [N, H, K, V]."""


def tiles(dtype: torch.dtype, K: int, V: int) -> Launch:
    """Tile sizes (powers of two of at least 16), launch options and float32 precision, the same for the
    kernels here and for most of the others.

    On Hopper, tensor-core products outside a pipelined loop (num_stages=1, or a loop of one step) can come
    out wrong, or end in an illegal memory access, with ptxas 12.8, which Triton 3.6 and 3.7 bring along; not
    with ptxas 13.0. So half inputs use two stages or more, and small heads the tiles of 64 channels
    (inner_backward failed with a tile of 32 × 64); float32 does without tensor cores. Test changes on a card.
    """
    if dtype == torch.float32:
        width, rest = 32, {"PRECISION": "ieee", "num_stages": 1}
    else:  # what leaves the C × C arithmetic is rounded to 8 or 11 bits anyway: tf32 is enough inside
        width, rest = 64, {"PRECISION": "tf32", "num_stages": 2}
    return {"BK": min(width, whole(K, dtype)), "BV": min(width, whole(V, dtype)), "num_warps": 8, **rest}


def whole(channels: int, dtype: torch.dtype) -> int:
    """The smallest tile that holds all channels."""
    return max(16 if dtype == torch.float32 else 64, triton.next_power_of_2(channels))


def pair(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Pair:
    return like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=dtype)


def _prepare(q: Tensor, k: Tensor, gates: list[Tensor], scale: float, chunks: Chunks) -> Prepared:
    H, K = q.shape[2:]
    coefficients = q.new_empty(6, chunks.count, H, CHUNK, dtype=torch.float32)
    prepared = Prepared(*pair(q, chunks.count, H, CHUNK, CHUNK), coefficients)
    options = tiles(q.dtype, K, K)
    del options["BV"]
    half = q.dtype != torch.float32
    kernels.prepare[chunks.count, H](
        q,
        k,
        *gates,
        *prepared,
        *chunks.tables,
        scale,
        H=H,
        K=K,
        **options | ({"num_warps": 4} if half else {}),
    )
    return prepared


def _scans(version: str) -> Scans:
    return import_module(f"{__package__}.{version}").SCANS


@torch.library.custom_op("mdn_kernels::momentum_delta_rule", mutates_args=())
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
    version: str,
    save_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final S and M, the residuals Ṽ, and `Prepared`. All tensors are contiguous.

    `save_residual` is for the backward only.
    """
    chunks = Chunks.of(q, cu_seqlens)
    with torch.cuda.device_of(q):
        prepared = _prepare(q, k, [log_alpha, beta, log_mu, eta], scale, chunks)
        o, residual, final = _scans(version).outputs(q, k, v, prepared, (S, M), chunks, scale)
    return o, *final, residual, *prepared


@torch.library.custom_op("mdn_kernels::momentum_delta_rule_backward", mutates_args=())
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
    version: str,
    values_are_residuals: bool,
    do: Tensor,
    dS: Tensor | None,
    dM: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the gates, and the initial S and M; `values` are the residuals Ṽ or v."""
    (H, K), V = q.shape[2:], values.shape[-1]
    gates = [log_alpha, beta, log_mu, eta]
    chunks, prepared, scans = (
        Chunks.of(q, cu_seqlens),
        Prepared(inverse, scores, coefficients),
        _scans(version),
    )
    options = tiles(q.dtype, K, V)
    if q.dtype != torch.float32:
        options["num_stages"] = 3
    K_blocks = triton.cdiv(K, int(options["BK"]))
    sums = q.new_empty(5, K_blocks, chunks.count, H, CHUNK, dtype=torch.float32)
    inner = q.new_empty(3, K_blocks, chunks.count, H, dtype=torch.float32)
    dq_outer, dk_outer = pair(q, *q.shape, dtype=torch.float32)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dlog_alpha, dbeta, dlog_mu, deta = dgates = [torch.empty_like(x) for x in gates]
    with torch.cuda.device_of(q):
        residual, states = scans.states(k, values, not values_are_residuals, prepared, (S, M), chunks)
        dr, states_d, initial = scans.gradients(q, k, do, prepared, (dS, dM), chunks, scale)
        kernels.outer_backward[K_blocks, chunks.count, H](
            q, k, do, dr, residual, coefficients, *states, *states_d, dq_outer, dk_outer, sums, inner,
            *chunks.tables, scale, H=H, K=K, V=V, PAIRED=scans.paired, **options,
        )  # fmt: skip
        kernels.inner_backward[chunks.count, H](
            q, k, *gates, do, dr, residual, sums, inner, dq_outer, dk_outer, dq, dk, *dgates,
            *chunks.tables, scale, H=H, K=K, V=V, BLOCKS=K_blocks, **options,
        )  # fmt: skip
    return dq, dk, dr, dlog_alpha, dbeta, dlog_mu, deta, *initial


def _fake_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return pair(q, N, *q.shape[2:], v.shape[-1], dtype=torch.float32)


@_forward.register_fake
def _(q, k, v, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *_):
    H, count = q.shape[2], Chunks.number(q, cu_seqlens)
    coefficients = q.new_empty(6, count, H, CHUNK, dtype=torch.float32)
    o, residual = pair(v, *v.shape)
    return o, *_fake_states(q, v, cu_seqlens), residual, *pair(q, count, H, CHUNK, CHUNK), coefficients


@_backward.register_fake
def _(q, k, values, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *_):
    gradients = (torch.empty_like(x) for x in (q, k, values, log_alpha, beta, log_mu, eta))
    return *gradients, *_fake_states(q, values, cu_seqlens)


def _setup_context(ctx, inputs, output):
    q, k, v, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *ctx.options = inputs
    _, _, _, residual, *prepared = output
    values = residual if ctx.options[-1] else v
    ctx.save_for_backward(q, k, values, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *prepared)
    ctx.set_materialize_grads(False)  # most outputs have no gradient


def _differentiate(ctx, do, dS, dM, *_):
    values, S = ctx.saved_tensors[2], ctx.saved_tensors[7]
    do = torch.zeros_like(values) if do is None else do.contiguous()
    if dS is not None or dM is not None:
        dS, dM = (torch.zeros_like(y) if x is None else x.contiguous() for x, y in ((dS, dM), (dM, dS)))
    *gradients, dS, dM = _backward(*ctx.saved_tensors, *ctx.options, do, dS, dM)
    if S is None:
        dS = dM = None
    return *gradients, dS, dM, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def operator(version: str) -> Callable:
    """The version's `forward`, whose module has `SCANS`."""

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
        initial_state: Pair | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        normalize_qk: bool,
        save_residual: bool = True,
    ) -> tuple[Tensor, Pair | None]:
        """`save_residual`: keep Ṽ for the backward instead of v, or solve for it again there."""
        if normalize_qk:
            q, k = (l2norm(x.float()).to(x.dtype) for x in (q, k))
        tensors = [x.contiguous() for x in (q, k, v, log_alpha, beta, log_mu, eta)]
        initial = (None, None) if initial_state is None else [x.contiguous() for x in initial_state]
        o, S, M, *_ = _forward(*tensors, *initial, cu_seqlens, scale, version, save_residual)
        return o, (S, M) if output_final_state else None

    return forward
