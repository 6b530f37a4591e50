"""Gated DeltaNet (arXiv 2412.06464). Per head:

    S_t = α_t S_{t−1} + β_t k_t (v_t − α_t S_{t−1}ᵀ k_t)ᵀ        o_t = S_tᵀ q_t / √K

    log α = −exp(A_log) softplus(a + dt_bias)        β = σ(b)        a, b linear in x_t, one a head

With `gate_bounds` it is the ablation "MDN without momentum": MDN's α_max = cos²θ and β_max = sin²θ at η = 1,
θ = arctan(exp(log_factor)), in place of a second state.

B batch · T tokens · D model width · H heads · K key channels · V value channels
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.config import Shape
from mdn.mixers.base import QKV, GatedOutput, HeadGates, LinearMixer, State, bounds, decay
from mdn.options import GdnOptions
from mdn.rules import RULES
from mdn_kernels.gated_delta_rule import gated_delta_rule


class Gdn(LinearMixer):
    op = "gated_delta_rule"
    rule = RULES["gdn"]

    def __init__(self, d_model: int, shape: Shape, options: GdnOptions, kernel: str | None = None):
        super().__init__(d_model, shape, options, kernel)
        self.qkv = QKV(d_model, shape, options.convolution)
        self.conv_channels = sum(self.qkv.sizes)
        self.ab = HeadGates(d_model, shape.heads, 2)
        self.A_log = nn.Parameter(torch.empty(shape.heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.log_factor = nn.Parameter(torch.empty(shape.heads)) if options.gate_bounds else None
        self.gate = nn.Linear(d_model, shape.heads * shape.head_v, bias=False)
        self.out = GatedOutput(d_model, shape, F.silu)

    def head_gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """log α and β, [B, T, H]."""
        a, b = self.ab(x_BTD).chunk(2, -1)
        log_alpha, beta = decay(a, self.A_log, self.dt_bias), b.sigmoid()
        if self.log_factor is not None:
            log_alpha_max, beta_max = bounds(1.0, self.log_factor)
            log_alpha, beta = log_alpha + log_alpha_max, beta * beta_max
        return log_alpha, beta

    def forward(
        self, x_BTD: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        q_BTHK, k_BTHK, v_BTHV, conv = self.qkv(x_BTD, state, cu_seqlens)
        gates = self.head_gates(x_BTD)
        o_BTHV, memory = self.apply_op(
            gated_delta_rule,
            *(q_BTHK, k_BTHK, v_BTHV, *gates),
            state=state,
            cu_seqlens=cu_seqlens,
            normalize_qk=True,
        )
        return self.out(o_BTHV, self.gate(x_BTD)), conv | memory if state is not None else None
