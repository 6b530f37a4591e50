"""The Triton L2 norm, alone and of corrected queries, against float64: compiled on a card, or interpreted on
the CPU, where the tests run in their own process (see tests/interpreter.py).
"""

from typing import ClassVar

import pytest
import torch
from tests.interpreter import INTERPRETED, interpret, interpreted_only, starts_interpreter
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from mdn_kernels.common.normalize import l2norm
from mdn_kernels.common.normalize_triton import correct_and_normalize, normalize
from mdn_kernels.testing import relative_error

DTYPES = (torch.float32, torch.bfloat16)
WHERE = [
    pytest.param(
        "cpu",
        dtype,
        id=f"interpreted-{dtype}",
        marks=interpreted_only,
    )
    for dtype in DTYPES
] + [pytest.param("cuda", dtype, id=f"cuda-{dtype}", marks=pytest.mark.gpu) for dtype in DTYPES]
everywhere = pytest.mark.parametrize(("device", "dtype"), WHERE)
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # bfloat16: half of its last digit


pytestmark = pytest.mark.usefixtures("poisoned")


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__, "-m", "not gpu")


@pytest.fixture(autouse=True)
def _nearest(monkeypatch):
    """A card rounds float32 to bfloat16; the interpreter cuts it off."""
    if not INTERPRETED:
        return
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


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


D = (0.0, 1.2345, -40.0)  # a factor a head; bfloat16 has neither 1.2345 nor a number near it


def corrected_l2norm(q, k, d):
    return l2norm(q - d[:, None] * k), l2norm(k)


def corrected_results(function, q, k, d, dy_q, dy_k):
    """The outputs and the gradients of q, k and d."""
    q, k, d = (x.detach().requires_grad_() for x in (q, k, d))
    outputs = function(q, k, d)
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, (q, k, d), (dy_q, dy_k)))


def check_corrected(q, k, d, dy_q, dy_k):
    """Row by row, by the number of roundings in each: y_q and y_k are rounded, and are twice in the gradients
    of q and k, which are rounded themselves. d's, a sum, holds y_k and twice y_q, whose errors add up like
    random ones. Float32 loses digits of q − d k as far as that cancels.
    """
    found = corrected_results(correct_and_normalize, q, k, d, dy_q, dy_k)
    assert [x.dtype for x in found] == [q.dtype, k.dtype, q.dtype, k.dtype, torch.float32]
    assert all(x.is_contiguous() for x in found)
    exact = [x.double() for x in (q, k, d, dy_q, dy_k)]
    expected = corrected_results(corrected_l2norm, *exact)
    q, k, d, dy_q, dy_k = exact

    def size(x):
        return x.norm(dim=-1)

    limit, factor, K = 1.01 * LIMIT[found[0].dtype], d.abs(), q.shape[-1]
    r_q, r_k = (torch.rsqrt(size(x).square() + 1e-6) for x in (q - d[:, None] * k, k))
    lost = 4 * 2**-24 * r_q * (size(q) + factor * size(k))  # of q − d k in float32, times r_q
    of_q, of_k = r_q * size(dy_q), r_k * size(dy_k)
    limits = (
        limit * size(expected[0]) + lost,
        limit * size(expected[1]),
        3 * (limit + lost) * of_q,
        3 * (limit * (of_k + factor * of_q) + lost * factor * of_q),
    )
    errors = [size(one - other) for one, other in zip(found[:4], expected[:4], strict=True)]
    for error, allowed in zip(errors, limits, strict=True):
        assert error.isfinite().all()
        assert (error <= allowed).all(), (error / allowed).amax((0, 1))
    of_d = of_q * size(k)
    allowed = 3 * (limit * (of_d.square().sum((0, 1)) / K).sqrt() + (lost * of_d).sum((0, 1)))
    assert ((found[4] - expected[4]).abs() <= allowed).all(), (found[4], expected[4], allowed)


def factors(device):
    return torch.tensor(D, device=device)


@everywhere
@pytest.mark.parametrize("K", [1, 5, 24, 64, 96, 256])
def test_corrected_matches_float64(K, device, dtype):
    q, k, *dy = (random(2, 37, 3, K, device=device, dtype=dtype, seed=seed) for seed in range(4))
    check_corrected(3 * q, k, factors(device), *dy)


@everywhere
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-5, 1e-3, 1e4])
def test_corrected_rows_of_any_size_are_finite_and_right(size, device, dtype):
    q, k, *dy = (random(1, 9, 3, 24, device=device, dtype=dtype, seed=seed) for seed in range(4))
    q[:, ::2] *= size  # of both, of each, and of none
    k[:, ::3] *= size
    check_corrected(q, k, factors(device), *dy)


@everywhere
def test_queries_that_the_correction_nearly_cancels(device, dtype):
    k, rest, *dy = (random(2, 37, 3, 64, device=device, dtype=dtype, seed=seed) for seed in range(4))
    d = factors(device)
    check_corrected((d[:, None] * k + 0.01 * rest).to(dtype), k, d, *dy)


@everywhere
def test_corrected_inputs_may_lie_in_memory_as_they_like(device, dtype):
    B, T, H, K = 2, 33, 3, 24
    for whole in (
        random(B, T, 4 * H * K, device=device, dtype=dtype),
        random(B, 4 * H * K, T, device=device, dtype=dtype).mT,
    ):
        q, k, *dy = (part.unflatten(-1, (H, K)) for part in whole.chunk(4, -1))
        wide = factors(device).repeat_interleave(2)
        check_corrected(q, k, wide[::2], *dy)
        check_corrected(q.contiguous(), k, wide[::2], dy[0], dy[1][:1, :1].expand_as(k))


@everywhere
@pytest.mark.parametrize("given", [0, 1])
def test_one_of_both_results_may_go_unused(given, device, dtype):
    q, k, dy = (random(1, 5, 3, 24, device=device, dtype=dtype, seed=seed) for seed in range(3))
    q, k, d = (x.requires_grad_() for x in (q, k, factors(device)))
    pair = [torch.zeros_like(dy), torch.zeros_like(dy)]
    pair[given] = dy
    found = torch.autograd.grad(correct_and_normalize(q, k, d)[given], (q, k, d), dy)
    expected = corrected_results(correct_and_normalize, q, k, d, *pair)[2:]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@everywhere
def test_corrected_keeps_the_results_and_one_number_a_row(device, dtype):
    q, k = (random(1, 5, 3, 24, device=device, dtype=dtype, seed=seed).requires_grad_() for seed in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs = correct_and_normalize(q, k, factors(device))
    assert [tuple(t.shape) for t in kept] == [(1, 5, 3, 24)] * 2 + [(1, 5, 3)] * 2 + [(3,)]
    assert [t.data_ptr() for t in kept[:2]] == [y.data_ptr() for y in outputs]


def test_shapes_that_do_not_match_are_refused():
    x = torch.ones(1, 5, 3, 24)
    for arguments in ((x, x[:, 1:], torch.ones(3)), (x, x, torch.ones(1)), (x, x, torch.ones(3, 24))):
        with pytest.raises(ValueError, match=r"expected q and k \[B, T, H, K\] of one shape and d \[H\]"):
            correct_and_normalize(*arguments)
