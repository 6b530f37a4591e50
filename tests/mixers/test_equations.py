"""Each mixer against a transcription of its equations: float64, one head and one token after the other."""

import math

import pytest
import torch
from torch import Tensor

from .small import D_MODEL

sigmoid, tanh = torch.sigmoid, torch.tanh


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(x.exp())


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def unit(x: Tensor) -> Tensor:
    return x / (x.dot(x) + 1e-6).sqrt()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def convolve(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """[T, C] -> [T, C], then SiLU."""
    width = weight.shape[1]
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[0])
        for back in range(min(width, t + 1)):
            y = y + weight[:, width - 1 - back] * x[t - back]
        rows.append(silu(y + bias))
    return torch.stack(rows)


def heads(m, x: Tensor, H: int, K: int, V: int):
    """q, k [T, H, K], v [T, H, V] of a delta rule."""
    q, k, v = convolve(x @ m.qkv.proj.weight.T, m.qkv.conv.weight).split([H * K, H * K, H * V], 1)
    return q.view(-1, H, K), k.view(-1, H, K), v.view(-1, H, V)


def gated(m, o: Tensor, gate: Tensor, activation) -> Tensor:
    """o, gate [T, H, V] -> [T, D]."""
    rows = [
        torch.cat([rms(o_h, m.out.norm.weight) * activation(g_h) for o_h, g_h in zip(o_t, g_t, strict=True)])
        for o_t, g_t in zip(o, gate.view_as(o), strict=True)
    ]
    return torch.stack(rows) @ m.out.proj.weight.T


def delta(q, k, v, log_alpha, beta, read=None) -> Tensor:
    """The delta rule; log_alpha [T, H], or [T, H, K] for each channel; `read` is Comba's p [T, H, K]."""
    T, H, K = k.shape
    o = torch.zeros_like(v)
    for h in range(H):
        S = torch.zeros(K, v.shape[2], dtype=v.dtype)
        for t in range(T):
            decayed = log_alpha[t, h].exp().reshape(-1, 1) * S
            k_t = unit(k[t, h])
            predicted = decayed.T @ k_t if read is None else S.T @ unit(read[t, h])
            S = decayed + beta[t, h] * torch.outer(k_t, v[t, h] - predicted)
            o[t, h] = S.T @ unit(q[t, h]) / math.sqrt(K)
    return o


def gdn(m, x: Tensor) -> Tensor:
    q, k, v = heads(m, x, 2, 6, 10)
    a, b = (x @ m.ab.weight.T).split(2, 1)
    log_alpha, beta = -m.A_log.exp() * softplus(a + m.dt_bias), sigmoid(b)
    if m.log_factor is not None:
        theta = torch.arctan(m.log_factor.exp())
        log_alpha, beta = log_alpha + torch.log(torch.cos(theta) ** 2), beta * torch.sin(theta) ** 2
    return gated(m, delta(q, k, v, log_alpha, beta), x @ m.gate.weight.T, silu)


def comba(m, x: Tensor) -> Tensor:
    q, k, v = heads(m, x, 2, 6, 10)
    a, b = (x @ m.ab.weight.T).split(2, 1)
    p = sigmoid(m.decay)[:, None] * k
    q = q - m.D[:, None] * p
    log_alpha = -m.A_log.exp() * softplus(a + m.dt_bias)
    return gated(m, delta(q, k, v, log_alpha, sigmoid(b), read=p), x @ m.gate.weight.T, sigmoid)


def kda(m, x: Tensor) -> Tensor:
    q, k, v = heads(m, x, 2, 6, 10)
    f = x @ m.f[0].weight.T @ m.f[1].weight.T
    log_alpha = -m.A_log.exp()[:, None] * softplus(f + m.dt_bias).view(-1, 2, 6)
    gate = x @ m.gate[0].weight.T @ m.gate[1].weight.T + m.gate[1].bias
    return gated(m, delta(q, k, v, log_alpha, sigmoid(x @ m.b.weight.T)), gate, sigmoid)


