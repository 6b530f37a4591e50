# mypy: ignore-errors
"""SwiGLU of a product's two halves in one Triton kernel each way. The gradient is written where the halves
lie side by side, as the product before wants it.

N tokens · D channels of a half
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BN, BD = 4, 1024  # tokens and channels of a program, 16 elements a thread


@triton.jit
def _tile(N, D, BN: tl.constexpr, BD: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)[:, None]
    d = tl.program_id(1).to(tl.int64) * BD + tl.arange(0, BD)[None, :]
    return n, d, (n < N) & (d < D)


@triton.jit
def _forward(x, y, N, D, BN: tl.constexpr, BD: tl.constexpr):
    n, d, there = _tile(N, D, BN, BD)
    gate = tl.load(x + n * 2 * D + d, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + n * 2 * D + D + d, mask=there, other=0.0).to(tl.float32)
    tl.store(y + n * D + d, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=there)


@triton.jit
def _backward(x, dy, dx, N, D, BN: tl.constexpr, BD: tl.constexpr):
    n, d, there = _tile(N, D, BN, BD)
    gate = tl.load(x + n * 2 * D + d, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + n * 2 * D + D + d, mask=there, other=0.0).to(tl.float32)
    given = tl.load(dy + n * D + d, mask=there, other=0.0).to(tl.float32)
    rate = tl.sigmoid(gate)
    dgate = given * up * rate * (1 + gate * (1 - rate))
    dup = given * gate * rate
    tl.store(dx + n * 2 * D + d, dgate.to(dx.dtype.element_ty), mask=there)
    tl.store(dx + n * 2 * D + D + d, dup.to(dx.dtype.element_ty), mask=there)


def _launch(kernel, *tensors: Tensor, D: int) -> None:
    N = tensors[0].numel() // (2 * D)
    with torch.cuda.device_of(tensors[0]):
        kernel[triton.cdiv(N, BN), triton.cdiv(D, BD)](*tensors, N, D, BN=BN, BD=BD, num_warps=8)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        _launch(_forward, x, y, D=y.shape[-1])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _launch(_backward, x, dy.contiguous(), dx, D=dy.shape[-1])
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) ⊙ up, where x [..., 2 D] holds gate and then up; only x is kept for the backward."""
    return _SwiGLU.apply(x)
