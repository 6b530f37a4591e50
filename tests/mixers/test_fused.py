"""Gated norm and SwiGLU by FLA's modules, and the convolution by ours, against torch's form: on a card, or,
where FLA 0.6.0 is installed, FLA's interpreted on the CPU in a process of its own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mdn.config import Shape
from mdn.mixers.base import GatedOutput, ShortConvolution
from mdn.models.block import SwiGLU
from mdn_kernels.common import fused
from mdn_kernels.common.fla import trusted
from mdn_kernels.testing import relative_error

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_fla = pytest.mark.skipif(
    not trusted() or find_spec("einops") is None, reason="needs flash-linear-attention"
)
WHERE = [
    *(
        pytest.param(
            "cpu",
            dtype,
            id=f"interpreted-{dtype}",
            marks=[needs_fla, pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")],
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
    pytest.param("cuda", torch.bfloat16, id="cuda", marks=[needs_fla, pytest.mark.gpu]),
]
everywhere = pytest.mark.parametrize(("device", "dtype"), WHERE)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 0.015}


@pytest.mark.slow
@needs_fla
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            __file__,
            "-m",
            "not gpu",
            "-k",
            "is_torchs",
            "-p",
            "no:cacheprovider",
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout


@pytest.fixture
def _first_candidate(monkeypatch):
    if INTERPRETED:  # timing candidates needs a card
        from triton.runtime.autotuner import Autotuner

        def first(self, *arguments, **keywords):
            return self.fn.run(*arguments, **keywords, **self.configs[0].all_kwargs())

        monkeypatch.setattr(Autotuner, "run", first)


def random(*shape, seed, like=None):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x if like is None else x.to(like)


def filled(module, device):
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape, seed=10 + seed))
    return module.to(device)


def compare(monkeypatch, module, inputs, call):
    """Outputs and gradients of inputs and weights: FLA's modules on `inputs`, torch's form in float64."""
    dtype, calls, modules = inputs[0].dtype, [], fused._modules
    monkeypatch.setattr(fused, "_modules", lambda: calls.append(1) or modules())
    found, expected = [], []
    for results, exact in ((found, False), (expected, True)):
        here = [x.detach().to(torch.float64 if exact else dtype).requires_grad_() for x in inputs]
        monkeypatch.setattr(fused, "fuses", lambda *tensors, exact=exact: not exact)
        module = module.to(torch.float64 if exact else torch.float32)
        weights = list(module.parameters())
        with torch.autocast(
            here[0].device.type, torch.bfloat16, enabled=dtype != torch.float32 and not exact
        ):
            y = call(module, *here)
        assert exact or y.dtype == dtype
        dy = random(*y.shape, seed=20, like=y)
        results += [y, *torch.autograd.grad(y, here + weights, dy)]
    assert len(calls) == 1  # in the first of both
    errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < LIMIT[dtype], errors


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_convolution_on_a_card_is_torchs(bias, packed):
    module = filled(ShortConvolution([5, 16], 4, bias), "cuda")
    cu_seqlens = torch.tensor([0, 1, 67, 67, 70]) if packed else None  # wherever the offsets are
    x = random(1 if packed else 2, 70, 30, seed=1).to("cuda", torch.bfloat16)
    found, state = module(x[..., 4:25], None, cu_seqlens)
    assert state == {}
    expected, _ = module.double()(x[..., 4:25].double(), None, cu_seqlens)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < LIMIT[torch.bfloat16]


@everywhere
@pytest.mark.usefixtures("_first_candidate")
def test_swiglu_is_torchs(device, dtype, monkeypatch):
    module = filled(SwiGLU(24), device)
    with torch.no_grad():  # sums of many products would be all rounding
        for parameter in module.parameters():
            parameter *= 0.1
    compare(monkeypatch, module, [random(2, 19, 24, seed=1).to(device, dtype)], SwiGLU.__call__)


@everywhere
@pytest.mark.usefixtures("_first_candidate")
@pytest.mark.parametrize("activation", [torch.sigmoid, F.silu])
@pytest.mark.parametrize("V", [24, 600])
def test_gated_norm_is_torchs(device, dtype, activation, V, monkeypatch):
    module = filled(GatedOutput(8, Shape(layers=1, heads=2, head_k=4, head_v=V), activation), device)
    o = 2 * random(2, 19, 2, V, seed=1).to(device, dtype)
    o.view(-1, V)[3] = 0  # what a first token's memory gives
    compare(
        monkeypatch,
        module,
        [o, random(2, 19, 2 * V, seed=2).to(device, dtype)],
        lambda module, o, gate: module(o, gate),
    )


def test_other_activations_and_states_stay_in_torch(monkeypatch):
    monkeypatch.setattr(fused, "fuses", lambda *tensors: True)
    monkeypatch.setattr(fused, "_modules", lambda: pytest.fail("is FLA's"))
    module = filled(GatedOutput(8, Shape(layers=1, heads=2, head_k=4, head_v=3), torch.tanh), "cpu")
    assert module(torch.ones(1, 2, 2, 3), torch.ones(1, 2, 6)).shape == (1, 2, 8)
    convolution = filled(ShortConvolution([5], 4), "cpu")
    _, state = convolution(torch.ones(1, 2, 5), {"conv": torch.zeros(1, 3, 5)}, None)
    assert state["conv"].shape == (1, 3, 5)


def tensor(shape=(4, 4096, 8), dtype=torch.bfloat16, is_cuda=True):
    return SimpleNamespace(shape=shape, dtype=dtype, is_cuda=is_cuda)


@pytest.fixture
def _trusted(monkeypatch):
    monkeypatch.setattr(fused, "_modules", lambda: {"norm": None})


def test_our_own_kernels_take_all_but_float64_on_cuda_in_eager_mode(monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        assert fused.launches(tensor((1, 1, 5), dtype), tensor())
    for other in ({"is_cuda": False}, {"dtype": torch.float64}):
        assert not fused.launches(tensor(**other))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fused.launches(tensor())


@pytest.mark.usefixtures("_trusted")
def test_half_precision_on_cuda_in_eager_mode_is_fused(monkeypatch):
    assert fused.fuses(tensor(), tensor())
    assert fused.fuses(tensor(dtype=torch.float16))
    for other in ({"is_cuda": False}, {"dtype": torch.float32}, {"dtype": torch.float16}):
        assert not fused.fuses(tensor(), tensor(**other))
    assert not fused.fuses(tensor(dtype=torch.float32))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fused.fuses(tensor())


@pytest.mark.usefixtures("_trusted")
@pytest.mark.parametrize("shape", [(1, 8, 5), (5000, 1, 5), (1, 2047, 5)])
def test_a_short_prompt_and_a_token_of_decoding_tune_nothing(shape):
    assert not fused.fuses(tensor(shape))


def test_without_a_trusted_fla_all_stays_in_torch(monkeypatch):
    monkeypatch.setattr(fused, "trusted", lambda: False)
    fused._modules.cache_clear()
    assert not fused.fuses(tensor())
    fused._modules.cache_clear()


def test_another_fla_leaves_all_in_torch_with_a_warning(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(fused, "trusted", lambda: True)
    monkeypatch.setattr(fused, "import_module", missing)
    fused._modules.cache_clear()
    with pytest.warns(UserWarning, match=r"fla\.modules.*pip install flash-linear-attention==0\.6\.0"):
        assert not fused.fuses(tensor())
    fused._modules.cache_clear()


def test_nothing_of_fla_is_imported_on_a_cpu(monkeypatch):
    monkeypatch.setattr(fused, "_modules", lambda: pytest.fail("imports FLA"))
    assert not fused.fuses(torch.ones(1, 4096, 5, dtype=torch.bfloat16))