def mdn(m, x: Tensor) -> Tensor:
    q, k, v = heads(m, x, 2, 6, 10)
    q = q - m.D_log.exp()[:, None] * k
    a, b, mu, e = (x @ m.abme.weight.T).split(2, 1)
    eta = tanh(e / math.sqrt(D_MODEL / 2)) + 1
    theta = torch.arctan(eta * m.log_factor.exp())
    alpha = (-m.A_log.exp() * softplus(a + m.dt_bias)).exp() * torch.cos(theta) ** 2
    beta = sigmoid(b) * torch.sin(theta) ** 2
    mu = (-m.Mu_log.exp() * softplus(mu + m.mu_bias)).clamp(min=-2).exp()
    o = torch.zeros_like(v)
    for h in range(2):
        S, M = torch.zeros(6, 10, dtype=v.dtype), torch.zeros(6, 10, dtype=v.dtype)
        for t in range(len(x)):
            k_t = unit(k[t, h])
            error = v[t, h] - S.T @ (alpha[t, h] * k_t)
            M = mu[t, h] * M - eta[t, h] * torch.outer(k_t, error)
            S = alpha[t, h] * S - beta[t, h] * M
            o[t, h] = S.T @ unit(q[t, h]) / math.sqrt(6)
    return gated(m, o, x @ m.gate.weight.T, sigmoid)


def mamba2(m, x: Tensor) -> Tensor:
    H, K, V = 4, 5, 12
    z, xbc, dt = (x @ m.in_proj.weight.T).split([H * V, H * V + 2 * K, H], 1)
    x_in, b, c = convolve(xbc, m.conv.weight, m.conv.bias).split([H * V, K, K], 1)
    step = softplus(dt + m.dt_bias)
    y = torch.zeros_like(x_in)
    for h in range(H):
        S = torch.zeros(K, V, dtype=x.dtype)
        for t in range(len(x)):
            x_t = x_in[t, h * V : (h + 1) * V]
            S = (-m.A_log[h].exp() * step[t, h]).exp() * S + step[t, h] * torch.outer(b[t], x_t)
            y[t, h * V : (h + 1) * V] = S.T @ c[t] + m.D[h] * x_t
    y = torch.stack([rms(row, m.norm.weight) for row in y * silu(z)])
    return y @ m.out.weight.T


def attention(m, x: Tensor) -> Tensor:
    H, R = 3, 8
    q, k, v = (part.view(-1, H, R) for part in (x @ m.qkv.weight.T).split(H * R, 1))

    def turn(y: Tensor, t: int) -> Tensor:  # as complex numbers
        angle = t * 10000.0 ** (-torch.arange(R // 2, dtype=torch.float64) * 2 / R)
        return torch.complex(y[: R // 2], y[R // 2 :]) * torch.polar(torch.ones_like(angle), angle)

    o = torch.zeros_like(v)
    for h in range(H):
        for t in range(len(x)):
            scores = [
                (turn(q[t, h], t) * turn(k[s, h], s).conj()).real.sum() / math.sqrt(R) for s in range(t + 1)
            ]
            o[t, h] = torch.softmax(torch.stack(scores), 0) @ v[: t + 1, h]
    return o.flatten(1) @ m.out.weight.T


ORACLES = {
    "attention": attention,
    "mamba2": mamba2,
    "gdn": gdn,
    "gdn-bounds": gdn,
    "comba": comba,
    "kda": kda,
    "mdn": mdn,
}


@torch.no_grad()
@pytest.mark.parametrize("T", [1, 67])
@pytest.mark.parametrize("variant", ORACLES)
def test_mixer_is_its_equation(variant, T, make_mixer):
    mixer = make_mixer(variant).double()
    for name, parameter in mixer.named_parameters():  # norms are 1, biases 0 at first: make them show
        if parameter.dim() == 1 and name.endswith(("norm.weight", "bias")):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    x = torch.randn(T, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(mixer(x[None])[0][0], ORACLES[variant](mixer, x), atol=1e-10, rtol=1e-8)
