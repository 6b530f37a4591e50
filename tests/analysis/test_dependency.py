"""Which tokens an update depends on, against torch's autograd and against the operator itself."""

import numpy as np
import pytest
import torch

from mdn.analysis.dependency import ALPHA, BETA, ETA, MU, SCHEMES, dependence, example, run
from mdn_kernels.momentum_delta_rule import momentum_delta_rule

T, K, V, SIZE = 12, 4, 4, 4


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return example(T, K, V)


def expected_mask(scheme: str, direct: bool) -> np.ndarray:
    i, j = np.indices((T, T))
    match scheme:
        case "blockwise":
            return j // SIZE <= i // SIZE
        case "window" if direct:
            return (j <= i) & (j > i - SIZE)
    return j <= i


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dependence_is_exactly_where_the_scheme_has_it(tokens, scheme, direct):
    found = dependence(tokens, scheme, SIZE, K, direct)
    assert ((found > 0) == expected_mask(scheme, direct)).all()


def by_torch(x: torch.Tensor, scheme: str, hold: bool) -> torch.Tensor:
    """The updates written out a second time, from the loss and autograd for the gradients."""
    S, M, gradients, updates = torch.zeros(K, V, dtype=x.dtype), 0.0, [], []

    def gradient(t: int, S: torch.Tensor) -> torch.Tensor:
        at = ALPHA * (S.detach() if hold else S)
        at = at if at.requires_grad else at.requires_grad_()
        loss = 0.5 * (x[t, K:] - at.T @ x[t, :K]).square().sum()
        return ETA * torch.autograd.grad(loss, at, create_graph=True)[0]

    for start in range(0, T, SIZE if scheme == "blockwise" else 1):
        block = range(start, start + SIZE) if scheme == "blockwise" else [start]
        gradients += [gradient(t, S) for t in block]
        if scheme == "window":
            M = sum(MU**n * g for n, g in enumerate(reversed(gradients[-SIZE:])))
        else:
            M = MU * M + sum(gradients[t] for t in block)
        updates += [M for _ in block]
        S = ALPHA * S - BETA * M
    return torch.stack(updates)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dependence_is_what_autograd_finds(tokens, scheme, direct):
    x = torch.from_numpy(tokens)
    jacobian = torch.autograd.functional.jacobian(lambda x: by_torch(x, scheme, direct), x)
    expected = jacobian.square().sum((1, 2, 4)).sqrt().numpy()
    np.testing.assert_allclose(dependence(tokens, scheme, SIZE, K, direct), expected, rtol=1e-9, atol=1e-15)


def test_stepwise_is_the_operator(tokens):
    update, memory = run(tokens, "stepwise", 1, K)
    q, v = (torch.from_numpy(part)[None, :, None] for part in (tokens[:, :K], tokens[:, K:]))
    gates = [torch.full((1, T, 1), x, dtype=torch.float64) for x in (np.log(ALPHA), BETA, np.log(MU), ETA)]
    _, (S, M) = momentum_delta_rule(q, q, v, *gates, output_final_state=True, version="recurrent")
    np.testing.assert_allclose(update[-1], M[0, 0], atol=1e-12)
    np.testing.assert_allclose(ALPHA * memory[-1] - BETA * update[-1], S[0, 0], atol=1e-12)
