"""L2 normalisation of queries and keys in one Triton kernel each way, for the Triton versions.

In torch every step of it is a pass over float32 copies. The input may lie in memory as it likes (q, k and v
are slices of one convolution's output, whose channels may be far apart); the result is contiguous.

B batch · T tokens · H heads · K key channels
"""

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from mdn_kernels.common import normalize_kernels as kernels
from mdn_kernels.common.normalize import l2norm

ELEMENTS = 8192  # of a program's tile, 32 a thread


def launch(B: int, T: int, H: int, K: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and tile sizes (powers of two) and warps."""
    BK = triton.next_power_of_2(K)
    BT = max(1, ELEMENTS // BK)
    return (B * triton.cdiv(T, BT), H), {"BT": BT, "BK": BK, "num_warps": 8}


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(x_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        B, T, H, K = x_BTHK.shape
        y, r = x_BTHK.new_empty(B, T, H, K), x_BTHK.new_empty(B, T, H, dtype=torch.float32)
        grid, options = launch(B, T, H, K)
        with torch.cuda.device_of(x_BTHK):
            kernels.forward[grid](x_BTHK, y, r, *x_BTHK.stride(), H, T, K=K, **options)
        return y, r

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output)  # not the input: y is what the operator keeps anyway
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # r has none; zeros would be written for it

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        y, r = ctx.saved_tensors
        dx = torch.empty_like(y)
        grid, options = launch(*y.shape)
        with torch.cuda.device_of(y):
            kernels.backward[grid](y, r, dy, dx, *dy.stride(), *y.shape[2:0:-1], K=y.shape[3], **options)
        return dx


def normalize(x_BTHK: Tensor) -> Tensor:
    """l2norm, computed in float32, contiguous and in x's dtype; what Inductor fuses itself stays in torch."""
    if torch.compiler.is_compiling():
        return l2norm(x_BTHK.float()).to(x_BTHK.dtype).contiguous()
    return _L2Norm.apply(x_BTHK)[0]
