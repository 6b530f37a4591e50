"""The Triton convolution against torch's in float64: compiled on a card, or interpreted on the CPU, where the
tests run in their own process (see tests/interpreter.py).
"""

import pytest
import torch
import torch.nn.functional as F
from tests.interpreter import everywhere, interpret, starts_interpreter

pytest.importorskip("triton")

from mdn_kernels.common.convolution import short_convolution
from mdn_kernels.common.convolution_triton import BC, BT, convolution_silu
from mdn_kernels.testing import relative_error

LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


pytestmark = pytest.mark.usefixtures("poisoned")


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__, "-m", "not gpu")


def random(*shape, device, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(x, weight, bias, cu_seqlens, sizes, dys):
    """Every part and the gradients of x, weight and bias."""
    leaves = [x, weight] + ([bias] if bias is not None else [])
    ours = [y.detach().requires_grad_() for y in leaves]
    found = convolution_silu(*ours, *([None] if bias is None else []), cu_seqlens, sizes)
    assert all(y.is_contiguous() and y.dtype == x.dtype for y in found)
    exact = [y.detach().double().requires_grad_() for y in leaves]
    z, _ = short_convolution(*exact[:2], cu_seqlens=None if cu_seqlens is None else cu_seqlens.cpu())
    if bias is not None:
        z = z + exact[2]
    expected = F.silu(z).split(sizes, -1)
    gradients = torch.autograd.grad(found, ours, dys)
    exact_gradients = torch.autograd.grad(expected, exact, [dy.double() for dy in dys])
    for one, other in zip((*found, *gradients), (*expected, *exact_gradients), strict=True):
        assert one.shape == other.shape
        assert relative_error(one.detach(), other.detach()) < LIMIT[x.dtype]


@everywhere
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("W", [1, 3, 4])
@pytest.mark.parametrize("T", [1, 2, BT + 5])
def test_matches_float64(T, W, bias, device, dtype):
    sizes = [BC + 1, 5, 2]
    C = sum(sizes)
    x = random(2, T, C, device=device, dtype=dtype)
    weight, offset = (random(*s, device=device, dtype=torch.float32, seed=1) for s in ((C, W), (C,)))
    dys = [random(2, T, size, device=device, dtype=dtype, seed=2 + size) for size in sizes]
    check(x, weight, offset if bias else None, None, sizes, dys)


@everywhere
@pytest.mark.parametrize("offsets", [[0, 70], [0, 1, 70], [0, 2, 2, 67, 70]])
def test_packed_sequences_stay_apart(offsets, device, dtype):
    x = random(1, 70, 9, device=device, dtype=dtype)
    weight = random(9, 4, device=device, dtype=torch.float32, seed=1)
    dys = [random(1, 70, size, device=device, dtype=dtype, seed=2) for size in (4, 5)]
    check(x, weight, None, torch.tensor(offsets, dtype=torch.int32, device=device), [4, 5], dys)


@everywhere
def test_inputs_and_gradients_may_lie_in_memory_as_they_like(device, dtype):
    weight = random(12, 4, device=device, dtype=torch.float32, seed=1)
    dys = [random(2, size, 33, device=device, dtype=dtype, seed=2).mT for size in (4, 8)]
    for x in (
        random(2, 33, 30, device=device, dtype=dtype)[..., 5:17],
        random(2, 12, 33, device=device, dtype=dtype).mT,
        random(33, 12, device=device, dtype=dtype).expand(2, -1, -1),
    ):
        check(x, weight, None, None, [4, 8], dys)
    check(x, weight, None, None, [4, 8], [dy[:1, :1].expand(2, 33, -1) for dy in dys])


@everywhere
def test_a_part_that_nobody_reads_gets_no_gradient(device, dtype):
    x = random(1, 7, 6, device=device, dtype=dtype).requires_grad_()
    weight = random(6, 4, device=device, dtype=torch.float32, seed=1).requires_grad_()
    first, _ = convolution_silu(x, weight, None, None, [2, 4])
    dx, dw = torch.autograd.grad(first.float().sum(), (x, weight))
    assert (dx[..., 2:] == 0).all()
    assert (dx[..., :2] != 0).any()
    assert (dw[2:] == 0).all()
    assert (dw[:2] != 0).all()
