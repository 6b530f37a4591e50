"""What the Triton versions share: the custom operator, its backward, and the kernels that need no recurrence.

What needs no state (Γ, T⁻¹, the scores Q Kᵀ ⊙ Γ ⊙ η) is computed for all chunks at once. A version brings the
scans over chunks (`Scans`): the forward, the states before each chunk again, which are not kept for the
backward, and the reverse scan for dS and dM. From them two kernels that are parallel over chunks form the
gradients.

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from mdn_kernels.common.chunk_tables import CHUNK, remembered
from mdn_kernels.common.normalize_triton import normalize
from mdn_kernels.momentum_delta_rule import v3_kernels as kernels

# The backward goes through long sequences in spans of at most SPAN_ELEMENTS (tokens × heads × K × V, of all
# sequences), so that chunk states exist for one span at a time; but in no less than SPAN_TOKENS of each
# sequence, because the states between spans are kept from the forward.
SPAN_ELEMENTS = 8192 * 6 * 256 * 512
SPAN_TOKENS = 1024

Launch = dict[str, int | str]
Pair = tuple[Tensor, Tensor]  # of S and of M
States = tuple[Tensor | None, Tensor | None]
ChunkStates = tuple[Tensor, ...]  # of each chunk's S and M, as the version lays them out


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of a span of all sequences are; see v3_kernels. Sizes depend on no values."""

    owner: Tensor  # [slots], sequence of each slot; N for those that are not used
    slots: Tensor  # [N], first slot of each sequence
    first: Tensor  # [N], first chunk of each sequence, among those of all spans
    begin: Tensor  # [N], first token of each sequence
    end: Tensor  # [N], token behind the last of each sequence

    @property
    def count(self) -> int:
        return self.owner.shape[0]

    @property
    def sequences(self) -> int:
        return self.begin.shape[0]

    @property
    def tables(self) -> tuple[Tensor | int, ...]:
        return self.owner, self.slots, self.first, self.begin, self.end, self.sequences


