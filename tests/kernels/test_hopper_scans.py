"""v4_hopper's scans, run on the CPU in float64: what they compute, not what runs at the same time."""

from itertools import pairwise

import pytest
import torch
from gluon_on_cpu import Blocks, Machine, Pointer

from mdn_kernels.momentum_delta_rule import momentum_delta_rule
from mdn_kernels.testing import make_inputs

C = 64
GATED = ("log_alpha", "beta", "log_mu", "eta")


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture
def scans(machine):
    machine.load("mdn_kernels.momentum_delta_rule.v4_kernels")
    return machine.load("mdn_kernels.momentum_delta_rule.v4_scans")


def prepared(q, k, log_alpha, beta, log_mu, eta, scale):
    """T⁻¹, scores and coefficients of one chunk and head (README.md); zero behind the last token."""
    rows = len(q)
    q, k, log_alpha, beta, log_mu, eta = (
        torch.cat([x, x.new_zeros(C - rows, *x.shape[1:])]) for x in (q, k, log_alpha, beta, log_mu, eta)
    )
    A, U = log_alpha.cumsum(0), log_mu.cumsum(0)
    L_alpha, L_mu = (torch.tril((x[:, None] - x).tril().exp()) for x in (A, U))
    written = beta[:, None] * L_mu
    gamma = L_alpha @ written
    b = L_alpha @ (beta * U.exp())
    exists = (torch.arange(C) < rows).double()
    inverse = torch.linalg.inv(torch.eye(C) + (k @ k.T) * (gamma - written) * eta) * exists[:, None]
    a, u, b_read = A.exp(), U.exp(), b - beta * U.exp()
    coefficients = torch.stack([a * exists, b * exists, b_read * exists, gamma[-1] * eta, L_mu[-1] * eta, u])
    return inverse, scale * (q @ k.T) * gamma * eta, coefficients


def nan(*shape):
    return torch.full(shape, torch.nan, dtype=torch.float64)


def table(values):
    return Pointer(torch.tensor(values))


