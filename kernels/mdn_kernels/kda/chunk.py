"""KDA in chunks (equations: recurrent.py; derivation: README.md).

What is special here: with a decay for each channel, Σ_c x_ic y_jc exp(Σ_{j<r≤i} log α_rc) is no longer a
matrix product times a decay matrix. Factors exp(A_ic) and exp(−A_jc) of running sums A would overflow, so a
chunk is cut into blocks. Between two blocks the decay splits at a block boundary, which lies between j and i,
and both factors are ≤ 1; inside a block the pairs are formed one by one.

B batch · H heads · n chunks · C tokens of a chunk · m blocks of a chunk · L tokens of a block · K key ·
V value · X the vectors (keys and queries) that meet the same keys
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn_kernels.common.decay import running_decay, segment_decay
from mdn_kernels.common.delta_chunks import delta_chunks
from mdn_kernels.common.sequences import dense, from_chunks, to_chunks

BLOCK = 8  # tokens; the pairs inside blocks take T · BLOCK · K numbers a head


@dense(states=1)
def forward(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    q, k, v, log_alpha, beta = map(to_chunks, (q, k, v, log_alpha, beta))
    since_start = running_decay(log_alpha.mT).mT
    coupling_BHnCC, scores_BHnCC = decayed_products(torch.stack([k, q], dim=-3), k, log_alpha).unbind(-3)
    o, state_BHKV = delta_chunks(
        coupling_BHnCC=coupling_BHnCC,
        read_BHnCK=since_start * k,
        scores_BHnCC=scores_BHnCC,
        query_BHnCK=since_start * q,
        write_BHnCK=decay_until_end(log_alpha) * k,
        decay_BHnK=since_start[..., -1, :],
        v_BHnCV=v,
        beta_BHnC=beta,
        state_BHKV=state_BHKV,
    )
    return from_chunks(o, T), state_BHKV


def decay_until_end(log_alpha: Tensor) -> Tensor:
    """[..., C, K]: exp(Σ_{r>j} log α_r), what the last token still has of what token j wrote."""
    later = F.pad(log_alpha[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def decayed_products(x: Tensor, y: Tensor, log_alpha: Tensor) -> Tensor:
    """[..., X, C, C] of x [..., X, C, K] and y, log_alpha [..., C, K]: the sum above if j ≤ i, else 0."""
    C = y.shape[-2]
    filling = (0, 0, 0, -C % BLOCK)
    x_XmLK, y_mLK, log_alpha_mLK = (F.pad(z, filling).unflatten(-2, (-1, BLOCK)) for z in (x, y, log_alpha))
    blocks = y_mLK.shape[-3]

    pairs_mLLK = segment_decay(log_alpha_mLK.mT).movedim(-3, -1) * y_mLK[..., None, :, :]
    inside_XmLL = (pairs_mLLK @ x_XmLK.movedim(-4, -1)).movedim(-1, -4)

    since_start_mLK = running_decay(log_alpha_mLK.mT).mT
    x_XmLK = x_XmLK * since_start_mLK[..., None, :, :, :]
    y_mLK = y_mLK * decay_until_end(log_alpha_mLK)
    rows = []
    earlier_JK = y_mLK[..., 0, :0, :]  # y of all blocks before this one, decayed to its start
    for m in range(blocks):
        before_XLJ = x_XmLK[..., m, :, :] @ earlier_JK[..., None, :, :].mT
        row_XLJ = torch.cat([before_XLJ, inside_XmLL[..., m, :, :]], dim=-1)
        rows.append(F.pad(row_XLJ, (0, BLOCK * blocks - row_XLJ.shape[-1])))
        earlier_JK = torch.cat([earlier_JK * since_start_mLK[..., m, -1:, :], y_mLK[..., m, :, :]], dim=-2)
    return torch.cat(rows, dim=-2)[..., :C, :C]
