r"""Comba (arXiv 2506.02475), step by step: the oracle of the others, and decoding.

    S_t = (α_t I − β_t k_t p_tᵀ) S_{t−1} + β_t k_t v_tᵀ
        = α_t S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ p_t)ᵀ
    o_t = S_tᵀ q_t

The residual has a read key p_t of its own and reads the state before the decay: with p_t = α_t k_t this is
the gated delta rule. B batch · T tokens · H heads · K key · V value
"""

import torch
from torch import Tensor

from mdn_kernels.common.sequences import dense


@dense(states=1)
def forward(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, log_alpha: Tensor, beta: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    inputs = (x.unbind(1) for x in (q, k, v, p, log_alpha.exp(), beta))
    outputs = []
    for q_BHK, k_BHK, v_BHV, p_BHK, alpha_BH, beta_BH in zip(*inputs, strict=True):
        residual_BHV = beta_BH[..., None] * (v_BHV - torch.einsum("bhkv,bhk->bhv", state_BHKV, p_BHK))
        state_BHKV = alpha_BH[..., None, None] * state_BHKV + k_BHK[..., :, None] * residual_BHV[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK))
    return torch.stack(outputs, 1), state_BHKV
