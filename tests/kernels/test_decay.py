"""Decay matrices against a double loop in float64."""

import math

import pytest
import torch

from mdn_kernels.common.decay import running_decay, segment_decay

TINY = torch.finfo(torch.float32).tiny  # below it, float32 has fewer digits
GATES = {
    "ordinary": lambda n: -torch.rand(n, generator=torch.Generator().manual_seed(0)),
    "zero": torch.zeros,
    "closed": lambda n: torch.full((n,), -math.inf),
    "fast": lambda n: torch.full((n,), -20.0),
    # Differences of running sums lose three digits here.
    "mixed": lambda n: torch.where(torch.arange(n) % 9 == 4, -1e4, -0.01),
    "mixed_closed": lambda n: torch.where(torch.arange(n) % 5 == 2, -math.inf, -0.01),
}


@pytest.mark.parametrize("length", [1, 2, 64])
@pytest.mark.parametrize("gates", GATES)
def test_segment_decay_matches_double_loop(gates, length):
    log_gate = GATES[gates](length)
    found = segment_decay(log_gate[None].repeat(3, 1))
    assert found.shape == (3, length, length)
    expected = torch.zeros(length, length, dtype=torch.float64)
    for i in range(length):
        for r in range(i + 1):
            expected[i, r] = math.exp(math.fsum(log_gate[r + 1 : i + 1].tolist()))
    torch.testing.assert_close(found.double(), expected.expand(3, -1, -1), rtol=5e-6, atol=TINY)


@pytest.mark.parametrize("gates", GATES)
def test_first_column_of_segment_decay_times_the_first_gate_is_the_running_decay(gates):
    log_gate = GATES[gates](64)
    product = segment_decay(log_gate)[:, 0] * log_gate[0].exp()
    torch.testing.assert_close(running_decay(log_gate), product, rtol=1e-5, atol=TINY)


@pytest.mark.parametrize("gates", GATES)
def test_gradients_are_finite_and_zero_at_closed_gates(gates):
    log_gate = GATES[gates](64).requires_grad_()
    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    ((segment_decay(log_gate) * weights).sum() + running_decay(log_gate).sum()).backward()
    assert log_gate.grad.isfinite().all()
    assert (log_gate.grad[log_gate.isneginf()] == 0).all()


def test_gradients_match_finite_differences():
    log_gate = -torch.rand(2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(segment_decay, log_gate.requires_grad_())
