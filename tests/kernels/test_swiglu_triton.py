"""The Triton SwiGLU against torch's in float64: compiled on a card, or interpreted on the CPU, where the
tests run in their own process (see tests/interpreter.py).
"""

import pytest
import torch
import torch.nn.functional as F
from tests.interpreter import everywhere, interpret, starts_interpreter

pytest.importorskip("triton")

from mdn_kernels.common.swiglu_triton import BD, BN, swiglu

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


pytestmark = pytest.mark.usefixtures("poisoned")


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__, "-m", "not gpu")


@pytest.mark.parametrize("size", [1e-6, 2.0, 1e3])
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, BN + 1, 2 * (BD + 3)), (7, 24)])
@pytest.mark.parametrize("order", ["as they are", "turned"])
@everywhere
def test_value_and_gradient_are_those_of_float64(device, dtype, order, shape, size):
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(*shape[:-1], n, generator=g) for n in (shape[-1], shape[-1] // 2))
    x, dy = ((scale * y).to(device, dtype) for y, scale in ((x, size), (dy, 1.0)))
    if order == "turned":
        x, dy = (y.mT.contiguous().mT for y in (x, dy))
    ours, exact = x.detach().requires_grad_(), x.double().requires_grad_()
    y = swiglu(ours)
    gate, up = exact.chunk(2, -1)
    expected = F.silu(gate) * up
    pairs = [(y, expected)]
    pairs += zip(
        torch.autograd.grad(y, ours, dy), torch.autograd.grad(expected, exact, dy.double()), strict=True
    )
    for found, right in pairs:
        assert found.dtype == dtype
        # Near its minimum the slope of silu is a difference.
        rough = 1e-6 * right.abs().max().item()
        torch.testing.assert_close(found.double(), right, rtol=ROUNDING[dtype], atol=rough)
