"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a decay for each key channel. Per head:

    S_t = (I − β_t k_t k_tᵀ) diag(α_t) S_{t−1} + β_t k_t v_tᵀ        o_t = S_tᵀ q_t / √K

    log α = −exp(A_log) softplus(f + dt_bias) in K channels        β = σ(b)
    f and the output gate come through a bottleneck of V channels

B batch · T tokens · D model width · H heads · K key channels · V value channels
"""

import torch
from torch import Tensor, nn

from mdn.config import Shape
from mdn.mixers.base import QKV, GatedOutput, HeadGates, LinearMixer, State, decay
from mdn.options import KdaOptions
from mdn.rules import RULES
from mdn_kernels.kda import kda


class Kda(LinearMixer):
    op = "kda"
    rule = RULES["kda"]

    def __init__(self, d_model: int, shape: Shape, options: KdaOptions, kernel: str | None = None):
        super().__init__(d_model, shape, options, kernel)
        self.qkv = QKV(d_model, shape, options.convolution)
        self.conv_channels = sum(self.qkv.sizes)
        self.b = HeadGates(d_model, shape.heads, 1)
        self.f = nn.Sequential(
            nn.Linear(d_model, shape.head_v, bias=False),
            nn.Linear(shape.head_v, shape.heads * shape.head_k, bias=False),
        )
        self.A_log = nn.Parameter(torch.empty(shape.heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads * shape.head_k))
        self.gate = nn.Sequential(
            nn.Linear(d_model, shape.head_v, bias=False),
            nn.Linear(shape.head_v, shape.heads * shape.head_v),
        )
        self.out = GatedOutput(d_model, shape, torch.sigmoid)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        q_BTHK, k_BTHK, v_BTHV, conv = self.qkv(x_BTD, state, cu_seqlens)
        f_BTHK = self.f(x_BTD).unflatten(-1, k_BTHK.shape[-2:])
        log_alpha_BTHK = decay(f_BTHK, self.A_log[:, None], self.dt_bias.unflatten(0, k_BTHK.shape[-2:]))
        o_BTHV, memory = self.apply_op(
            kda,
            *(q_BTHK, k_BTHK, v_BTHV, log_alpha_BTHK, self.b(x_BTD).sigmoid()),
            state=state,
            cu_seqlens=cu_seqlens,
            normalize_qk=True,
        )
        return self.out(o_BTHV, self.gate(x_BTD)), conv | memory if state is not None else None
