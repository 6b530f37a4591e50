"""The fused cross-entropy against float64: compiled on a card, or interpreted on the CPU, where the tests run
in their own process (see tests/interpreter.py).
"""

import pytest
import torch
import torch.nn.functional as F
from tests.interpreter import everywhere, interpret, starts_interpreter

pytest.importorskip("triton")

from mdn_kernels.common.cross_entropy_triton import COLUMNS, losses
from mdn_kernels.testing import relative_error

ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2**-8}  # a card's exponential of −20 is 2e-6 off


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__, "-m", "not gpu")


def example(V, W, dtype, device, size=3.0):
    """Logits of seven tokens, of which those past the vocabulary are NaN, and labels: the first token of the
    vocabulary, the last one, one that is ignored."""
    g = torch.Generator().manual_seed(V)
    logits = (size * torch.randn(7, W, generator=g)).to(dtype)
    logits[:, V:] = torch.nan
    labels = torch.randint(V, (7,), generator=g)
    labels[0], labels[1], labels[2] = 0, V - 1, -100
    return logits.to(device), labels.to(device)


@everywhere
@pytest.mark.parametrize(
    ("V", "W"), [(5, 5), (5, 8), (COLUMNS, COLUMNS), (COLUMNS - 1, COLUMNS + 63), (2 * COLUMNS + 1, 9000)]
)
def test_losses_and_gradients_are_those_of_float64(V, W, device, dtype):
    logits, labels = example(V, W, dtype, device)
    exact = logits[:, :V].double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    expected.sum().backward()
    found = losses(logits, labels, V, gradient=True)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-6, atol=1e-5)
    assert found[2] == 0
    assert (logits[2] == 0).all()
    assert (logits[:, V:] == 0).all()
    assert relative_error(logits[:, :V], exact.grad) < ROUNDING[dtype]


@everywhere
def test_without_gradient_the_logits_stay(device, dtype):
    logits, labels = example(100, 128, dtype, device)
    before = logits.clone()
    losses(logits, labels, 100, gradient=False)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


@everywhere
@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_logits_of_any_size(size, device, dtype):
    logits, labels = example(300, 320, dtype, device, size)
    expected = F.cross_entropy(logits[:, :300].double(), labels, reduction="none")
    torch.testing.assert_close(
        losses(logits, labels, 300, gradient=True).double(), expected, rtol=1e-5, atol=1e-5
    )
    assert logits.isfinite().all()


@everywhere
@pytest.mark.parametrize("what", ["logit", "label"])
def test_what_is_not_a_number_shows(what, device, dtype):
    logits, labels = example(300, 320, dtype, device)
    if what == "logit":
        logits[3, 17] = torch.nan
    else:
        labels[3] = 300
    found = losses(logits, labels, 300, gradient=True)
    assert found[3].isnan()
    assert found[[0, 1, 2, 4, 5, 6]].isfinite().all()
