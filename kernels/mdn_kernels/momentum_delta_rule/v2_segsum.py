"""The momentum delta rule in chunks, with coefficients that are products and sums of numbers in [0, 1].

What changed from v1_logspace: Γ = L_α diag(β) L_μ, where L_α[i, r] and L_μ[r, j] decay from a token to a
later one. Nothing is divided by a decay and nothing is subtracted, so that no gate, 0 included, makes it
overflow or lose digits. Γ' = (L_α − I) diag(β) L_μ holds the decay of the residual's read address and the
shift by one row, so P = diag(α) K is never formed. README.md has the derivation.

B sequences · H heads · n chunks · C tokens of a chunk · K key channels · V value channels
"""

import torch
from torch import Tensor

from mdn_kernels.common.decay import running_decay, segment_decay
from mdn_kernels.common.sequences import dense, from_chunks, to_chunks
from mdn_kernels.common.triangular import solve_unit_lower


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
    T, K, V = q.shape[1], q.shape[3], v.shape[3]
    q, k, v, log_alpha, beta, log_mu, eta = map(to_chunks, (q, k, v, log_alpha, beta, log_mu, eta))

    # How much of an error made at j is in S after token i (Γ), and in what token i reads (Γ');
    # likewise of the momentum M and the state S from before the chunk (b, b', a), and of M in M (u).
    L_alpha, L_mu = segment_decay(log_alpha), segment_decay(log_mu)  # [B, H, n, C, C]
    a, u = running_decay(log_alpha)[..., None], running_decay(log_mu)[..., None]
    later = L_alpha.tril(-1)
    written = beta[..., None] * L_mu
    gamma_read = later @ written
    gamma = gamma_read + written
    b_read = later @ (beta[..., None] * u)
    b = b_read + beta[..., None] * u

    # Residuals Ṽ = X + W [S; M] with the states from before the chunk.
    k_eta = eta[..., None] * k
    system = (k @ k_eta.mT) * gamma_read
    X, W = solve_unit_lower(system, torch.cat([v, -a * k, b_read * k], -1)).split([V, 2 * K], -1)
    read = torch.cat([a * q, -b * q], -1)
    attention = (q @ k_eta.mT) * gamma
    write = torch.cat([gamma[..., -1, :, None] * k_eta, -L_mu[..., -1, :, None] * k_eta], -1)

    # Only the states go from chunk to chunk.
    states, residuals = [], []
    per_chunk = (x.unbind(2) for x in (X, W, write.mT, a[..., -1:, :], b[..., -1:, :], u[..., -1:, :]))
    for X_BHCV, W_BHCK, write_BHKC, a_end, b_end, u_end in zip(*per_chunk, strict=True):
        state = torch.cat([S, M], -2)
        residual_BHCV = X_BHCV + W_BHCK @ state
        S_new, M_new = (write_BHKC @ residual_BHCV).split(K, -2)
        S, M = a_end * S - b_end * M + S_new, u_end * M + M_new
        states.append(state)
        residuals.append(residual_BHCV)

    o = read @ torch.stack(states, 2) + attention @ torch.stack(residuals, 2)
    return from_chunks(o, T), S, M
