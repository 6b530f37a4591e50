# mypy: ignore-errors
"""Triton kernels of MDN's gates (gates_triton.py launches them).

y [rows, 4 H] holds a, b, m and e of H heads a row, a row a token; a program takes some rows and all heads.
All tensors are contiguous and float32.
"""

import triton
import triton.language as tl


@triton.jit
def _log1p(x):
    """log(1 + x) for x ≥ 0: what rounding 1 + x changes, the factor undoes."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))


@triton.jit
def _sigmoid(x):
    """σ(x) and 1 − σ(x), each to its own last digits."""
    p = tl.exp(-tl.abs(x))
    larger, smaller = 1.0 / (1.0 + p), p / (1.0 + p)
    return tl.where(x > 0.0, larger, smaller), tl.where(x > 0.0, smaller, larger)


@triton.jit
def _decay(raw, rate_log, bias):
    """−exp(rate_log) softplus(raw + bias), and its derivative by raw."""
    x, rate = raw + bias, tl.exp(rate_log)
    softplus = tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x)))
    sigma, _ = _sigmoid(x)
    return -rate * softplus, -rate * sigma


@triton.jit
def _tile(y, rows, H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr):
    """A program's rows [BT, 1] and heads [1, BH], which of them there are, and their a, b, m and e."""
    row = (tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT))[:, None]
    head = tl.arange(0, BH)[None, :]
    there = (row < rows) & (head < H)
    at = y + row * (4 * H) + head
    a = tl.load(at, mask=there, other=0.0)
    b = tl.load(at + H, mask=there, other=0.0)
    m = tl.load(at + 2 * H, mask=there, other=0.0)
    e = tl.load(at + 3 * H, mask=there, other=0.0)
    return row, head, there, a, b, m, e


@triton.jit
def _given(gradient, at, there):
    """Of an output that nobody used: zeros."""
    if gradient is None:
        return tl.zeros(there.shape, tl.float32)
    else:
        return tl.load(gradient + at, mask=there, other=0.0)


@triton.jit
def forward(
    y, A_log, dt_bias, Mu_log, mu_bias, log_factor, log_alpha, beta, log_mu, eta, rows, slope, log_mu_min,
    ALPHA: tl.constexpr, BETA: tl.constexpr, H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """η = 2 σ(slope e). log_mu_min None: no bound of log μ; log_factor None: neither ALPHA nor BETA."""
    row, head, there, a, b, m, e = _tile(y, rows, H, BT, BH)
    at, real = row * H + head, head < H
    log_alpha_, _ = _decay(
        a, tl.load(A_log + head, mask=real, other=0.0), tl.load(dt_bias + head, mask=real, other=0.0)
    )
    log_mu_, _ = _decay(
        m, tl.load(Mu_log + head, mask=real, other=0.0), tl.load(mu_bias + head, mask=real, other=0.0)
    )
    if log_mu_min is not None:
        log_mu_ = tl.where(log_mu_ < log_mu_min, log_mu_min, log_mu_)  # leaves NaN, unlike maximum
    beta_, _ = _sigmoid(b)
    sigma_e, _ = _sigmoid(slope * e)
    eta_ = 2.0 * sigma_e
    if log_factor is not None:
        s = eta_ * tl.exp(tl.load(log_factor + head, mask=real, other=0.0))
        if ALPHA:
            log_alpha_ -= _log1p(s * s)
        if BETA:
            beta_ *= s * s / (1.0 + s * s)
    tl.store(log_alpha + at, log_alpha_, mask=there)
    tl.store(beta + at, beta_, mask=there)
    tl.store(log_mu + at, log_mu_, mask=there)
    tl.store(eta + at, eta_, mask=there)


@triton.jit
def backward(
    y, A_log, dt_bias, Mu_log, mu_bias, log_factor, d_log_alpha, d_beta, d_log_mu, d_eta, dy, sums,
    rows, slope, log_mu_min,
    ALPHA: tl.constexpr, BETA: tl.constexpr, H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """dy, and this program's part of the parameters' gradients, a row of `sums` [programs, 5, H]."""
    row, head, there, a, b, m, e = _tile(y, rows, H, BT, BH)
    at, real = row * H + head, head < H
    d_log_alpha_, d_beta_ = _given(d_log_alpha, at, there), _given(d_beta, at, there)
    d_log_mu_, d_eta_ = _given(d_log_mu, at, there), _given(d_eta, at, there)
    log_alpha, by_a = _decay(
        a, tl.load(A_log + head, mask=real, other=0.0), tl.load(dt_bias + head, mask=real, other=0.0)
    )
    log_mu, by_m = _decay(
        m, tl.load(Mu_log + head, mask=real, other=0.0), tl.load(mu_bias + head, mask=real, other=0.0)
    )
    if log_mu_min is not None:
        d_log_mu_ = tl.where(log_mu >= log_mu_min, d_log_mu_, 0.0)
    sigma_b, rest_b = _sigmoid(b)
    sigma_e, rest_e = _sigmoid(slope * e)
    sums += tl.program_id(0).to(tl.int64) * (5 * H) + head
    if log_factor is not None:
        factor = tl.exp(tl.load(log_factor + head, mask=real, other=0.0))
        s = 2.0 * sigma_e * factor
        cos2 = 1.0 / (1.0 + s * s)
        d_s = tl.zeros((BT, BH), tl.float32)
        if ALPHA:
            d_s -= d_log_alpha_
        if BETA:
            d_s += d_beta_ * sigma_b * cos2
            d_beta_ *= s * s * cos2
        d_s *= 2.0 * s * cos2
        d_eta_ += d_s * factor
        tl.store(sums + 4 * H, tl.sum(d_s * s, 0, keep_dims=True), mask=real)
    da, dm = d_log_alpha_ * by_a, d_log_mu_ * by_m
    tl.store(sums, tl.sum(d_log_alpha_ * log_alpha, 0, keep_dims=True), mask=real)
    tl.store(sums + H, tl.sum(da, 0, keep_dims=True), mask=real)
    tl.store(sums + 2 * H, tl.sum(d_log_mu_ * log_mu, 0, keep_dims=True), mask=real)
    tl.store(sums + 3 * H, tl.sum(dm, 0, keep_dims=True), mask=real)
    dy += row * (4 * H) + head
    tl.store(dy, da, mask=there)
    tl.store(dy + H, d_beta_ * sigma_b * rest_b, mask=there)
    tl.store(dy + 2 * H, dm, mask=there)
    tl.store(dy + 3 * H, d_eta_ * (2.0 * slope) * sigma_e * rest_e, mask=there)