class Layout(NamedTuple):
    """All chunks, and the same in spans of `span` chunks of each sequence; packed sequences are one span."""

    whole: Chunks
    spans: tuple[Chunks, ...]
    span: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> "Layout":
        count, _, span = cls.sizes(q, v, cu_seqlens)
        if cu_seqlens is None:
            return cls._of_batch(*q.shape[:2], span, q.device)
        ends = cu_seqlens.to(q.device, torch.int32)
        last = ((ends.diff() + CHUNK - 1) // CHUNK).cumsum(0, dtype=torch.int32)
        first = F.pad(last[:-1], (1, 0))
        slot = torch.arange(count, device=q.device, dtype=torch.int32)
        owner = torch.searchsorted(last, slot, right=True).int()
        whole = Chunks(owner, first, first, ends[:-1], ends[1:])
        return cls(whole, (whole,), span)

    @classmethod
    @remembered
    def _of_batch(cls, B: int, T: int, span: int, device: torch.device) -> "Layout":
        each, sequence = triton.cdiv(T, CHUNK), torch.arange(B, device=device, dtype=torch.int32)

        def part(start: int, stop: int) -> Chunks:
            size = stop - start
            owner = torch.arange(B * size, device=device, dtype=torch.int32) // size
            begin, end = sequence * T + start * CHUNK, sequence * T + min(stop * CHUNK, T)
            return Chunks(owner, sequence * size, sequence * each + start, begin, end)

        spans = tuple(part(start, min(start + span, each)) for start in range(0, each, span))
        return cls(part(0, each), spans, span)

    @staticmethod
    def sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int]:
        """Chunks (of packed sequences the most there can be), spans, and chunks of a sequence in a span."""
        B, T, H, K = q.shape
        if cu_seqlens is not None:
            chunks = T // CHUNK + cu_seqlens.shape[0] - 1
            return chunks, 1, chunks
        span = max(SPAN_TOKENS, SPAN_ELEMENTS // (B * H * K * v.shape[-1])) // CHUNK
        each = triton.cdiv(T, CHUNK)
        return B * each, triton.cdiv(each, span), span


class Kept(NamedTuple):
    """What is kept of the forward: what needs no state, for each chunk, and the states between spans."""

    inverse: Tensor  # T⁻¹ [chunks, H, C, C]
    scores: Tensor  # scale · (Q Kᵀ) ⊙ Γ ⊙ η [chunks, H, C, C]
    coefficients: Tensor  # [chunks, H, 6, C], rows as in v3_kernels
    marks_S: Tensor  # [spans − 1, N, H, K, V]
    marks_M: Tensor

    @classmethod
    def empty(cls, q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> "Kept":
        (H, K), V = q.shape[2:], v.shape[-1]
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        chunks, spans, _ = Layout.sizes(q, v, cu_seqlens)
        squares = pair(q, chunks, H, CHUNK, CHUNK)
        coefficients = q.new_empty(chunks, H, 6, CHUNK, dtype=torch.float32)
        return cls(*squares, coefficients, *pair(q, spans - 1, N, H, K, V, dtype=torch.float32))


class Scans(Protocol):
    """A version: the kernels that carry the states from chunk to chunk. `initial` and `final` may be None."""

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept, initial: States, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Pair]:
        """o, the residuals Ṽ [B, T, H, V], and the final states [N, H, K, V]; fills the marks."""

    def states(self, k: Tensor, residual: Tensor, kept: Kept, initial: States, chunks: Chunks) -> ChunkStates:
        """The states before each chunk."""

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        do: Tensor,
        dr: Tensor,
        kept: Kept,
        final: States,
        chunks: Chunks,
        scale: float,
    ) -> tuple[ChunkStates, Pair]:
        """dS and dM after each chunk, and before the first [N, H, K, V]; writes dR = dV."""

    def outer(
        self,
        q: Tensor,
        k: Tensor,
        do: Tensor,
        dr: Tensor,
        residual: Tensor,
        kept: Kept,
        states: ChunkStates,
        states_d: ChunkStates,
        chunks: Chunks,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What dq and dk get from the states, [slots, H, C, K] in float32, and for the coefficients, summed
        over blocks of key channels: `sums` [slots, H, blocks, 5, C] and `inner` [slots, H, blocks, 3]."""


def tiles(dtype: torch.dtype, K: int, V: int) -> Launch:
    """Tile sizes (powers of two of at least 16), launch options and float32 precision, the same for the
    kernels here and for most of the others.

    On Hopper, tensor-core products outside a pipelined loop (num_stages=1, or a loop of one step) can come
    out wrong, or end in an illegal memory access, with ptxas 12.8, which Triton 3.6 and 3.7 bring along; not
    with ptxas 13.0. So half inputs use two stages or more, and small heads the tiles of 64 channels
    (inner_backward failed with a tile of 32 × 64); float32 does without tensor cores. Test changes on a card.
    """
    if dtype == torch.float32:
        width, precision, stages = 32, "ieee", 1
    else:  # what leaves the C × C arithmetic is rounded to 8 or 11 bits anyway: tf32 is enough inside
        width, precision, stages = 64, "tf32", 2
    BK, BV = min(width, whole(K, dtype)), min(width, whole(V, dtype))
    return {"BK": BK, "BV": BV, "PRECISION": precision, "num_warps": 8, "num_stages": stages}


def whole(channels: int, dtype: torch.dtype) -> int:
    """The smallest tile that holds all channels."""
    return max(16 if dtype == torch.float32 else 64, triton.next_power_of_2(channels))


def pair(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Pair:
    return like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=dtype)


def _scans(version: str) -> Scans:
    return import_module(f"{__package__}.{version}").SCANS


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final S and M, the residuals Ṽ, and `Kept`. All tensors are contiguous.

    Without `save_residual` the backward keeps none of it.
    """
    H, K = q.shape[2:]
    layout, kept = Layout.of(q, v, cu_seqlens), Kept.empty(q, v, cu_seqlens)
    options = tiles(q.dtype, K, K)
    del options["BV"]
    if q.dtype != torch.float32:
        options |= {"num_warps": 4, "num_stages": 3}
    with torch.cuda.device_of(q):
        kernels.prepare[layout.whole.count, H](
            q, k, log_alpha, beta, log_mu, eta, *kept[:3], *layout.whole.tables, scale, H=H, K=K, **options
        )
        o, residual, final = _scans(version).outputs(q, k, v, kept, (S, M), layout, scale)
    return o, *final, residual, *kept


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
    saved: list[Tensor],
    scale: float,
    version: str,
    do: Tensor,
    dS: Tensor | None,
    dM: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the gates, and the initial S and M.

    `values` are the residuals Ṽ and `saved` is `Kept`; or v and nothing, and the forward runs again.
    """
    (H, K), V = q.shape[2:], values.shape[-1]
    gates = log_alpha, beta, log_mu, eta
    residual = values
    if not saved:
        residual, *saved = _forward(
            q, k, values, *gates, S, M, cu_seqlens, scale, version, save_residual=False
        )[3:]
    scans, kept = _scans(version), Kept(*saved)
    dq, dk, dr = torch.empty_like(q), torch.empty_like(k), torch.empty_like(values)
    dgates = [torch.empty_like(x) for x in gates]
    options = tiles(q.dtype, K, V)
    if q.dtype != torch.float32:
        options |= {"num_warps": 4, "num_stages": 3}
    after: States = (dS, dM)
    with torch.cuda.device_of(q):
        for number, chunks in reversed(list(enumerate(Layout.of(q, values, cu_seqlens).spans))):
            before: States = (kept.marks_S[number - 1], kept.marks_M[number - 1]) if number else (S, M)
            states = scans.states(k, residual, kept, before, chunks)
            states_d, initial = scans.gradients(q, k, do, dr, kept, after, chunks, scale)
            after = initial
            dq_outer, dk_outer, sums, inner = scans.outer(
                q, k, do, dr, residual, kept, states, states_d, chunks, scale
            )
            del states, states_d
            kernels.inner_backward[chunks.count, H](
                q, k, *gates, do, dr, residual, sums, inner, dq_outer, dk_outer, dq, dk, *dgates,
                *chunks.tables, scale, H=H, K=K, V=V, BLOCKS=sums.shape[2], **options,
            )  # fmt: skip
    dlog_alpha, dbeta, dlog_mu, deta = dgates
    return dq, dk, dr, dlog_alpha, dbeta, dlog_mu, deta, *initial


def _setup_context(ctx, inputs, output):
    q, k, v, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *ctx.options, save_residual = inputs
    values, *saved = output[3:] if save_residual else [v]
    ctx.save_for_backward(q, k, values, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *saved)
    ctx.set_materialize_grads(False)  # most outputs have no gradient


def _differentiate(backward, ctx, do, dS, dM, *_):
    inputs, saved = ctx.saved_tensors[:10], list(ctx.saved_tensors[10:])
    values, S = inputs[2], inputs[7]
    do = torch.zeros_like(values) if do is None else do.contiguous()
    if dS is not None or dM is not None:
        dS, dM = (torch.zeros_like(y) if x is None else x.contiguous() for x, y in ((dS, dM), (dM, dS)))
    *gradients, dS, dM = backward(*inputs, saved, *ctx.options, do, dS, dM)
    if S is None:
        dS = dM = None
    return *gradients, dS, dM, None, None, None, None


# The same as custom operators, opaque to torch.compile; and without their overhead of a millisecond a call.
_forward_op = torch.library.custom_op("mdn_kernels::momentum_delta_rule", _forward, mutates_args=())
_backward_op = torch.library.custom_op(
    "mdn_kernels::momentum_delta_rule_backward", _backward, mutates_args=()
)
_forward_op.register_autograd(partial(_differentiate, _backward_op), setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    forward = staticmethod(_forward)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(once_differentiable(partial(_differentiate, _backward)))  # type: ignore[assignment]


@_forward_op.register_fake
def _(q, k, v, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *_):
    o, residual = pair(v, *v.shape)
    return o, *_fake_states(q, v, cu_seqlens), residual, *Kept.empty(q, v, cu_seqlens)


@_backward_op.register_fake
def _(q, k, values, log_alpha, beta, log_mu, eta, S, M, cu_seqlens, *_):
    gradients = (torch.empty_like(x) for x in (q, k, values, log_alpha, beta, log_mu, eta))
    return *gradients, *_fake_states(q, values, cu_seqlens)


def _fake_states(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Pair:
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return pair(q, N, *q.shape[2:], v.shape[-1], dtype=torch.float32)


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
        """`save_residual`: keep Ṽ and what needs no state for the backward, or nothing but the inputs."""
        if normalize_qk:
            q, k = normalize(q), normalize(k)
        tensors = [x.contiguous() for x in (q, k, v, log_alpha, beta, log_mu, eta)]
        initial = (None, None) if initial_state is None else [x.contiguous() for x in initial_state]
        run = _forward_op if torch.compiler.is_compiling() else _Eager.apply
        o, S, M, *_ = run(*tensors, *initial, cu_seqlens, scale, version, save_residual)
        return o, (S, M) if output_final_state else None

    return forward
