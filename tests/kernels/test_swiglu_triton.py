"""The Triton SwiGLU against torch's in float64: compiled on a card, or interpreted on the CPU, where the
tests run in their own process (see test_triton.py).
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from mdn_kernels.common.swiglu_triton import BD, BN, swiglu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-m", "not gpu", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.fixture(autouse=True)
def _poison():
    """Tensors from `torch.empty` are NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [1e-6, 2.0, 1e3])
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, BN + 1, 2 * (BD + 3)), (7, 24)])
@pytest.mark.parametrize("order", ["as they are", "turned"])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(
            "cpu",
            torch.float32,
            id="interpreted",
            marks=pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter"),
        ),
        pytest.param("cuda", torch.float32, id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
    ],
)
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
