r"""KDA, Kimi Delta Attention (arXiv 2510.26692), step by step: the oracle of the others, and decoding.

    S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ
        = Diag(α_t) S_{t−1} + β_t k_t (v_t − (Diag(α_t) S_{t−1})ᵀ k_t)ᵀ
    o_t = S_tᵀ q_t

Each key channel has a decay of its own, α_t ∈ [0, 1]^K; the residual reads the state after the decay.
B batch · T tokens · H heads · K key · V value
"""

import torch
from torch import Tensor

from mdn_kernels.common.sequences import dense


@dense(states=1)
def forward(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    inputs = (x.unbind(1) for x in (q, k, v, log_alpha.exp(), beta))
    outputs = []
    for q_BHK, k_BHK, v_BHV, alpha_BHK, beta_BH in zip(*inputs, strict=True):
        state_BHKV = alpha_BHK[..., None] * state_BHKV
        residual_BHV = beta_BH[..., None] * (v_BHV - torch.einsum("bhkv,bhk->bhv", state_BHKV, k_BHK))
        state_BHKV = state_BHKV + k_BHK[..., :, None] * residual_BHV[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK))
    return torch.stack(outputs, 1), state_BHKV
