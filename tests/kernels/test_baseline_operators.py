"""The operators of the baselines, gated_delta_rule, comba, kda and ssd: one body of tests for all of them."""

from itertools import pairwise
from math import inf

import pytest
import torch
import torch.nn.functional as F

from mdn_kernels import registry
from mdn_kernels.comba import comba
from mdn_kernels.gated_delta_rule import gated_delta_rule
from mdn_kernels.kda import kda
from mdn_kernels.ssd import ssd
from mdn_kernels.testing import (
    assert_matches_oracle,
    evaluate,
    make_inputs,
    relative_error,
    tensor_arguments,
    to_float64,
    tolerance,
)

OPS = {"gated_delta_rule": gated_delta_rule, "comba": comba, "kda": kda, "ssd": ssd}
VERSIONS = ("recurrent", "chunk")
# Around the edges of chunks; the recurrence knows none.
LENGTHS = [("chunk", T) for T in (1, 2, 3, 63, 64, 65, 130)] + [("recurrent", T) for T in (1, 3, 65)]

each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
each_version = pytest.mark.parametrize("version", VERSIONS)


def inputs_of(op, **options):
    return make_inputs(op, per_channel=("log_alpha",) if op is kda else (), state=True, **options)


def with_resets(inputs):
    """Gates that neither decay slowly nor fast all the time: near 1, far below, and 0, token by token."""
    u = torch.rand(inputs["log_alpha"].shape, generator=torch.Generator().manual_seed(7))
    log_alpha = torch.where(u < 0.8, -0.01 * u, torch.where(u < 0.9, -50.0, -inf))
    return inputs | {"log_alpha": log_alpha.to(inputs["log_alpha"].dtype)}


def transition_matrices(op, q, k, v, log_alpha, beta=None, p=None, *, initial_state):
    """o and the final state of a batch of one, head by head: S_t = A_t S_{t−1} + B_t with A_t spelled out."""
    _, T, H, K = q.shape
    o = torch.empty_like(v)
    final = initial_state.clone()
    for h in range(H):
        S = initial_state[0, h]
        for t in range(T):
            kt = k[0, t, h]
            decay = torch.diag(log_alpha[0, t, h].exp().expand(K))
            identity = torch.eye(K, dtype=q.dtype)
            step = 1.0 if op is ssd else beta[0, t, h]
            if op is ssd:
                A = decay
            elif op is comba:
                A = decay - step * torch.outer(kt, p[0, t, h])
            else:
                A = (identity - step * torch.outer(kt, kt)) @ decay
            S = A @ S + step * torch.outer(kt, v[0, t, h])
            o[0, t, h] = q[0, t, h] @ S / K**0.5
        final[0, h] = S
    return o, final


