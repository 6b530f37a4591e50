"""The Triton gated RMSNorm against torch's in float64: compiled on a card, or interpreted on the CPU, where
the tests run in their own process (see tests/interpreter.py).
"""

import pytest
import torch
import torch.nn.functional as F
from tests.interpreter import everywhere, interpret, starts_interpreter

pytest.importorskip("triton")

from mdn_kernels.common.gated_norm_triton import gated_rms_norm
from mdn_kernels.testing import relative_error

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
EPS = 1e-6


pytestmark = pytest.mark.usefixtures("poisoned")


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__, "-m", "not gpu")


@everywhere
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("V", [1, 24, 512, 600])
def test_value_and_gradients_are_those_of_float64(V, activation, turned, device, dtype):
    g = torch.Generator().manual_seed(V)
    x, gate, dy = (2 * torch.randn(2, 19, 3, V, generator=g) for _ in range(3))
    x[0, 3] = 0  # what a first token's memory gives
    x[0, 4] *= 1e-4
    x[0, 5] *= 1e3
    if turned:
        x, gate, dy = (y.mT.contiguous().mT for y in (x, gate, dy))
    inputs = [y.to(device, dtype) for y in (x, gate)] + [torch.randn(V, generator=g).to(device)]
    ours = [y.detach().requires_grad_() for y in inputs]
    exact = [y.double().requires_grad_() for y in inputs]
    y = gated_rms_norm(*ours, activation, EPS)
    opened = exact[1].sigmoid() if activation == "sigmoid" else F.silu(exact[1])
    right = F.rms_norm(exact[0], (V,), exact[2], EPS) * opened
    assert y.dtype == dtype
    dy = dy.to(device, dtype)
    found = [y, *torch.autograd.grad(y, ours, dy)]
    expected = [right, *torch.autograd.grad(right, exact, dy.double())]
    for one, other in zip(found[:3], expected[:3], strict=True):
        # Row by row, so that large ones do not hide small ones. A row of dx is what is left of two others.
        for a, b in zip(one.flatten(0, 2), other.flatten(0, 2), strict=True):
            assert V == 1 or relative_error(a, b) < 4 * LIMIT[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert V == 1 or relative_error(one, other) < LIMIT[dtype]
    torch.testing.assert_close(y.double(), right, rtol=LIMIT[dtype], atol=1e-6)
