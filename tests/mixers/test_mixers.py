"""What every mixer owes the model: decoding, packing, causality, precision, gradients."""

from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mdn.mixers import MIXERS, mixer_class
from mdn.mixers.attention import Attention, attend_packed, positions
from mdn.mixers.base import LinearMixer
from mdn.mixers.mamba2 import Mamba2
from mdn.options import AttentionOptions, Mamba2Options

from .small import D_MODEL, shape

LINEAR = [name for name in MIXERS if name != "attention"]


def tokens(B: int, T: int, seed: int = 1) -> Tensor:
    return torch.randn(B, T, D_MODEL, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_decoding_token_by_token_equals_the_full_forward(mixer):
    x = tokens(2, 70)
    expected, none = mixer(x)
    assert none is None
    state = mixer.init_state(2)
    outputs = []
    for x_t in x.split(1, 1):
        y, state = mixer(x_t, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cut", [1, 2, 64, 99])
def test_prefill_in_two_pieces_equals_one(mixer, cut):
    x = tokens(2, 100)
    expected, whole = mixer(x, mixer.init_state(2))
    first, state = mixer(x[:, :cut], mixer.init_state(2))
    second, state = mixer(x[:, cut:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, atol=1e-4, rtol=1e-4)
    for name, value in whole.items():
        torch.testing.assert_close(state[name], value, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_state_is_left_as_it_was(mixer):
    _, state = mixer(tokens(2, 9), mixer.init_state(2))
    before = {name: value.clone() for name, value in state.items()}
    mixer(tokens(2, 3), state)
    for name, value in before.items():
        assert torch.equal(state[name], value)


def test_packed_sequences_equal_separate_ones_with_their_gradients(mixer):
    x = tokens(1, 140).requires_grad_()
    offsets = [0, 1, 70, 75, 140]  # no two of one length, one shorter than the convolution
    packed, _ = mixer(x, cu_seqlens=torch.tensor(offsets))
    separate = torch.cat([mixer(x[:, start:stop])[0] for start, stop in pairwise(offsets)], 1)
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-4)
    weight = torch.randn_like(packed)
    (grad_packed,) = torch.autograd.grad((packed * weight).sum(), x)
    (grad_separate,) = torch.autograd.grad((separate * weight).sum(), x)
    torch.testing.assert_close(grad_packed, grad_separate, atol=1e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", LINEAR)
def test_packed_sequences_continue_from_states_of_their_own(name, make_mixer):
    mixer, first, second = make_mixer(name), tokens(3, 5), tokens(1, 80, seed=2)
    _, states = mixer(first, mixer.init_state(3))
    packed, after = mixer(second, states, torch.tensor([0, 2, 2, 80]))
    for n, (start, stop) in enumerate([(0, 2), (2, 80)]):
        row = 2 * n  # the sequence between them is empty
        alone, alone_after = mixer(second[:, start:stop], {k: v[[row]] for k, v in states.items()})
        torch.testing.assert_close(packed[:, start:stop], alone, atol=1e-5, rtol=1e-4)
        for key, value in alone_after.items():
            torch.testing.assert_close(after[key][[row]], value, atol=1e-5, rtol=1e-4)
    for key, value in states.items():
        torch.testing.assert_close(after[key][1], value[1])


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 3, 64, 89])
def test_outputs_before_a_changed_token_stay(mixer, t):
    x = tokens(1, 90)
    changed = x.clone()
    changed[:, t] = 5.0
    y, z = mixer(x)[0], mixer(changed)[0]
    torch.testing.assert_close(y[:, :t], z[:, :t], atol=1e-6, rtol=0)
    assert (y[:, t] - z[:, t]).abs().max() > 1e-3


def test_gradient_reaches_every_parameter_and_is_finite(mixer):
    mixer(tokens(2, 70))[0].square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("name", LINEAR)
def test_autocast_leaves_gates_and_states_in_float32(name, make_mixer, monkeypatch):
    mixer = make_mixer(name)
    module, op = import_module(type(mixer).__module__), mixer_class(name).op
    original, seen = getattr(module, op), {}

    def spy(q, k, v, *rest, **options):
        o, final = original(q, k, v, *rest, **options)
        seen.update(vectors={q.dtype, k.dtype, v.dtype}, gates={x.dtype for x in rest if x.dim() == 3})
        if name == "kda":
            seen["gates"].add(rest[0].dtype)
        return o, final

    monkeypatch.setattr(module, op, spy)
    x = tokens(2, 70)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x, mixer.init_state(2, dtype=torch.bfloat16))
    assert seen == {"vectors": {torch.bfloat16}, "gates": {torch.float32}}
    assert all(state[matrix].dtype == torch.float32 for matrix in mixer.rule.matrices)
    exact = mixer(x)[0]
    assert (y.float() - exact).norm() < 0.05 * exact.norm()


def test_a_bfloat16_model_decodes(mixer):
    mixer = mixer.bfloat16()
    x = tokens(1, 5).bfloat16()
    state = mixer.init_state(1, dtype=torch.bfloat16)
    with torch.no_grad():
        for x_t in x.split(1, 1):
            y, state = mixer(x_t, state)
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


@pytest.mark.parametrize("name", LINEAR)
def test_every_version_of_the_operator_gives_the_same(name, make_mixer):
    x = tokens(1, 70)
    torch.testing.assert_close(
        make_mixer(name, kernel="recurrent")(x)[0], make_mixer(name)(x)[0], atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize(("kernel", "version"), [("auto", None), ("recurrent", "recurrent")])
@pytest.mark.parametrize("name", LINEAR)
def test_the_kernel_goes_to_the_operator_except_for_single_tokens(
    name, kernel, version, make_mixer, monkeypatch
):
    mixer = make_mixer(name, kernel=kernel)
    module, op = import_module(type(mixer).__module__), mixer_class(name).op
    original, versions = getattr(module, op), []

    def spy(*inputs, version, **options):
        versions.append(version)
        return original(*inputs, version=version, **options)

    monkeypatch.setattr(module, op, spy)
    mixer(tokens(1, 2))
    mixer(tokens(1, 1))
    assert versions == [version, None]


@pytest.mark.parametrize("name", LINEAR)
def test_an_unknown_kernel_is_refused_when_the_mixer_is_built(name, make_mixer):
    with pytest.raises(ValueError, match=r"'v99'.*recurrent"):
        make_mixer(name, kernel="v99")


def test_attention_ignores_the_kernel(make_mixer):
    make_mixer("attention", kernel="v99")


def test_an_unknown_mixer_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'comba'"):
        mixer_class("camba")


def test_state_size_counts_what_the_state_holds(mixer):
    _, state = mixer(tokens(1, 6), mixer.init_state(1))
    sizes = shape(type(mixer).__name__.lower())
    held = sum(value.numel() for key, value in state.items() if key != "conv")
    assert mixer.rule.state_size(D_MODEL, sizes, context=6) == held
    if isinstance(mixer, LinearMixer):
        assert mixer.rule.state_size(D_MODEL, sizes, context=10**6) == held


def test_a_shape_that_does_not_fit_the_width_is_refused():
    with pytest.raises(ValueError, match=r"expand·d_model = 48; use heads=4"):
        Mamba2(24, replace(shape("mamba2"), heads=3), Mamba2Options())
    with pytest.raises(ValueError, match="5 heads do not divide d_model=24"):
        Attention(24, replace(shape("attention"), attention_heads=5), AttentionOptions())


def test_attention_refuses_a_state_for_packed_sequences(make_mixer):
    mixer = make_mixer("attention")
    with pytest.raises(ValueError, match="packed"):
        mixer(tokens(1, 6), mixer.init_state(1), torch.tensor([0, 2, 6]))


PACKED = [0, 1, 70, 75, 75, 300, 1030]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_attention_in_half_precision_equals_the_padded_form(dtype):
    """torch's kernel for packed sequences against one row a sequence in float64, outputs and gradients."""
    q, k, v = (torch.randn(1, PACKED[-1], 2, 64, device="cuda", dtype=dtype) for _ in range(3))
    offsets, weight = torch.tensor(PACKED, device="cuda"), torch.randn_like(q)
    half, exact = [x.requires_grad_() for x in (q, k, v)], [x.detach().double() for x in (q, k, v)]
    exact = [x.requires_grad_() for x in exact]
    found, expected = attend_packed(*half, offsets), attend_packed(*exact, offsets)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)
    gradients = torch.autograd.grad((found * weight).sum(), half)
    for a, b in zip(gradients, torch.autograd.grad((expected * weight).sum(), exact), strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()


def test_positions_start_anew_in_each_packed_sequence():
    assert positions(torch.tensor([0, 1, 4, 4, 6]), 6).tolist() == [0, 0, 1, 2, 0, 1]
