"""Version `step_triton`, one token in one launch, against the float64 recurrence: compiled on a card, or
interpreted on the CPU, where the tests run in their own process (see tests/interpreter.py).
"""

from dataclasses import replace

import pytest
import torch
from tests.interpreter import everywhere, interpret, starts_interpreter

pytest.importorskip("triton")

from mdn_kernels import overwriting_states, registry
from mdn_kernels.comba import comba
from mdn_kernels.gated_delta_rule import gated_delta_rule
from mdn_kernels.kda import kda
from mdn_kernels.momentum_delta_rule import momentum_delta_rule
from mdn_kernels.registry import choose, get
from mdn_kernels.ssd import ssd
from mdn_kernels.testing import errors, make_inputs, tensor_arguments

VERSION = "step_triton"
OPS = {op.__name__: op for op in (momentum_delta_rule, gated_delta_rule, comba, kda, ssd)}
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())


pytestmark = pytest.mark.usefixtures("poisoned")


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def _interpreted_versions(monkeypatch):
    for name in OPS:
        version = replace(get(name, VERSION), devices=("cpu", "cuda"), automatic=False)
        monkeypatch.setitem(registry._versions[name], VERSION, version)


def token(op, device, dtype, **options):
    sizes = {"B": 2, "H": 3, "K": 16, "V": 24, "state": True}
    sizes["per_channel"] = ("log_alpha",) if op is kda else ()
    return make_inputs(op, T=1, device=device, dtype=dtype, **(sizes | options))


def check(op, inputs, **keywords):
    found = errors(op, VERSION, inputs, gradients=False, **keywords)
    limit = {torch.float32: 2e-6, torch.bfloat16: 6e-3}[inputs["q"].dtype]
    assert max(found.values()) < limit, found


@everywhere
@each_op
@pytest.mark.parametrize(
    "options",
    [{}, {"state": False}, {"K": 5, "V": 3}, {"gates": "alpha=0"}, {"gates": "wide"}, {"K": 40, "V": 70}],
    ids=str,
)
def test_matches_float64_recurrence(op, device, dtype, options):
    check(op, token(op, device, dtype, **options))


@pytest.mark.gpu
@each_op
@pytest.mark.parametrize("B", [1, 16, 256])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 256), (256, 512)])
def test_matches_float64_recurrence_at_model_sizes(op, B, K, V):
    check(op, token(op, "cuda", torch.bfloat16, B=B, H=6, K=K, V=V), normalize_qk=True)


@everywhere
@each_op
def test_normalize_qk_and_scale(op, device, dtype):
    inputs = token(op, device, dtype)
    longer = inputs | {"q": 3 * inputs["q"], "k": inputs["k"] / 4}
    check(op, longer, normalize_qk=True, scale=1.7)


@everywhere
def test_heads_may_share_queries_and_keys(device, dtype):
    inputs = token(ssd, device, dtype)
    check(ssd, inputs | {name: inputs[name][:, :, :1].expand(-1, -1, 3, -1) for name in "qk"}, scale=1.0)


@everywhere
@each_op
def test_queries_keys_and_values_may_be_parts_of_one_projection(op, device, dtype):
    inputs = token(op, device, dtype, K=16, V=16)
    parts = torch.cat([inputs[name].flatten(2) for name in "qkv"], -1).split(48, -1)
    views = {name: part.unflatten(-1, (3, 16)) for name, part in zip("qkv", parts, strict=True)}
    assert not views["q"].is_contiguous()
    check(op, inputs | views)


def states_of(inputs):
    states = inputs["initial_state"]
    return states if isinstance(states, tuple) else (states,)


def call(op, inputs):
    names = tensor_arguments(op)
    o, final = op(
        *(inputs[name] for name in names),
        initial_state=inputs["initial_state"],
        output_final_state=True,
        version=VERSION,
    )
    return o, final if isinstance(final, tuple) else (final,)


@everywhere
@each_op
def test_states_are_overwritten_only_where_that_was_asked_for(op, device, dtype):
    inputs = token(op, device, dtype)
    before = [x.clone() for x in states_of(inputs)]
    o, final = call(op, inputs)
    for x, y in zip(states_of(inputs), before, strict=True):
        assert torch.equal(x, y)
    with overwriting_states():
        again, overwritten = call(op, inputs)
    assert torch.equal(again, o)
    for x, y, z in zip(states_of(inputs), overwritten, final, strict=True):
        assert y.data_ptr() == x.data_ptr()
        assert torch.equal(x, z)


@everywhere
@each_op
def test_where_gradients_are_wanted_the_recurrence_computes_and_nothing_is_overwritten(op, device, dtype):
    inputs = token(op, device, dtype)
    inputs["v"].requires_grad_()
    before = [x.clone() for x in states_of(inputs)]
    with overwriting_states():
        o, final = call(op, inputs)
    assert o.requires_grad
    assert final[0].requires_grad
    for x, y in zip(states_of(inputs), before, strict=True):
        assert torch.equal(x, y)


@everywhere
@each_op
def test_packed_sequences_of_which_one_has_a_token(op, device, dtype):
    inputs = token(op, device, dtype, B=1, sequences=3)
    check(op, inputs, cu_seqlens=torch.tensor([0, 0, 1, 1], device=device))


@pytest.mark.parametrize("name", OPS)
def test_decodes_by_default_on_a_card(monkeypatch, name):
    monkeypatch.undo()
    assert choose(name, "cuda", torch.bfloat16, 1, 256, 512).name == VERSION
    assert choose(name, "cuda", torch.float64, 1, 256, 512).name == "recurrent"
    assert choose(name, "cpu", torch.float32, 1, 256, 512).name == "recurrent"
