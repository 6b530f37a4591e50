"""The Triton versions against the float64 recurrence: compiled on a card, or interpreted on the CPU
(v3_triton in float32 only; nothing interprets Gluon).

Triton has to know that it interprets when it is imported, so on the CPU the tests run in their own process.
"""

import math
from dataclasses import replace

import pytest
import torch
from tests.interpreter import interpret, interpreted_only, starts_interpreter

pytest.importorskip("triton")

from mdn_kernels import registry
from mdn_kernels.momentum_delta_rule import OP, chunked, momentum_delta_rule
from mdn_kernels.registry import choose, get
from mdn_kernels.testing import GATES, assert_matches_oracle, errors, evaluate, make_inputs

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_card = [
    pytest.param("v3_triton", torch.float32, id="v3-float32"),
    pytest.param("v3_triton", torch.bfloat16, id="v3-bfloat16"),
    pytest.param("v3_triton", torch.float16, id="v3-float16"),
    *(
        pytest.param(
            name,
            dtype,
            id=f"{name}-{str(dtype).removeprefix('torch.')}",
            marks=pytest.mark.skipif(not hopper, reason="needs a Hopper device"),
        )
        for name in ("v4_hopper", "v4_recompute")
        for dtype in (torch.bfloat16, torch.float16)
    ),
]
WHERE = [
    pytest.param(
        "v3_triton",
        torch.float32,
        "cpu",
        id="v3-interpreted",
        marks=interpreted_only,
    ),
    *(
        pytest.param(*case.values, "cuda", id=case.id, marks=[pytest.mark.gpu, *case.marks])
        for case in on_card
        if case.values[1] != torch.float16
    ),
]
slow = pytest.mark.slow
everywhere = pytest.mark.parametrize(("version", "dtype", "device"), WHERE)
SMALL = {
    "v3_triton": {"B": 1, "H": 1, "K": 16, "V": 16},
    "v4_hopper": {"B": 1, "H": 1, "K": 64, "V": 64},
    "v4_recompute": {"B": 1, "H": 1, "K": 64, "V": 64},
}


pytestmark = pytest.mark.usefixtures("poisoned")


@starts_interpreter
@pytest.mark.parametrize("speed", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(speed):
    interpret(__file__, "-m", f"{speed} and not gpu")


@pytest.fixture(autouse=True)
def _interpreted_version(monkeypatch):
    version = replace(get(OP, "v3_triton"), devices=("cpu", "cuda"), automatic=False)
    monkeypatch.setitem(registry._versions[OP], "v3_triton", version)


def check(version, inputs, **keywords):
    q, v = inputs["q"], inputs["v"]
    if misfit := get(OP, version).misfit(q.device, q.dtype, q.shape[-1], v.shape[-1]):
        pytest.skip(misfit)
    if q.dtype == torch.float32:
        assert_matches_oracle(momentum_delta_rule, version, inputs, **keywords)
    else:
        found = errors(momentum_delta_rule, version, inputs, **keywords)
        assert max(found.values()) < 0.03, found


@everywhere
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1},
        {"T": 65},
        {"T": 3, "K": 5, "V": 3},
        pytest.param({"T": 64}, marks=slow),
        pytest.param({"T": 70, "B": 2, "H": 2, "V": 24, "state": True}, marks=slow),
        pytest.param({"T": 130, "K": 20, "V": 40, "state": True}, marks=slow),
    ],
    ids=lambda sizes: "-".join(f"{name}{value}" for name, value in sizes.items()),
)
def test_matches_float64_recurrence(version, dtype, device, sizes):
    check(version, make_inputs(momentum_delta_rule, device=device, dtype=dtype, **(SMALL[version] | sizes)))


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "dtype"), on_card)
@pytest.mark.parametrize(
    ("K", "V"), [(16, 24), (32, 64), (64, 64), (96, 128), (128, 256), (192, 64), (256, 512)]
)
def test_matches_float64_recurrence_at_model_sizes(K, V, version, dtype):
    for T, H in ((130, 3), (300, 6)):
        check(
            version,
            make_inputs(momentum_delta_rule, B=2, T=T, H=H, K=K, V=V, state=True, dtype=dtype, device="cuda"),
        )


