"""Comba (arXiv 2506.02475): the delta rule in closed loop, whose output is corrected too. Per head:

    S_t = α_t S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ p_t)ᵀ        o_t = S_tᵀ (q_t − D p_t) / √K

    p = σ(decay) k        log α = −exp(A_log) softplus(a + dt_bias)        β = σ(b)

FLA's layer, which the baselines follow, normalises q, k and p, which undoes the scale of p in the read: there
σ(decay) acts on the output correction alone, and so it does here.

B batch · T tokens · D model width · H heads · K key channels · V value channels
"""

import torch
from torch import Tensor, nn

from mdn.config import Shape
from mdn.mixers.base import QKV, GatedOutput, HeadGates, LinearMixer, State, decay
from mdn.options import CombaOptions
from mdn.rules import RULES
from mdn_kernels.comba import comba


class Comba(LinearMixer):
    op = "comba"
    rule = RULES["comba"]

    def __init__(self, d_model: int, shape: Shape, options: CombaOptions, kernel: str | None = None):
        super().__init__(d_model, shape, options, kernel)
        self.qkv = QKV(d_model, shape, options.convolution)
        self.conv_channels = sum(self.qkv.sizes)
        self.ab = HeadGates(d_model, shape.heads, 2)
        self.A_log = nn.Parameter(torch.empty(shape.heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.decay = nn.Parameter(torch.empty(shape.heads))
        self.D = nn.Parameter(torch.empty(shape.heads)) if options.output_correction else None
        self.gate = nn.Linear(d_model, shape.heads * shape.head_v, bias=False)
        self.out = GatedOutput(d_model, shape, torch.sigmoid)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        q_BTHK, k_BTHK, v_BTHV, conv = self.qkv(x_BTD, state, cu_seqlens)
        a, b = self.ab(x_BTD).chunk(2, -1)
        scale_H, normalize_qk = self.decay.sigmoid(), True
        p_BTHK = k_BTHK * scale_H[:, None].to(k_BTHK.dtype)
        if self.D is not None:  # q − D p
            (q_BTHK, k_BTHK, p_BTHK), normalize_qk = self.corrected(self.D * scale_H, q_BTHK, k_BTHK, p_BTHK)
        o_BTHV, memory = self.apply_op(
            comba,
            *(q_BTHK, k_BTHK, v_BTHV, p_BTHK, decay(a, self.A_log, self.dt_bias), b.sigmoid()),
            state=state,
            cu_seqlens=cu_seqlens,
            normalize_qk=normalize_qk,
        )
        return self.out(o_BTHV, self.gate(x_BTD)), conv | memory if state is not None else None
