# mypy: ignore-errors
"""RMSNorm over a head's channels times an activation of a gate, in one Triton kernel each way. The backward
keeps the inputs alone.

N rows (a token's head each) · V channels of a row · P programs
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ELEMENTS = 4096  # of a program's tile, 16 a thread


@triton.jit
def _rows(x, gate, weight, N, V, eps, SILU: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr):
    """Of a program's rows: where they lie, which there are, the normalised x, 1 / its size, the weight, the
    activation of the gate and its derivative."""
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)[:, None]
    v = tl.arange(0, BV)[None, :]
    at, there = n * V + v, (n < N) & (v < V)
    values = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    rate = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / V + eps)
    g = tl.load(gate + at, mask=there, other=0.0).to(tl.float32)
    opened = tl.sigmoid(g)
    slope = opened * (1 - opened)
    if SILU:
        slope = opened + g * slope
        opened = g * opened
    w = tl.load(weight + v, mask=v < V, other=0.0).to(tl.float32)
    return at, there, values * rate, rate, w, opened, slope


@triton.jit
def _forward(x, gate, weight, y, N, V, eps, SILU: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr):
    at, there, normal, _, w, opened, _ = _rows(x, gate, weight, N, V, eps, SILU, BN, BV)
    tl.store(y + at, (normal * w * opened).to(y.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    x, gate, weight, dy, dx, dgate, sums, N, V, eps, SILU: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """dx, dgate, and a program's share of the weight's gradient: sums [P, V]."""
    at, there, normal, rate, w, opened, slope = _rows(x, gate, weight, N, V, eps, SILU, BN, BV)
    given = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
    dnormal = given * w * opened
    along = tl.sum(dnormal * normal, 1, keep_dims=True) / V
    tl.store(dx + at, (rate * (dnormal - normal * along)).to(dx.dtype.element_ty), mask=there)
    tl.store(dgate + at, (given * w * normal * slope).to(dgate.dtype.element_ty), mask=there)
    v = tl.arange(0, BV)[None, :]
    dw = tl.sum(given * normal * opened, 0, keep_dims=True)
    tl.store(sums + tl.program_id(0).to(tl.int64) * V + v, dw, mask=v < V)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, weight_V: Tensor, silu: bool, eps: float) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        ctx.save_for_backward(x, gate, weight_V)
        ctx.options = silu, eps
        y = torch.empty_like(x)
        grid, tiles = _launch(x)
        with torch.cuda.device_of(x):
            _forward[grid](
                x, gate, weight_V, y, x.numel() // x.shape[-1], x.shape[-1], eps, SILU=silu, **tiles
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight_V = ctx.saved_tensors
        silu, eps = ctx.options
        dx, dgate = torch.empty_like(x), torch.empty_like(gate)
        grid, tiles = _launch(x)
        sums = torch.empty(*grid, x.shape[-1], dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            _backward[grid](
                *(x, gate, weight_V, dy.contiguous(), dx, dgate, sums),
                *(x.numel() // x.shape[-1], x.shape[-1], eps),
                SILU=silu,
                **tiles,
            )
        return dx, dgate, sums.sum(0).to(weight_V.dtype), None, None


def _launch(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and tile sizes (powers of two) and warps."""
    V = x.shape[-1]
    BV = triton.next_power_of_2(V)
    BN = max(1, ELEMENTS // BV)
    return (triton.cdiv(x.numel() // V, BN),), {"BN": BN, "BV": BV, "num_warps": 8}


def gated_rms_norm(x: Tensor, gate: Tensor, weight_V: Tensor, activation: str, eps: float) -> Tensor:
    """RMSNorm(x) ⊙ activation(gate), the norm over the last dimension; "sigmoid" or "silu"."""
    return _GatedRMSNorm.apply(x, gate, weight_V, {"sigmoid": False, "silu": True}[activation], eps)
