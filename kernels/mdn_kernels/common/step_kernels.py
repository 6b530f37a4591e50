# mypy: ignore-errors
"""The Triton kernel of step_triton.

B batch · H heads · K key channels · V value channels
"""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)  # of l2norm


@triton.jit
def load_vector(x, index, mask, NORMALIZE: tl.constexpr):
    x_i = tl.load(x + index, mask=mask, other=0.0).to(tl.float32)
    if NORMALIZE:
        x_i *= tl.rsqrt(tl.sum(x_i * x_i, 0) + EPS)
    return x_i


@triton.jit
def step(
    q, k, v, p, log_alpha, beta, log_mu, eta, S, M, o, final_S, final_M,
    q_stride, k_stride, v_stride, p_stride, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NORMALIZE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Of S_t = α S + β k ṽᵀ, with momentum S_t = α S − β M_t and M_t = μ M − η k ṽᵀ.

    p None: ṽ = v − α Sᵀ k, else v − Sᵀ p. beta None: β = 1 and ṽ = v. final_M None: no momentum.
    S None: zeros. CHANNELS: α has a value for each key channel.
    """
    block, b, h = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    at_gate = b * H + h
    channel, value = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    in_K, in_V = channel < K, value < V
    at = at_gate.to(tl.int64) * K * V + channel[:, None] * V + value[None, :]
    inside = in_K[:, None] & in_V[None, :]
    S_kv = tl.zeros((BK, BV), tl.float32)
    M_kv = tl.zeros((BK, BV), tl.float32)
    if S is not None:
        S_kv = tl.load(S + at, mask=inside, other=0.0)
        if M is not None:
            M_kv = tl.load(M + at, mask=inside, other=0.0)
    q_k = load_vector(q + b.to(tl.int64) * q_stride, h * K + channel, in_K, NORMALIZE)
    k_k = load_vector(k + b.to(tl.int64) * k_stride, h * K + channel, in_K, NORMALIZE)
    residual = load_vector(v + b.to(tl.int64) * v_stride, h * V + value, in_V, False)

    if p is not None:
        p_k = load_vector(p + b.to(tl.int64) * p_stride, h * K + channel, in_K, NORMALIZE)
        residual -= tl.sum(p_k[:, None] * S_kv, 0)
    if CHANNELS:
        S_kv *= tl.exp(tl.load(log_alpha + at_gate * K + channel, mask=in_K, other=0.0))[:, None]
    else:
        S_kv *= tl.exp(tl.load(log_alpha + at_gate))
    if beta is None:
        S_kv += k_k[:, None] * residual[None, :]
    else:
        if p is None:
            residual -= tl.sum(k_k[:, None] * S_kv, 0)
        beta_ = tl.load(beta + at_gate)
        if final_M is None:
            S_kv += (beta_ * k_k)[:, None] * residual[None, :]
        else:
            M_kv *= tl.exp(tl.load(log_mu + at_gate))
            M_kv -= (tl.load(eta + at_gate) * k_k)[:, None] * residual[None, :]
            S_kv -= beta_ * M_kv
            tl.store(final_M + at, M_kv, mask=inside)
    tl.store(final_S + at, S_kv, mask=inside)
    o_v = scale * tl.sum(q_k[:, None] * S_kv, 0)
    tl.store(o + at_gate.to(tl.int64) * V + value, o_v.to(o.dtype.element_ty), mask=in_V)
