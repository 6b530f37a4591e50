"""Momentum DeltaNet (arXiv 2605.05838): the delta rule whose errors go through a momentum. Per head:

    ṽ_t = v_t − α_t S_{t−1}ᵀ k_t                    the error of the decayed memory's prediction
    M_t = μ_t M_{t−1} − η_t k_t ṽ_tᵀ
    S_t = α_t S_{t−1} − β_t M_t        o_t = S_tᵀ q_t / √K

From four numbers a head, a, b, m, e, linear in the token (τ: option `tau`):

    η = tanh(e / τ) + 1        θ = arctan(η exp(log_factor))
    log α = −exp(A_log) softplus(a + dt_bias) + log cos²θ        β = σ(b) sin²θ
    log μ = max(−exp(Mu_log) softplus(m + mu_bias), log_mu_min)

so that α + β ≤ 1. Before q and k are normalised, q ← q − d k with d = exp(D_log), Comba's output correction.

B batch · T tokens · D model width · H heads · K key channels · V value channels · C = 4 H
"""

import math

import torch
from torch import Tensor, nn

from mdn.config import Shape
from mdn.mixers.base import QKV, GatedOutput, HeadGates, LinearMixer, State, bounds, decay
from mdn.options import MdnOptions
from mdn.rules import RULES
from mdn_kernels.common import fused
from mdn_kernels.momentum_delta_rule import momentum_delta_rule


class Mdn(LinearMixer):
    op = "momentum_delta_rule"
    rule = RULES["mdn"]

    def __init__(self, d_model: int, shape: Shape, options: MdnOptions, kernel: str | None = None):
        super().__init__(d_model, shape, options, kernel)
        self.options = options
        self.tau = temperature(options.tau, d_model, shape.heads)
        self.qkv = QKV(d_model, shape, options.convolution)
        self.conv_channels = sum(self.qkv.sizes)
        self.abme = HeadGates(d_model, shape.heads, 4)
        self.A_log = nn.Parameter(torch.empty(shape.heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads))
        self.Mu_log = nn.Parameter(torch.empty(shape.heads))
        self.mu_bias = nn.Parameter(torch.empty(shape.heads))
        bounded = options.alpha_bound or options.beta_bound
        self.log_factor = nn.Parameter(torch.empty(shape.heads)) if bounded else None
        self.D_log = nn.Parameter(torch.empty(shape.heads)) if options.output_correction else None
        self.gate = nn.Linear(d_model, shape.heads * shape.head_v, bias=False)
        self.out = GatedOutput(d_model, shape, torch.sigmoid)

    def head_gates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log α, β, log μ and η, [B, T, H]."""
        abme_BTC = self.abme(x_BTD)
        if fused.launches(abme_BTC):
            from mdn_kernels.momentum_delta_rule import gates_triton

            return gates_triton.gates(
                abme_BTC,
                *(self.A_log, self.dt_bias, self.Mu_log, self.mu_bias, self.log_factor),
                tau=self.tau,
                eta=self.options.eta,
                log_mu_min=self.options.log_mu_min,
                alpha_bound=self.options.alpha_bound,
                beta_bound=self.options.beta_bound,
            )
        a, b, m, e = abme_BTC.chunk(4, -1)
        log_alpha, beta = decay(a, self.A_log, self.dt_bias), b.sigmoid()
        log_mu = decay(m, self.Mu_log, self.mu_bias)
        if self.options.log_mu_min is not None:
            log_mu = log_mu.clamp(min=self.options.log_mu_min)
        eta = torch.tanh(e / self.tau) + 1 if self.options.eta == "tanh" else 2 * e.sigmoid()
        if self.log_factor is not None:
            log_alpha_max, beta_max = bounds(eta, self.log_factor)
            if self.options.alpha_bound:
                log_alpha = log_alpha + log_alpha_max
            if self.options.beta_bound:
                beta = beta * beta_max
        return log_alpha, beta, log_mu, eta

    def forward(
        self, x_BTD: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        q_BTHK, k_BTHK, v_BTHV, conv = self.qkv(x_BTD, state, cu_seqlens)
        normalize_qk = True
        if self.D_log is not None:
            (q_BTHK, k_BTHK), normalize_qk = self.corrected(self.D_log.exp(), q_BTHK, k_BTHK)
        gates = self.head_gates(x_BTD)
        o_BTHV, memory = self.apply_op(
            momentum_delta_rule,
            *(q_BTHK, k_BTHK, v_BTHV, *gates),
            state=state,
            cu_seqlens=cu_seqlens,
            normalize_qk=normalize_qk,
        )
        return self.out(o_BTHV, self.gate(x_BTD)), conv | memory if state is not None else None


def temperature(tau: str, d_model: int, heads: int) -> float:
    """τ of η. The paper's text has √(d/h), its released configurations √d (400M) and √(d/8) (1.3B)."""
    named = {"sqrt(d/h)": d_model / heads, "sqrt(d)": d_model, "sqrt(d/8)": d_model / 8}
    return math.sqrt(named[tau]) if tau in named else float(tau)
