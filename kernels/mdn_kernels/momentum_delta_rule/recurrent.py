"""The momentum delta rule step by step: the definition, which every other version is tested against.

B sequences · T tokens · H heads · K key channels · V value channels
"""

import torch
from torch import Tensor

from mdn_kernels.common.sequences import dense


def step(
    S_BHKV: Tensor,
    M_BHKV: Tensor,
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    log_alpha_BH: Tensor,
    beta_BH: Tensor,
    log_mu_BH: Tensor,
    eta_BH: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token: the output [B, H, V] and the new S and M (Eqs. 3–5); q is already scaled."""
    alpha, beta, mu, eta = (
        g[..., None, None] for g in (log_alpha_BH.exp(), beta_BH, log_mu_BH.exp(), eta_BH)
    )
    q, k = q_BHK[..., None], k_BHK[..., None]
    S_BHKV = alpha * S_BHKV
    residual_BH1V = v_BHV[..., None, :] - k.mT @ S_BHKV
    M_BHKV = mu * M_BHKV - (eta * k) * residual_BH1V
    S_BHKV = S_BHKV - beta * M_BHKV
    return (q.mT @ S_BHKV).squeeze(-2), S_BHKV, M_BHKV


@dense(states=2)
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    log_mu: Tensor,
    eta: Tensor,
    S: Tensor,
    M: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = []
    for token in zip(*(x.unbind(1) for x in (q, k, v, log_alpha, beta, log_mu, eta)), strict=True):
        o_BHV, S, M = step(S, M, *token)
        outputs.append(o_BHV)
    return torch.stack(outputs, 1), S, M