@everywhere
@pytest.mark.parametrize(
    "gates", ["log_mu=-inf", *(pytest.param(name, marks=slow) for name in GATES if name != "log_mu=-inf")]
)
def test_matches_float64_recurrence_for_extreme_gates(version, dtype, device, gates):
    check(
        version,
        make_inputs(
            momentum_delta_rule, T=66, gates=gates, state=True, device=device, dtype=dtype, **SMALL[version]
        ),
    )


@everywhere
def test_gates_closed_at_single_tokens_keep_the_others_exact(version, dtype, device):
    inputs = make_inputs(momentum_delta_rule, T=70, state=True, device=device, dtype=dtype, **SMALL[version])
    inputs["log_alpha"] = torch.full_like(inputs["log_alpha"], -0.01)
    inputs["log_mu"] = torch.full_like(inputs["log_mu"], -0.02)
    inputs["log_alpha"][:, 2::5] = -math.inf
    inputs["log_mu"][:, ::3] = -math.inf
    inputs["log_mu"][:, 1::3] = -100.0
    inputs["beta"][:, ::4] = 0.0
    check(version, inputs)
    results = evaluate(momentum_delta_rule, version, inputs)
    for gate in ("log_alpha", "log_mu"):
        assert (results[f"d{gate}"][inputs[gate].isneginf()] == 0).all()


@everywhere
def test_packed_sequences_match_float64_recurrence(version, dtype, device):
    inputs = make_inputs(
        momentum_delta_rule, T=75, state=True, sequences=4, device=device, dtype=dtype, **SMALL[version]
    )
    cu_seqlens = torch.tensor([0, 1, 71, 71, 75], device=device)
    check(version, inputs, cu_seqlens=cu_seqlens)
    # A sequence of no tokens hands its states through.
    results = evaluate(momentum_delta_rule, version, inputs, cu_seqlens=cu_seqlens, gradients=False)
    for final, initial in zip((results["S0"], results["S1"]), inputs["initial_state"], strict=True):
        assert torch.equal(final[2], initial[2])


@everywhere
def test_normalize_qk_and_scale(version, dtype, device):
    inputs = make_inputs(momentum_delta_rule, T=5, device=device, dtype=dtype, **SMALL[version])
    check(version, inputs | {"q": 3 * inputs["q"], "k": inputs["k"] / 4}, normalize_qk=True, scale=1.7)


@slow
@everywhere
def test_inputs_need_not_be_contiguous(version, dtype, device):
    inputs = make_inputs(momentum_delta_rule, T=5, device=device, dtype=dtype, **SMALL[version] | {"H": 2})
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    assert not strided["v"].is_contiguous()
    check(version, strided)


@everywhere
def test_a_backward_in_spans_matches_float64_recurrence(version, dtype, device, monkeypatch):
    monkeypatch.setattr(chunked, "SPAN_ELEMENTS", 1)
    monkeypatch.setattr(chunked, "SPAN_TOKENS", 64)
    inputs = make_inputs(
        momentum_delta_rule, T=150, state=True, device=device, dtype=dtype, **SMALL[version] | {"B": 2}
    )
    assert len(chunked.Layout.of(inputs["q"], inputs["v"], None).spans) == 3
    check(version, inputs)


def operator_inputs(version, dtype, device, T=5):
    inputs = make_inputs(momentum_delta_rule, T=T, state=True, device=device, dtype=dtype, **SMALL[version])
    *tensors, states = inputs.values()
    return [x.requires_grad_() for x in (*tensors, *states)]


def call(version, *tensors, save_residual=True):
    return get(OP, version).load()(
        *tensors[:-2],
        scale=0.25,
        initial_state=tensors[-2:],
        output_final_state=True,
        cu_seqlens=None,
        normalize_qk=False,
        save_residual=save_residual,
    )