@each_op
def test_recurrence_is_the_published_update_written_as_transition_matrices(op):
    inputs = to_float64(inputs_of(op, B=1, T=7, gates="wide"))
    o, S = op(**inputs, output_final_state=True, version="recurrent")
    expected_o, expected_S = transition_matrices(op, **inputs)
    torch.testing.assert_close(o, expected_o, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(S, expected_S, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "gates", ["typical", "alpha=1", "alpha=exp(-8)", "alpha=0", "beta=0", "wide", "resets"]
)
@pytest.mark.parametrize(("version", "T"), LENGTHS)
@each_op
def test_outputs_states_and_gradients_match_the_float64_recurrence(op, version, T, gates):
    inputs = inputs_of(op, T=T, gates="typical" if gates == "resets" else gates)
    assert_matches_oracle(op, version, with_resets(inputs) if gates == "resets" else inputs)


@pytest.mark.parametrize("T", [5, 130])
@each_op
def test_chunk_form_in_float64_is_the_recurrence_to_rounding(op, T):
    inputs = with_resets(inputs_of(op, T=T, dtype=torch.float64))
    expected = evaluate(op, "recurrent", inputs)
    found = evaluate(op, "chunk", inputs)
    assert {name: e for name in expected if (e := relative_error(found[name], expected[name])) > 1e-13} == {}


def test_kda_forgets_some_channels_at_once_and_others_never():
    inputs = inputs_of(kda, T=130)
    log_alpha = torch.zeros_like(inputs["log_alpha"])
    log_alpha[..., ::3] = -30.0
    log_alpha[..., 1::3] = -inf
    assert_matches_oracle(kda, "chunk", inputs | {"log_alpha": log_alpha})


@each_version
@each_op
def test_packed_sequences_equal_separate_ones(op, version):
    offsets = [0, 1, 67, 67, 130]  # one of them is empty
    inputs = inputs_of(op, B=1, T=130, sequences=4)
    packed = {name: x.requires_grad_() for name, x in inputs.items()}
    names = tensor_arguments(op)
    o, S = op(**packed, output_final_state=True, version=version, cu_seqlens=torch.tensor(offsets))
    found = torch.autograd.grad(o.square().sum() + S.sum(), list(packed.values()))

    outputs, states = [], []
    for n, (start, stop) in enumerate(pairwise(offsets)):
        state = packed["initial_state"][n : n + 1]
        if start < stop:
            part = {name: packed[name][:, start:stop] for name in names}
            output, state = op(**part, initial_state=state, output_final_state=True, version=version)
            outputs.append(output)
        states.append(state)
    separate_o, separate_S = torch.cat(outputs, 1), torch.cat(states)
    expected = torch.autograd.grad(separate_o.square().sum() + separate_S.sum(), list(packed.values()))
    assert relative_error(o, separate_o) < tolerance("o")
    assert relative_error(S, separate_S) < tolerance("S0")
    for name, a, b in zip(packed, found, expected, strict=True):
        assert relative_error(a, b) < tolerance("dS0" if name == "initial_state" else f"d{name}"), name


@pytest.mark.parametrize("cut", [1, 40, 64, 69])
@each_op
def test_a_sequence_continues_from_its_final_state(op, cut):
    inputs = inputs_of(op, T=70)
    names = tensor_arguments(op)
    whole, whole_S = op(**inputs, output_final_state=True)
    first, S = op(
        *(inputs[n][:, :cut] for n in names), initial_state=inputs["initial_state"], output_final_state=True
    )
    second, S = op(*(inputs[n][:, cut:] for n in names), initial_state=S, output_final_state=True)
    assert relative_error(torch.cat([first, second], 1), whole) < tolerance("o")
    assert relative_error(S, whole_S) < tolerance("S0")


@each_version
def test_comba_with_decayed_keys_to_read_is_the_gated_delta_rule(version):
    inputs = inputs_of(gated_delta_rule, T=70)
    p = inputs["log_alpha"].exp()[..., None] * inputs["k"]
    assert relative_error(
        comba(**inputs, p=p, version=version)[0], gated_delta_rule(**inputs, version=version)[0]
    ) < tolerance("o")


@each_version
def test_kda_with_one_decay_for_all_channels_is_the_gated_delta_rule(version):
    inputs = inputs_of(gated_delta_rule, T=70)
    log_alpha = inputs["log_alpha"][..., None].expand_as(inputs["k"])
    assert relative_error(
        kda(**inputs | {"log_alpha": log_alpha}, version=version)[0],
        gated_delta_rule(**inputs, version=version)[0],
    ) < tolerance("o")


@each_version
@each_op
def test_normalize_qk_divides_by_the_norms_and_scale_multiplies_the_queries(op, version):
    inputs = inputs_of(op, T=66)
    long = inputs | {name: 3.0 * inputs[name] for name in ("q", "k", "p") if name in inputs}
    expected = op(**inputs, version=version)[0]
    found = op(**long, version=version, normalize_qk=True, scale=1.0)[0]
    K = inputs["q"].shape[-1]
    # FLA's norm, which is ours, has 1e-6 under the root: 1e-6 / 18 of the norm here.
    torch.testing.assert_close(found, expected * K**0.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_version
@each_op
def test_half_precision_inputs_are_computed_in_float32(op, version, dtype):
    inputs = inputs_of(op, T=66, dtype=dtype)
    o, S = op(**inputs, output_final_state=True, version=version)
    exact_o, exact_S = op(
        **{name: x.float() for name, x in inputs.items()}, output_final_state=True, version=version
    )
    assert (o.dtype, S.dtype) == (dtype, torch.float32)
    assert torch.equal(o, exact_o.to(dtype))
    assert torch.equal(S, exact_S)


@each_version
def test_ssd_takes_keys_of_a_group_as_an_expanded_view(version):
    inputs = inputs_of(ssd, H=3, T=66)
    group = {name: inputs[name][:, :, :1].clone().requires_grad_() for name in ("q", "k")}
    views = {name: x.expand_as(inputs[name]) for name, x in group.items()}
    copies = {name: x.detach().contiguous().requires_grad_() for name, x in views.items()}
    o, expected = (ssd(**inputs | x, version=version)[0] for x in (views, copies))
    assert torch.equal(o, expected)
    found = torch.autograd.grad(o.sum(), list(group.values()))
    parts = torch.autograd.grad(expected.sum(), list(copies.values()))
    for a, b in zip(found, parts, strict=True):
        assert relative_error(a, b.sum(2, keepdim=True)) < tolerance("dq")


@each_op
def test_no_final_state_unless_asked_for_and_no_initial_state_is_zeros(op):
    inputs = inputs_of(op, T=5)
    zeros = inputs | {"initial_state": torch.zeros_like(inputs["initial_state"])}
    o, S = op(*(inputs[name] for name in tensor_arguments(op)))
    assert S is None
    assert torch.equal(o, op(**zeros)[0])


@pytest.mark.parametrize("op", OPS)
def test_one_token_is_decoded_step_by_step_and_more_in_chunks(op):
    assert [v.name for v in registry.versions(op) if "cpu" in v.devices] == list(VERSIONS)
    assert registry.choose(op, "cpu", torch.float32, T=1, K=8, V=8).name == "recurrent"
    assert registry.choose(op, "cpu", torch.float32, T=2, K=8, V=8).name == "chunk"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"k": x["k"][:, :-1]}, r"k has shape .* expected"),
        (lambda x: {"v": x["v"][:, :, :1]}, "v has shape"),
        (lambda x: {"log_alpha": x["log_alpha"][:1]}, "log_alpha has shape"),
        (lambda x: {"log_alpha": x["log_alpha"].bfloat16()}, "log_alpha is .* expected torch.float32"),
        (lambda x: {"log_alpha": -x["log_alpha"]}, "log_alpha has a positive value"),
        (lambda x: {"initial_state": x["initial_state"].mT}, "initial_state S has shape"),
        (lambda x: {"initial_state": (x["initial_state"],) * 2}, "initial_state S is a tuple; pass a tensor"),
        (lambda x: {"cu_seqlens": torch.tensor([0, 4])}, "batch of 1"),
        (lambda x: {"version": "triton9"}, "no version 'triton9'; use one of recurrent, chunk"),
    ],
    ids=["k", "v", "gate", "gate dtype", "positive gate", "state", "two states", "cu_seqlens", "version"],
)
@each_op
def test_bad_arguments_are_refused_by_name(op, change, message):
    inputs = inputs_of(op, T=4)
    with pytest.raises(ValueError, match=message):
        op(**inputs | change(inputs))


def test_kda_refuses_a_gate_without_channels_and_the_others_one_with_channels():
    with pytest.raises(ValueError, match="log_alpha has shape"):
        kda(**inputs_of(kda, T=4) | {"log_alpha": torch.zeros(2, 4, 2)})
    with pytest.raises(ValueError, match="log_alpha has shape"):
        ssd(**inputs_of(ssd, T=4) | {"log_alpha": torch.zeros(2, 4, 2, 16)})


def test_comba_refuses_a_read_key_of_another_size():
    inputs = inputs_of(comba, T=4)
    with pytest.raises(ValueError, match="p has shape"):
        comba(**inputs | {"p": F.pad(inputs["p"], (0, 1))})
