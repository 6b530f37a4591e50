"""Gated delta rule in chunks (equations: recurrent.py; derivation: README.md).

B batch · H heads · n chunks · C tokens of a chunk · K key · V value
"""

from torch import Tensor

from mdn_kernels.common.decay import running_decay, segment_decay
from mdn_kernels.common.delta_chunks import delta_chunks
from mdn_kernels.common.sequences import dense, from_chunks, to_chunks


@dense(states=1)
def forward(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    q, k, v, log_alpha, beta = map(to_chunks, (q, k, v, log_alpha, beta))
    decay_BHnCC = segment_decay(log_alpha)
    since_start = running_decay(log_alpha)[..., None]
    until_end = decay_BHnCC[..., -1, :, None]
    o, state_BHKV = delta_chunks(
        coupling_BHnCC=decay_BHnCC * (k @ k.mT),
        read_BHnCK=since_start * k,
        scores_BHnCC=decay_BHnCC * (q @ k.mT),
        query_BHnCK=since_start * q,
        write_BHnCK=until_end * k,
        decay_BHnK=since_start[..., -1, :],
        v_BHnCV=v,
        beta_BHnC=beta,
        state_BHKV=state_BHKV,
    )
    return from_chunks(o, T), state_BHKV
