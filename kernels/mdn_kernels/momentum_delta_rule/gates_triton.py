"""MDN's gates in one Triton kernel each way: `Mdn.head_gates`, which has the formulas, on a GPU.

In torch every step of them is a launch, some 46 a layer, and a [B, T, H] tensor kept for the backward; here
the backward computes all from a, b, m, e again.

B batch · T tokens · H heads · C = 4 H numbers, those of a, then b, m, e
"""

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from mdn_kernels.momentum_delta_rule import gates_kernels as kernels

ELEMENTS = 512  # of a program's tile, 4 a thread

Gates = tuple[Tensor, Tensor, Tensor, Tensor]


def launch(rows: int, H: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and sizes of a tile (powers of two) and warps."""
    BH = triton.next_power_of_2(H)
    BT = max(1, ELEMENTS // BH)
    return (triton.cdiv(rows, BT),), {"H": H, "BT": BT, "BH": BH, "num_warps": 4}


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        abme_BTC: Tensor,
        slope: float,
        log_mu_min: float | None,
        alpha_bound: bool,
        beta_bound: bool,
        *parameters: Tensor | None,
    ) -> Gates:
        B, T, C = abme_BTC.shape
        grid, options = launch(B * T, C // 4)
        log_alpha, beta, log_mu, eta = (abme_BTC.new_empty(B, T, C // 4) for _ in range(4))
        with torch.cuda.device_of(abme_BTC):
            kernels.forward[grid](
                abme_BTC, *parameters, log_alpha, beta, log_mu, eta,
                B * T, slope, log_mu_min, ALPHA=alpha_bound, BETA=beta_bound, **options,
            )  # fmt: skip
        return log_alpha, beta, log_mu, eta

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = inputs[1:5]
        ctx.save_for_backward(inputs[0], *inputs[5:])
        ctx.set_materialize_grads(False)  # zeros would be written for an output that nobody used

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        abme_BTC, *parameters = ctx.saved_tensors
        slope, log_mu_min, alpha_bound, beta_bound = ctx.options
        B, T, C = abme_BTC.shape
        grid, options = launch(B * T, C // 4)
        given = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        dabme = torch.empty_like(abme_BTC)
        sums = abme_BTC.new_empty(*grid, len(parameters), C // 4)
        with torch.cuda.device_of(abme_BTC):
            kernels.backward[grid](
                abme_BTC, *parameters, *given, dabme, sums,
                B * T, slope, log_mu_min, ALPHA=alpha_bound, BETA=beta_bound, **options,
            )  # fmt: skip
        found = zip(parameters, sums.sum(0), strict=True)
        return dabme, None, None, None, None, *(None if p is None else dp for p, dp in found)


def gates(
    abme_BTC: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    Mu_log: Tensor,
    mu_bias: Tensor,
    log_factor: Tensor | None,
    *,
    tau: float,
    eta: str,
    log_mu_min: float | None,
    alpha_bound: bool,
    beta_bound: bool,
) -> Gates:
    """log α, β, log μ and η, [B, T, H] each, contiguous.

    abme_BTC is float32; the parameters are [H], log_factor None with neither bound.
    """
    slope = 2 / tau if eta == "tanh" else 1.0  # tanh(x) + 1 = 2 σ(2x), which keeps its digits near 0
    of_decays = [p.float() for p in (A_log, dt_bias, Mu_log, mu_bias)]
    parameters = (*of_decays, None if log_factor is None else log_factor.float())
    return _Gates.apply(abme_BTC.contiguous(), slope, log_mu_min, alpha_bound, beta_bound, *parameters)
