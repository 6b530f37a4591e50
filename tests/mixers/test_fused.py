"""The parts around the operators on a card, by Triton, against their own torch in float64, which `launches`
leaves to it; the kernels alone are tested in tests/kernels.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mdn.config import Shape
from mdn.mixers.base import GatedOutput, ShortConvolution
from mdn.models.block import SwiGLU
from mdn_kernels.common import fused
from mdn_kernels.testing import relative_error

LIMIT = 0.015  # in bfloat16


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(module, scale=1.0):
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(scale * random(*parameter.shape, seed=10 + seed))
    return module


def compare(module, inputs, call):
    """Outputs and gradients of inputs and weights, under autocast on a card and in float64."""
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        exact = dtype == torch.float64
        module = module.to("cuda", torch.float64 if exact else torch.float32)
        here = [x.to("cuda", torch.bfloat16).to(dtype).requires_grad_() for x in inputs]
        assert fused.launches(*here) != exact
        with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
            y = call(module, *here)
        assert y.dtype == dtype
        dy = random(*y.shape, seed=20).to(y)
        results.append([y, *torch.autograd.grad(y, here + list(module.parameters()), dy)])
    errors = [relative_error(one, other) for one, other in zip(*results, strict=True)]
    assert max(errors) < LIMIT, errors


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_convolution_on_a_card(bias, packed):
    cu_seqlens = torch.tensor([0, 1, 67, 67, 70]) if packed else None  # wherever the offsets are

    def call(module, x):
        parts, _ = module(x[..., 4:25], None, cu_seqlens)  # a slice, as Mamba2's
        return torch.cat([part[..., 2:] for part in parts], -1)  # gradients of slices, too

    compare(filled(ShortConvolution([5, 16], 4, bias)), [random(1 if packed else 2, 70, 30, seed=1)], call)


@pytest.mark.gpu
def test_swiglu_on_a_card():
    module = filled(SwiGLU(24), scale=0.1)  # sums of many products would be all rounding
    compare(module, [random(2, 19, 24, seed=1)], SwiGLU.__call__)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [torch.sigmoid, F.silu])
@pytest.mark.parametrize("V", [24, 600])
def test_gated_norm_on_a_card(activation, V):
    module = filled(GatedOutput(8, Shape(layers=1, heads=2, head_k=4, head_v=V), activation))
    o = 2 * random(2, 19, 2, V, seed=1)
    o.view(-1, V)[3] = 0  # what a first token's memory gives
    compare(module, [o, random(2, 19, 2 * V, seed=2)], GatedOutput.__call__)


def test_other_activations_and_states_stay_in_torch(monkeypatch):
    monkeypatch.setattr(fused, "launches", lambda *tensors: True)
    for name in ("gated_rms_norm", "convolution_silu"):
        monkeypatch.setattr(fused, name, lambda *arguments: pytest.fail("is fused"))
    module = filled(GatedOutput(8, Shape(layers=1, heads=2, head_k=4, head_v=3), torch.tanh))
    assert module(torch.ones(1, 2, 2, 3), torch.ones(1, 2, 6)).shape == (1, 2, 8)
    convolution = filled(ShortConvolution([5], 4))
    _, state = convolution(torch.ones(1, 2, 5), {"conv": torch.zeros(1, 3, 5)}, None)
    assert state["conv"].shape == (1, 3, 5)


def tensor(dtype=torch.bfloat16, is_cuda=True):
    return SimpleNamespace(dtype=dtype, is_cuda=is_cuda)


def test_all_but_float64_is_fused_on_cuda_in_eager_mode(monkeypatch):
    assert fused.launches(tensor(), tensor(torch.float32))
    for other in (tensor(is_cuda=False), tensor(torch.float64)):
        assert not fused.launches(tensor(), other)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fused.launches(tensor())
