"""The chunk form that gated_delta_rule, comba and kda share, once their decays are worked out.

Within a chunk that starts from the state S, the residuals R [C, V], already times β, solve

    (I + diag(β) P) R = diag(β) (V − W S)          P strictly lower triangular

and then  O = Q S + A R  and  S ← Diag(d) S + Eᵀ R.  The operators differ only in how P, W, A, Q, E and d are
decayed. R is linear in S, so the systems of all chunks are solved at once, against V and W; only the small
products that carry S from chunk to chunk wait for one another.

B batch · H heads · n chunks · C tokens of a chunk · K key · V value
"""

import torch
from torch import Tensor

from mdn_kernels.common.triangular import solve_unit_lower


def delta_chunks(
    *,
    coupling_BHnCC: Tensor,
    read_BHnCK: Tensor,
    scores_BHnCC: Tensor,
    query_BHnCK: Tensor,
    write_BHnCK: Tensor,
    decay_BHnK: Tensor,
    v_BHnCV: Tensor,
    beta_BHnC: Tensor,
    state_BHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, H, n, C, V] of all chunks and the state [B, H, K, V] after the last one.

    coupling: P, how much the residual of token i reads of the residual of token j < i (the rest is ignored).
    read: W, the keys that the residuals read with, decayed from the chunk's start.
    scores: A, how much the output of token i reads of the residual of token j ≤ i, lower triangular.
    query: Q, decayed from the chunk's start. write: E, the keys, decayed to the chunk's end.
    decay: d over the whole chunk, [B, H, n, K], or [B, H, n, 1] for all channels alike.
    """
    beta_BHnC1 = beta_BHnC[..., None]
    solved = solve_unit_lower(
        beta_BHnC1 * coupling_BHnCC, beta_BHnC1 * torch.cat([v_BHnCV, read_BHnCK], dim=-1)
    )
    u_BHnCV, w_BHnCK = solved.split([v_BHnCV.shape[-1], read_BHnCK.shape[-1]], dim=-1)

    states, residuals = [], []
    chunks = (x.unbind(2) for x in (u_BHnCV, w_BHnCK, write_BHnCK.mT, decay_BHnK))
    for u_BHCV, w_BHCK, write_BHKC, decay_BHK in zip(*chunks, strict=True):
        residual_BHCV = u_BHCV - w_BHCK @ state_BHKV
        states.append(state_BHKV)
        residuals.append(residual_BHCV)
        state_BHKV = decay_BHK[..., None] * state_BHKV + write_BHKC @ residual_BHCV
    o_BHnCV = query_BHnCK @ torch.stack(states, 2) + scores_BHnCC @ torch.stack(residuals, 2)
    return o_BHnCV, state_BHKV
