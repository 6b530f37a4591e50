"""The output correction in the kernel that normalises, as the mixers use it: on a card, or interpreted on the
CPU in a process of its own (see tests/interpreter.py).
"""

from copy import deepcopy

import pytest
import torch
from tests.interpreter import INTERPRETED, everywhere, interpret, starts_interpreter
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from mdn_kernels.common import fused, normalize_triton
from mdn_kernels.testing import relative_error

from .small import D_MODEL

T = 70
both = pytest.mark.parametrize("name", ["mdn", "comba"])
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 0.05}


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__, "-m", "not gpu")


@pytest.fixture
def calls(monkeypatch) -> list[tuple[Tensor, ...]]:
    """What the kernel is given, call by call; interpreted, it takes tensors of a CPU."""
    call, seen = normalize_triton.correct_and_normalize, []
    monkeypatch.setattr(normalize_triton, "correct_and_normalize", lambda *x: seen.append(x) or call(*x))
    if INTERPRETED:
        monkeypatch.setattr(
            fused, "launches", lambda *tensors: all(x.dtype == torch.float32 for x in tensors)
        )
    return seen


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(mixer, x, dy, dtype, cu_seqlens=None, call=lambda mixer, *x: mixer(*x)):
    """The output, and the gradients of x and all weights, by name."""
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        y, _ = call(mixer, x, None, cu_seqlens)
    names, weights = zip(*mixer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(y, [x, *weights], dy.to(y.dtype))
    return dict(zip(["y", "x", *names], [y.detach(), *gradients], strict=True))


@everywhere
@both
@pytest.mark.parametrize("offsets", [None, [0, 1, 67, 67, 2 * T]])
def test_outputs_and_gradients_are_those_of_torchs_form(
    name, offsets, device, dtype, make_mixer, calls, monkeypatch
):
    mixer = make_mixer(name).to(device)
    shape = (2, T, D_MODEL) if offsets is None else (1, 2 * T, D_MODEL)
    x, dy = (random(*shape, seed=seed).to(device) for seed in range(2))
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)
    found = results(mixer, x, dy, dtype, cu_seqlens)
    assert len(calls) == 1
    exact = results(deepcopy(mixer).double(), x.double(), dy.double(), torch.float64, cu_seqlens)
    monkeypatch.setattr(fused, "launches", lambda *_: False)
    torchs = results(mixer, x, dy, dtype, cu_seqlens)
    assert len(calls) == 1
    for key, right in exact.items():
        # In half precision sums of a few numbers a head cancel: as near to float64 as torch's form then.
        allowed = max(LIMIT[dtype], 2 * relative_error(torchs[key], right))
        assert relative_error(found[key], right) < allowed, key


@everywhere
@both
def test_recomputed_activations_give_the_same_gradients(name, device, dtype, make_mixer, calls):
    mixer, (x, dy) = make_mixer(name).to(device), (random(2, T, D_MODEL, seed=n).to(device) for n in range(2))

    def again(mixer, *inputs):
        return checkpoint(mixer, *inputs, use_reentrant=False)

    found, expected = results(mixer, x, dy, dtype, call=again), results(mixer, x, dy, dtype)
    assert len(calls) == 3
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@everywhere
def test_queries_and_keys_are_not_kept_as_they_were(device, dtype, make_mixer, calls):
    mixer, x, kept = make_mixer("mdn").to(device), random(2, T, D_MODEL).to(device), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        mixer(x)
    q, k, _ = calls[0]  # held by `calls`, so that nothing else lies there
    places = {t.untyped_storage().data_ptr() for t in kept}
    assert not places & {t.untyped_storage().data_ptr() for t in (q, k)}


@everywhere
@both
@torch.no_grad()
def test_a_prompt_and_single_tokens_after_it_continue_each_other(name, device, dtype, make_mixer, calls):
    mixer, x = make_mixer(name).to(device), random(2, T, D_MODEL).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        whole, _ = mixer(x)
        y, state = mixer(x[:, :-2], mixer.init_state(2, device, dtype))
        outputs = [y]
        assert len(calls) == 2
        for x_t in x[:, -2:].split(1, 1):
            y, state = mixer(x_t, state)
            outputs.append(y)
    assert len(calls) == 2
    assert relative_error(torch.cat(outputs, 1), whole.double()) < LIMIT[dtype]


@pytest.mark.parametrize("form", ["kernel", "one token", "watched", "elsewhere"])
@both
def test_the_operator_normalises_unless_the_kernel_has(name, form, make_mixer, monkeypatch):
    mixer, (q, k, p) = make_mixer(name), (random(1, T, 2, 6, seed=n) for n in range(3))
    if form == "one token":
        q, k, p = q[:, :1], k[:, :1], p[:, :1]
    monkeypatch.setattr(fused, "launches", lambda *_: form != "elsewhere")
    monkeypatch.setattr(fused, "corrected_l2norm", lambda *inputs: [*inputs])
    mixer.watch = print if form == "watched" else None
    d = torch.tensor([0.5, -2.0])
    found, normalize_qk = mixer.corrected(d, q, k, p)
    assert normalize_qk == (form != "kernel")
    expected = [d, q, k, p] if form == "kernel" else [q - d[:, None] * k, k, p]
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
