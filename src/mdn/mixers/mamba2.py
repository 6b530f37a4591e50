"""Mamba2 (arXiv 2405.21060), a state-space model with a scalar decay. Per head, in the letters of the others:

    S_t = α_t S_{t−1} + B_t (Δ_t x_t)ᵀ        y_t = S_tᵀ C_t + D x_t

    Δ = softplus(dt + dt_bias)        log α = −exp(A_log) Δ

B and C (keys and queries, neither normalised nor scaled) are shared by all heads; x, B and C go through one
short convolution; then W_o RMSNorm(y ⊙ silu(z)) over all channels. The mixer is the whole block: no MLP.

B batch · T tokens · D model width · H heads · K state size · V head size · I = H·V inner width
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.config import Shape
from mdn.mixers.base import EPS, LinearMixer, ShortConvolution, State, precise
from mdn.options import Mamba2Options
from mdn.rules import RULES
from mdn_kernels.ssd import ssd


class Mamba2(LinearMixer):
    op = "ssd"
    rule = RULES["mamba2"]

    def __init__(self, d_model: int, shape: Shape, options: Mamba2Options, kernel: str | None = None):
        super().__init__(d_model, shape, options, kernel)
        self.inner, self.shape = shape.heads * shape.head_v, shape
        self.conv_channels = self.inner + 2 * shape.head_k
        self.in_proj = nn.Linear(d_model, self.inner + self.conv_channels + shape.heads, bias=False)
        sizes = (self.inner, shape.head_k, shape.head_k)
        self.conv = ShortConvolution(sizes, options.convolution, bias=True)
        self.A_log = nn.Parameter(torch.empty(shape.heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.D = nn.Parameter(torch.empty(shape.heads))
        self.norm = nn.RMSNorm(self.inner, eps=EPS)
        self.out = nn.Linear(self.inner, d_model, bias=False)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        H = self.shape.heads
        z_BTI, xbc, dt_BTH = self.in_proj(x_BTD).split([self.inner, self.conv_channels, H], -1)
        (x_BTI, b_BTK, c_BTK), conv = self.conv(xbc, state, cu_seqlens)
        x_BTHV = x_BTI.unflatten(-1, (H, -1))
        step_BTH = F.softplus(precise(dt_BTH) + precise(self.dt_bias))
        o_BTHV, memory = self.apply_op(
            ssd,
            *(y.unsqueeze(2).expand(-1, -1, H, -1) for y in (c_BTK, b_BTK)),
            (x_BTHV * step_BTH[..., None]).to(x_BTHV.dtype),
            -precise(self.A_log).exp() * step_BTH,
            state=state,
            cu_seqlens=cu_seqlens,
            scale=1.0,
        )
        y_BTHV = precise(o_BTHV) + precise(self.D)[:, None] * x_BTHV
        y_BTI = y_BTHV.flatten(-2) * F.silu(precise(z_BTI))
        y_BTI = F.rms_norm(y_BTI, self.norm.normalized_shape, precise(self.norm.weight), EPS)
        return self.out(y_BTI.to(o_BTHV.dtype)), conv | memory if state is not None else None
