"""SSD in chunks (equations: recurrent.py; derivation: README.md).

B batch · H heads · n chunks · C tokens of a chunk · K key · V value
"""

import torch
from torch import Tensor

from mdn_kernels.common.decay import running_decay, segment_decay
from mdn_kernels.common.sequences import dense, from_chunks, to_chunks


@dense(states=1)
def forward(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    q, k, v, log_alpha = map(to_chunks, (q, k, v, log_alpha))
    decay_BHnCC = segment_decay(log_alpha)
    since_start = running_decay(log_alpha)[..., None]
    until_end = decay_BHnCC[..., -1, :, None]

    written_BHnKV = (until_end * k).mT @ v
    states = []
    for decay_BH1, written_BHKV in zip(
        since_start[..., -1, :].unbind(2), written_BHnKV.unbind(2), strict=True
    ):
        states.append(state_BHKV)
        state_BHKV = decay_BH1[..., None] * state_BHKV + written_BHKV
    o = (since_start * q) @ torch.stack(states, 2) + (decay_BHnCC * (q @ k.mT)) @ v
    return from_chunks(o, T), state_BHKV