@pytest.mark.parametrize(
    ("K", "V", "BV", "offsets", "state"),
    [
        (64, 64, 32, [0, 1], True),
        (64, 128, 64, [0, 64, 264], True),  # a full chunk; five chunks in three spans
        (128, 64, 32, [0, 1, 71, 71, 150], True),  # a sequence of no tokens
        (64, 64, 64, [0, 0, 10, 75, 75], False),
        (256, 64, 64, [0, 140], True),
    ],
)
def test_scans_match_float64_recurrence(machine, scans, K, V, BV, offsets, state):
    H, span, scale = 2, 2, K**-0.5
    sequences = list(pairwise(offsets))
    N, T = len(sequences), offsets[-1]
    inputs = make_inputs(
        momentum_delta_rule, B=1, T=T, H=H, K=K, V=V, sequences=N, state=True, dtype=torch.float64
    )
    q, k, v, *gates = (inputs[name][0] for name in ("q", "k", "v", *GATED))
    initial = [x if state else torch.zeros_like(x) for x in inputs["initial_state"]]
    do, *final_d = (torch.randn(x.shape, dtype=torch.float64) for x in (v, *initial))

    def run(n, start, end, S, M):
        """The recurrence over tokens start to end of sequence n, and their part of the loss."""
        part = [x[None, start:end] for x in (q, k, values, *gates)]
        o, (S, M) = momentum_delta_rule(
            *part, scale=scale, initial_state=(S, M), output_final_state=True, version="recurrent"
        )
        return o[0], S, M, (o[0] * do[start:end]).sum()

    values = v.clone().requires_grad_()
    chunks = [(n, start) for n, (begin, end) in enumerate(sequences) for start in range(begin, end, C)]
    count = len(chunks) + 1  # one that is not used
    inverse, scores, coefficients = nan(count, H, C, C), nan(count, H, C, C), nan(count, H, 6, C)
    for i, (n, start) in enumerate(chunks):
        tokens = slice(start, min(start + C, sequences[n][1]))
        for h in range(H):
            parts = prepared(*(x[tokens, h] for x in (q, k, *gates)), scale)
            inverse[i, h], scores[i, h], coefficients[i, h] = parts
    tables = {
        "first": table([sum(m < n for m, _ in chunks) for n in range(N)]),
        "begin": table(offsets[:-1]),
        "end": table(offsets[1:]),
    }
    sizes = {"H": H, "K": K, "V": V, "BV": BV, "num_warps": BV // 8}
    grid = (V // BV, N * H)
    before = dict(zip(("initial_S", "initial_M"), map(Pointer, initial), strict=True))
    if not state:
        before = dict.fromkeys(before)

    def blocks(x, columns):
        return Blocks(x.view(len(x), -1), C, columns)

    squares = {
        "inverse_tma": Blocks(inverse.view(-1, C), C, C),
        "scores_tma": Blocks(scores.view(-1, C), C, C),
    }
    found = {name: nan(*v.shape) for name in ("residual", "o", "dr")}
    found |= {name: nan(N, H, K, V) for name in ("final_S", "final_M", "initial_dS", "initial_dM")}
    found |= {name: nan(9, N, H, K, V) for name in ("marks_S", "marks_M")}
    states, states_d = nan(count, H, K, 2 * V), nan(count, H, K, 2 * V)

    def out(*names):
        return {name: Pointer(found[name]) for name in names}

    machine.launch(
        scans.scan, grid, q_tma=blocks(q, K), k_tma=blocks(k, K), v_tma=blocks(v, BV), **squares,
        coefficients=Pointer(coefficients), **before, span=span, scale=scale, **tables, **sizes,
        **out("residual", "o", "final_S", "final_M", "marks_S", "marks_M"),
    )  # fmt: skip
    machine.launch(
        scans.restore, grid, k_tma=blocks(k, K), residual_tma=blocks(found["residual"], BV),
        states_tma=Blocks(states.view(-1, 2 * V), 64, 2 * BV), coefficients=Pointer(coefficients),
        **before, slots=tables["first"], **tables, **sizes,
    )  # fmt: skip
    machine.launch(
        scans.reverse_scan, grid, q_tma=blocks(q, K), k_tma=blocks(k, K), do_tma=blocks(do, BV), **squares,
        states_tma=Blocks(states_d.view(-1, 2 * V), 64, 2 * BV), coefficients=Pointer(coefficients),
        final_dS=Pointer(final_d[0]), final_dM=Pointer(final_d[1]), slots=tables["first"], scale=scale,
        **tables, **sizes, **out("dr", "initial_dS", "initial_dM"),
    )  # fmt: skip

    def same(x, y):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)

    def halves(x):
        return x.view(H, K, V // 16, 2, 16).permute(3, 0, 1, 2, 4).reshape(2, H, K, V)

    for n, (begin, end) in enumerate(sequences):
        S, M = (x[n : n + 1].clone().requires_grad_() for x in initial)
        if begin == end:
            same(found["final_S"][n], S[0].detach())
            same(found["initial_dM"][n], final_d[1][n])
            continue
        o, last_S, last_M, loss = run(n, begin, end, S, M)
        loss = loss + (last_S[0] * final_d[0][n]).sum() + (last_M[0] * final_d[1][n]).sum()
        dv, dS, dM = torch.autograd.grad(loss, (values, S, M))
        same(found["o"][begin:end], o.detach())
        same(found["dr"][begin:end], dv[begin:end])
        same(found["final_S"][n], last_S[0].detach())
        same(found["final_M"][n], last_M[0].detach())
        same(found["initial_dS"][n], dS[0])
        same(found["initial_dM"][n], dM[0])
        for slot, (m, start) in enumerate(chunks):
            if m != n:
                continue
            at_start = run(n, begin, start, S, M)[1:3] if start > begin else (S, M)
            S_i, M_i = (x.detach().requires_grad_() for x in at_start)
            same(halves(states[slot]), torch.cat([S_i, M_i]).detach())
            number = (start - begin) // C
            if number and number % span == 0:
                same(found["marks_S"][number // span - 1, n], S_i[0].detach())
                same(found["marks_M"][number // span - 1, n], M_i[0].detach())
            if number:  # the gradient after the chunk before
                _, last_S, last_M, loss = run(n, start, end, S_i, M_i)
                loss = loss + (last_S[0] * final_d[0][n]).sum() + (last_M[0] * final_d[1][n]).sum()
                same(halves(states_d[slot - 1]), torch.cat(torch.autograd.grad(loss, (S_i, M_i))))
        last = max(slot for slot, (m, _) in enumerate(chunks) if m == n)
        same(halves(states_d[last]), torch.stack([x[n] for x in final_d]))
