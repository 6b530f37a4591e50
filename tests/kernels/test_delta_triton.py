"""Version `triton` of gated_delta_rule and comba against the float64 recurrence: compiled on a card, or
interpreted on the CPU, where the tests run in their own process (see tests/interpreter.py).
"""

import math
from dataclasses import replace

import pytest
import torch
from tests.interpreter import everywhere, interpret, starts_interpreter

pytest.importorskip("triton")

from mdn_kernels import registry
from mdn_kernels.comba import comba
from mdn_kernels.common.delta_triton import delta_rule
from mdn_kernels.gated_delta_rule import gated_delta_rule
from mdn_kernels.registry import choose, get
from mdn_kernels.testing import (
    GATES,
    assert_matches_oracle,
    errors,
    evaluate,
    make_inputs,
    relative_error,
    tensor_arguments,
)

VERSION = "triton"
OPS = {"gated_delta_rule": gated_delta_rule, "comba": comba}
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
slow = pytest.mark.slow
small = {"B": 1, "H": 1, "K": 16, "V": 16}


pytestmark = pytest.mark.usefixtures("poisoned")


@starts_interpreter
@pytest.mark.parametrize("speed", ["not slow", pytest.param("slow", marks=slow)])
def test_in_the_interpreter(speed):
    interpret(__file__, "-m", f"{speed} and not gpu")


@pytest.fixture(autouse=True)
def _interpreted_versions(monkeypatch):
    for name in OPS:
        version = replace(get(name, VERSION), devices=("cpu", "cuda"), automatic=False)
        monkeypatch.setitem(registry._versions[name], VERSION, version)


def check(op, inputs, **keywords):
    if inputs["q"].dtype == torch.float32:
        assert_matches_oracle(op, VERSION, inputs, **keywords)
    else:
        found = errors(op, VERSION, inputs, **keywords)
        assert max(found.values()) < 0.03, found


@everywhere
@each_op
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1},
        {"T": 65, "state": True},
        {"T": 3, "K": 5, "V": 3},
        pytest.param({"T": 64}, marks=slow),
        pytest.param({"T": 70, "B": 2, "H": 2, "V": 24, "state": True}, marks=slow),
        pytest.param({"T": 130, "K": 40, "V": 40, "state": True}, marks=slow),  # two blocks of channels
    ],
    ids=lambda sizes: "-".join(f"{name}{value}" for name, value in sizes.items()),
)
def test_matches_float64_recurrence(op, device, dtype, sizes):
    check(op, make_inputs(op, device=device, dtype=dtype, **(small | sizes)))


@pytest.mark.gpu
@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("K", "V"), [(16, 24), (32, 64), (64, 64), (96, 128), (128, 128), (128, 256), (192, 64), (256, 512)]
)
def test_matches_float64_recurrence_at_model_sizes(op, K, V, dtype):
    for T, H in ((130, 3), (300, 6)):
        check(op, make_inputs(op, B=2, T=T, H=H, K=K, V=V, state=True, dtype=dtype, device="cuda"))


@everywhere
@each_op
@pytest.mark.parametrize(
    "gates",
    [
        "alpha=0",
        "wide",
        *(pytest.param(g, marks=slow) for g in GATES if "log_mu" not in g and g not in ("alpha=0", "wide")),
    ],
)
def test_matches_float64_recurrence_for_extreme_gates(op, device, dtype, gates):
    check(op, make_inputs(op, T=66, gates=gates, state=True, device=device, dtype=dtype, **small))


@everywhere
@each_op
def test_gates_closed_at_single_tokens_keep_the_others_exact(op, device, dtype):
    inputs = make_inputs(op, T=70, state=True, device=device, dtype=dtype, **small)
    inputs["log_alpha"] = torch.full_like(inputs["log_alpha"], -0.01)
    inputs["log_alpha"][:, 2::5] = -math.inf
    inputs["log_alpha"][:, 1::7] = -100.0
    inputs["beta"][:, ::4] = 0.0
    check(op, inputs)
    results = evaluate(op, VERSION, inputs)
    assert (results["dlog_alpha"][inputs["log_alpha"].isneginf()] == 0).all()


