"""L2 normalisation of queries and keys in one Triton kernel each way, for the Triton versions; of both in one
where the queries are corrected first, q − d k.

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

ELEMENTS = 8192  # of a program's tiles, 32 a thread


def launch(B: int, T: int, H: int, K: int, pair: bool = False) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and tile sizes (powers of two) and warps; `pair`: a program has a tile of q and one of k."""
    BK = triton.next_power_of_2(K)
    BT = max(1, ELEMENTS // BK // (1 + pair))
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


class _CorrectedL2Norm(torch.autograd.Function):
    @staticmethod
    def forward(q_BTHK: Tensor, k_BTHK: Tensor, d_H: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        B, T, H, K = q_BTHK.shape
        y_q, y_k = (x.new_empty(B, T, H, K) for x in (q_BTHK, k_BTHK))
        r_q, r_k = (q_BTHK.new_empty(B, T, H, dtype=torch.float32) for _ in range(2))
        grid, options = launch(B, T, H, K, pair=True)
        with torch.cuda.device_of(q_BTHK):
            kernels.corrected_forward[grid](
                q_BTHK, k_BTHK, d_H, y_q, y_k, r_q, r_k, *q_BTHK.stride(), *k_BTHK.stride(), H, T,
                K=K, **options,
            )  # fmt: skip
        return y_q, y_k, r_q, r_k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output, inputs[2])  # neither q nor k, as above
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_q, dy_k, *_):
        y_q, y_k, r_q, r_k, d = ctx.saved_tensors
        dy_q, dy_k = (torch.zeros_like(y) if dy is None else dy for dy, y in ((dy_q, y_q), (dy_k, y_k)))
        B, T, H, K = y_q.shape
        grid, options = launch(B, T, H, K, pair=True)
        dq, dk, dd = torch.empty_like(y_q), torch.empty_like(y_k), d.new_empty(grid)
        with torch.cuda.device_of(y_q):
            kernels.corrected_backward[grid](
                y_q, y_k, r_q, r_k, d, dy_q, dy_k, dq, dk, dd, *dy_q.stride(), *dy_k.stride(), H, T,
                K=K, **options,
            )  # fmt: skip
        return dq, dk, dd.sum(0)


def normalize(x_BTHK: Tensor) -> Tensor:
    """l2norm, computed in float32, contiguous and in x's dtype; what Inductor fuses itself stays in torch."""
    if torch.compiler.is_compiling():
        return l2norm(x_BTHK.float()).to(x_BTHK.dtype).contiguous()
    return _L2Norm.apply(x_BTHK)[0]


def correct_and_normalize(q_BTHK: Tensor, k_BTHK: Tensor, d_H: Tensor) -> tuple[Tensor, Tensor]:
    """l2norm(q − d k) and l2norm(k), computed in float32, contiguous and in the inputs' dtype; in eager mode.

    Raises:
        ValueError: for shapes that do not match.
    """
    if q_BTHK.shape != k_BTHK.shape or d_H.shape != q_BTHK.shape[2:3]:
        q, k, d = (list(x.shape) for x in (q_BTHK, k_BTHK, d_H))
        raise ValueError(f"q {q}, k {k}, d {d}; expected q and k [B, T, H, K] of one shape and d [H]")
    return _CorrectedL2Norm.apply(q_BTHK, k_BTHK, d_H.float().contiguous())[:2]
