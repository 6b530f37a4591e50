r"""SSD, Mamba2's state update (arXiv 2405.21060), step by step: the oracle of the others, and decoding.

    S_t = α_t S_{t−1} + k_t v_tᵀ
    o_t = S_tᵀ q_t

Mamba2's letters: q = C, k = B, v = Δ·x, log α = Δ·A. B batch · T tokens · H heads · K key · V value
"""

import torch
from torch import Tensor

from mdn_kernels.common.sequences import dense


@dense(states=1)
def forward(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    inputs = (x.unbind(1) for x in (q, k, v, log_alpha.exp()))
    outputs = []
    for q_BHK, k_BHK, v_BHV, alpha_BH in zip(*inputs, strict=True):
        state_BHKV = alpha_BH[..., None, None] * state_BHKV + k_BHK[..., :, None] * v_BHV[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK))
    return torch.stack(outputs, 1), state_BHKV
