"""The momentum delta rule in chunks by the paper's Algorithm 1 and Appendix E, as printed: for reproduction.

    ℓ = logcumsumexp(log(β + 1e-6) + U − A)          A, U: running sums of log α and log μ
    γ_ij = exp(A_i + ℓ_i − U_j) (1 − exp(ℓ_{j−1} − ℓ_i))

Where μ decays faster than α, ℓ converges within a few tokens: the bracket cancels to nothing while exp(−U_j)
explodes. In float32 the result is then wrong without a sign of it, or NaN (log μ = −2 at log α = −0.05, the
paper's own bound of μ). Never chosen automatically; use v2_segsum.

B sequences · H heads · n chunks · C tokens of a chunk · K key channels · V value channels
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn_kernels.common.sequences import dense, from_chunks, to_chunks
from mdn_kernels.common.triangular import solve_unit_lower


def _previous(x: Tensor, first: float) -> Tensor:
    """x of the token before, along the last dimension."""
    return F.pad(x[..., :-1], (1, 0), value=first)


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
    T = q.shape[1]
    q, k, v, log_alpha, beta, log_mu, eta = map(to_chunks, (q, k, v, log_alpha, beta, log_mu, eta))

    A, U = log_alpha.cumsum(-1), log_mu.cumsum(-1)  # [B, H, n, C]
    l = torch.logcumsumexp((beta + 1e-6).log() + U - A, -1)  # noqa: E741, the paper's ℓ
    causal = torch.ones(A.shape[-1], A.shape[-1], dtype=torch.bool, device=A.device).tril()
    exponent = ((A + l)[..., :, None] - U[..., None, :]).masked_fill(~causal, -torch.inf)
    bracket = (_previous(l, -torch.inf)[..., None, :] - l[..., :, None]).masked_fill(~causal, 0.0)
    gamma = exponent.exp() * (1 - bracket.exp())
    gamma_previous = F.pad(gamma[..., :-1, :], (0, 0, 1, 0))  # Γ⁻: row i reads the state after token i − 1
    a, b = A.exp(), (A + l).exp()
    a_previous, b_previous = _previous(a, 1.0), _previous(b, 0.0)

    p = log_alpha.exp()[..., None] * k
    k_hat = eta[..., None] * k
    system = (p @ k_hat.mT) * gamma_previous
    V_, Y, Z = (
        solve_unit_lower(system, x) for x in (v, a_previous[..., None] * p, b_previous[..., None] * p)
    )
    attention = (q @ k_hat.mT) * gamma
    momentum_decay = (U[..., -1:] - U).exp()

    outputs = []
    for i in range(A.shape[2]):
        residual = V_[:, :, i] - Y[:, :, i] @ S + Z[:, :, i] @ M
        q_i, k_i, a_i, b_i = q[:, :, i], k_hat[:, :, i], a[:, :, i, :, None], b[:, :, i, :, None]
        outputs.append(a_i * (q_i @ S) - b_i * (q_i @ M) + attention[:, :, i] @ residual)
        S, M = (
            a_i[..., -1:, :] * S - b_i[..., -1:, :] * M + (gamma[:, :, i, -1, :, None] * k_i).mT @ residual,
            U[:, :, i, -1, None, None].exp() * M - (momentum_decay[:, :, i, :, None] * k_i).mT @ residual,
        )
    return from_chunks(torch.stack(outputs, 2), T), S, M
