"""The Triton L2 norm against float64: compiled on a card, or interpreted on the CPU, where the tests run in
their own process (see test_triton.py).
"""

import os
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from mdn_kernels.common.normalize import l2norm
from mdn_kernels.common.normalize_triton import normalize
from mdn_kernels.testing import relative_error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHERE = [
    pytest.param(
        "cpu",
        torch.float32,
        id="interpreted",
        marks=pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter"),
    ),
    pytest.param("cuda", torch.float32, id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
]
everywhere = pytest.mark.parametrize(("device", "dtype"), WHERE)
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # bfloat16: half of its last digit


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


def random(*shape, device, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def results(function, x, dy):
    """The outputs and the gradient of x, which the function is given as it lies in memory."""
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def check(x, dy):
    y, dx = results(normalize, x, dy)
    assert y.is_contiguous()
    assert y.dtype == dx.dtype == x.dtype
    exact_y, exact_dx = results(l2norm, x.double(), dy.double())
    rates = torch.rsqrt(x.double().square().sum(-1) + 1e-6)
    # Row by row, so that long ones do not hide short ones. |dx| is at most r |dy|, and y, which is rounded,
    # is twice in it.
    for wrong, size, roundings in (
        (y - exact_y, exact_y.norm(dim=-1), 1),
        (dx - exact_dx, rates * dy.double().norm(dim=-1), 3),
    ):
        assert (wrong.norm(dim=-1) <= 1.01 * roundings * LIMIT[x.dtype] * size).all()


@everywhere
@pytest.mark.parametrize("K", [1, 5, 24, 64, 96, 256])
def test_matches_float64(K, device, dtype):
    shape = (2, 37, 3, K)
    x, dy = (random(*shape, device=device, dtype=dtype, seed=seed) for seed in range(2))
    check(3 * x, dy)


@everywhere
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-5, 1e-3, 1e4])
def test_rows_of_any_size_are_finite_and_right(size, device, dtype):
    x, dy = (random(1, 9, 2, 24, device=device, dtype=dtype, seed=seed) for seed in range(2))
    x[:, ::2] *= size
    check(x, dy)


@everywhere
def test_inputs_may_lie_in_memory_as_they_like(device, dtype):
    B, T, H, K = 2, 33, 2, 24
    for whole in (
        random(B, T, 3 * H * K, device=device, dtype=dtype),  # channels side by side
        random(B, 3 * H * K, T, device=device, dtype=dtype).mT,  # tokens side by side
    ):
        q, k, _ = (part.unflatten(-1, (H, K)) for part in whole.chunk(3, -1))
        assert not k.is_contiguous()
        check(k, q)
        check(q, k[:1, :1].expand_as(q))


@everywhere
def test_gradients_reach_what_the_input_is_a_slice_of(device, dtype):
    whole = random(2, 5, 48, device=device, dtype=dtype)

    def of_slice(x):
        norm = normalize if x.dtype == dtype else l2norm
        return norm(x[..., 12:36].unflatten(-1, (2, 12)))

    dy = random(2, 5, 2, 12, device=device, dtype=dtype, seed=1)
    found = results(of_slice, whole, dy)
    for one, other in zip(found, results(of_slice, whole.double(), dy.double()), strict=True):
        assert relative_error(one, other) < 3 * LIMIT[dtype]


@everywhere
def test_keeps_the_result_and_one_number_a_row(device, dtype):
    x = random(1, 5, 2, 24, device=device, dtype=dtype).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = normalize(x)
    assert [tuple(t.shape) for t in kept] == [(1, 5, 2, 24), (1, 5, 2)]
    assert kept[0].data_ptr() == y.data_ptr()


@everywhere
def test_the_backward_writes_no_zeros(device, dtype):
    class Written(TorchDispatchMode):
        calls: ClassVar[list[str]] = []

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            self.calls.append(function.overloadpacket.__name__)
            return function(*arguments, **keywords or {})

    x, dy = (random(1, 5, 2, 24, device=device, dtype=dtype, seed=seed) for seed in range(2))
    y = normalize(x.requires_grad_())
    with Written():
        torch.autograd.grad(y, x, dy)
    assert "zeros" not in Written.calls


@everywhere
def test_torch_compile_gets_torchs_own_form(device, dtype):
    x, dy = (random(1, 5, 2, 24, device=device, dtype=dtype, seed=seed) for seed in range(2))
    found = results(torch.compile(normalize, backend="aot_eager", fullgraph=True), x, dy)
    for one, other in zip(found, results(normalize, x, dy), strict=True):
        assert relative_error(one, other) < 3 * LIMIT[dtype]