@everywhere
@each_op
def test_packed_sequences_match_float64_recurrence(op, device, dtype):
    inputs = make_inputs(op, T=75, state=True, sequences=4, device=device, dtype=dtype, **small)
    cu_seqlens = torch.tensor([0, 1, 71, 71, 75], device=device)
    check(op, inputs, cu_seqlens=cu_seqlens)
    # A sequence of no tokens hands its state through.
    results = evaluate(op, VERSION, inputs, cu_seqlens=cu_seqlens, gradients=False)
    assert torch.equal(results["S0"][2], inputs["initial_state"][2])


@everywhere
@each_op
def test_normalize_qk_and_scale(op, device, dtype):
    inputs = make_inputs(op, T=5, device=device, dtype=dtype, **small)
    check(op, inputs | {"q": 3 * inputs["q"], "k": inputs["k"] / 4}, normalize_qk=True, scale=1.7)


@slow
@everywhere
@each_op
def test_inputs_need_not_be_contiguous(op, device, dtype):
    inputs = make_inputs(op, T=5, device=device, dtype=dtype, **small | {"H": 2})
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    assert not strided["v"].is_contiguous()
    check(op, strided)


def leaves(op, device, dtype, T=5):
    inputs = make_inputs(op, T=T, state=True, device=device, dtype=dtype, **small)
    return {name: inputs[name].requires_grad_() for name in (*tensor_arguments(op), "initial_state")}


@everywhere
@each_op
def test_loss_of_the_final_state_alone(op, device, dtype):
    tensors = leaves(op, device, dtype)
    _, S = op(**tensors, output_final_state=True, version=VERSION)
    found = torch.autograd.grad(S.square().sum(), list(tensors.values()))
    doubles = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    _, S = op(**doubles, output_final_state=True, version="recurrent")
    expected = torch.autograd.grad(
        S.square().sum(), list(doubles.values()), materialize_grads=True, allow_unused=True
    )
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm() + 1e-12


@everywhere
@each_op
def test_is_registered_as_a_torch_operator(op, device, dtype):
    x = leaves(op, device, dtype)
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(
        torch.ops.mdn_kernels.delta_rule,
        (x["q"], x["k"], x["v"], x.get("p"), x["log_alpha"], x["beta"], x["initial_state"], None, 0.25),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@slow
@everywhere
@each_op
def test_compiles_without_graph_breaks(op, device, dtype):
    def loss(x):
        o, S = delta_rule(
            *(x["q"], x["k"], x["v"], x.get("p"), x["log_alpha"], x["beta"]),
            scale=0.25,
            initial_state=x["initial_state"],
            output_final_state=True,
            cu_seqlens=None,
            normalize_qk=True,
        )
        return o.float().square().sum() + S.sum()

    tensors = leaves(op, device, dtype)
    expected = torch.autograd.grad(loss(tensors), list(tensors.values()))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(tensors), list(tensors.values()))
    # Half precision: the norm is one kernel in eager mode and rounds once.
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert max(map(relative_error, found, expected)) < limit


@pytest.mark.gpu
@each_op
def test_trains_in_a_cuda_graph(op):
    torch.use_deterministic_algorithms(False)
    tensors = leaves(op, "cuda", torch.bfloat16, T=200)

    def train():
        o, S = op(**tensors, output_final_state=True, version=VERSION)
        return torch.autograd.grad(o.float().square().sum() + S.sum(), list(tensors.values()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = train()
    with torch.no_grad():  # a replay reads its inputs where they are
        for name in "qkv":
            tensors[name].copy_(tensors[name].flip(1))
    graph.replay()
    torch.testing.assert_close(found, train())


@each_op
def test_float64_and_wide_keys_are_refused_with_a_version_that_fits(op):
    inputs = make_inputs(op, T=4, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"'triton' takes .*, not torch.float64; versions that fit: recurrent"
    ):
        op(**inputs, version=VERSION)
    with pytest.raises(ValueError, match="keys of at most 256 channels, not K=257"):
        op(**make_inputs(op, T=4, K=257), version=VERSION)


@pytest.mark.parametrize("name", OPS)
def test_is_the_default_on_a_card(monkeypatch, name):
    monkeypatch.undo()
    assert choose(name, "cuda", torch.bfloat16, 64, 256, 512).name == VERSION
    assert choose(name, "cuda", torch.float64, 64, 256, 512).name == "chunk"