@slow
@everywhere
def test_without_residuals_nothing_but_the_inputs_is_kept_and_gradients_are_the_same(version, dtype, device):
    tensors = operator_inputs(version, dtype, device, T=66)
    kept: set[int] = set()

    def pack(x):
        kept.add(x.data_ptr())
        return x

    o, _ = call(version, *tensors)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o_again, _ = call(version, *tensors, save_residual=False)
    assert kept == {x.data_ptr() for x in tensors}
    expected = torch.autograd.grad(o.float().square().sum(), tensors)
    for one, other in zip(
        torch.autograd.grad(o_again.float().square().sum(), tensors), expected, strict=True
    ):
        assert torch.equal(one, other)


@everywhere
@pytest.mark.parametrize("part", [0, 1], ids="SM")
def test_loss_of_one_final_state_alone(version, dtype, device, part):
    tensors = operator_inputs(version, dtype, device)
    found = torch.autograd.grad(call(version, *tensors)[1][part].square().sum(), tensors)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    _, states = momentum_delta_rule(
        *doubles[:-2],
        initial_state=tuple(doubles[-2:]),
        output_final_state=True,
        scale=0.25,
        version="recurrent",
    )
    expected = torch.autograd.grad(
        states[part].square().sum(), doubles, materialize_grads=True, allow_unused=True
    )
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm() + 1e-12


@everywhere
@pytest.mark.parametrize("save_residual", [True, False])
def test_is_registered_as_a_torch_operator(version, dtype, device, save_residual):
    if version == "v4_recompute":
        pytest.skip("has v4_hopper's operator")
    *tensors, S, M = operator_inputs(version, dtype, device)
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(
        torch.ops.mdn_kernels.momentum_delta_rule,
        (*tensors, S, M, None, 0.25, version, save_residual),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@slow
@everywhere
def test_compiles_without_graph_breaks(version, dtype, device):
    tensors = operator_inputs(version, dtype, device)

    def loss(*tensors):
        o, (S, M) = call(version, *tensors)
        return o.float().square().sum() + S.sum() + M.sum()

    expected = torch.autograd.grad(loss(*tensors), tensors)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*tensors), tensors), expected)


def train(version, *tensors):
    """The gradients of a loss, through the public function with its checks."""
    o, (S, M) = momentum_delta_rule(
        *tensors[:-2], initial_state=tensors[-2:], output_final_state=True, version=version
    )
    return torch.autograd.grad(o.float().square().sum() + S.sum() + M.sum(), tensors)


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "dtype"), on_card)
def test_public_function_compiles_without_graph_breaks(version, dtype):
    torch.use_deterministic_algorithms(False)
    tensors = operator_inputs(version, dtype, "cuda", T=200)
    expected = train(version, *tensors)

    def loss(*tensors):
        o, (S, M) = momentum_delta_rule(
            *tensors[:-2], initial_state=tensors[-2:], output_final_state=True, version=version
        )
        return o.float().square().sum() + S.sum() + M.sum()

    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*tensors), tensors)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "dtype"), on_card)
def test_runs_in_a_cuda_graph(version, dtype):
    torch.use_deterministic_algorithms(False)
    tensors = operator_inputs(version, dtype, "cuda", T=200)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(version, *tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = train(version, *tensors)
    with torch.no_grad():  # a replay reads its inputs where they are
        for x in tensors[:3]:
            x.copy_(x.flip(1))
    graph.replay()
    torch.testing.assert_close(found, train(version, *tensors))


def test_float64_and_wide_keys_are_refused_with_a_version_that_fits():
    inputs = make_inputs(momentum_delta_rule, T=4, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"'v3_triton' takes .*, not torch.float64; versions that fit: recurrent"
    ):
        momentum_delta_rule(**inputs, version="v3_triton")
    with pytest.raises(ValueError, match="keys of at most 256 channels, not K=257"):
        momentum_delta_rule(**make_inputs(momentum_delta_rule, T=4, K=257), version="v3_triton")


def test_a_card_gets_the_newest_version_that_fits_it(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, name in (((9, 0), "v4_hopper"), ((8, 0), "v3_triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert choose(OP, "cuda", torch.bfloat16, 64, 256, 512).name == name
    assert choose(OP, "cuda", torch.bfloat16, 64, 96, 512).name == "v3_triton"
    assert choose(OP, "cuda", torch.float32, 64, 256, 512).name == "v3_triton"
    assert choose(OP, "cuda", torch.float64, 64, 256, 512).name == "v2_segsum"
