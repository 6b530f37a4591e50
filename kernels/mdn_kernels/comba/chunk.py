"""Comba in chunks (equations: recurrent.py; derivation: README.md).

Unlike the gated delta rule, the residual of token i reads the state as token i − 1 left it, so what it reads
has decayed by one step less.

B batch · H heads · n chunks · C tokens of a chunk · K key · V value
"""

import torch.nn.functional as F
from torch import Tensor

from mdn_kernels.common.decay import running_decay, segment_decay
from mdn_kernels.common.delta_chunks import delta_chunks
from mdn_kernels.common.sequences import dense, from_chunks, to_chunks


@dense(states=1)
def forward(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, log_alpha: Tensor, beta: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    q, k, v, p, log_alpha, beta = map(to_chunks, (q, k, v, p, log_alpha, beta))
    decay_BHnCC = segment_decay(log_alpha)
    since_start = running_decay(log_alpha)[..., None]
    until_end = decay_BHnCC[..., -1, :, None]
    # Row i takes row i − 1's decay; row 0 reads the chunk's initial state, which has not decayed at all.
    decay_before_BHnCC = F.pad(decay_BHnCC[..., :-1, :], (0, 0, 1, 0))
    since_start_before = F.pad(since_start[..., :-1, :], (0, 0, 1, 0), value=1.0)
    o, state_BHKV = delta_chunks(
        coupling_BHnCC=decay_before_BHnCC * (p @ k.mT),
        read_BHnCK=since_start_before * p,
        scores_BHnCC=decay_BHnCC * (q @ k.mT),
        query_BHnCK=since_start * q,
        write_BHnCK=until_end * k,
        decay_BHnK=since_start[..., -1, :],
        v_BHnCV=v,
        beta_BHnC=beta,
        state_BHKV=state_BHKV,
    )
    return from_chunks(o, T), state_BHKV
