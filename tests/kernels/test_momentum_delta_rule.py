"""The momentum delta rule: versions against the float64 recurrence, and that against hand-made numbers."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mdn_kernels
from mdn_kernels.common.check import check_cu_seqlens
from mdn_kernels.momentum_delta_rule import OP, momentum_delta_rule
from mdn_kernels.registry import choose, get
from mdn_kernels.testing import GATES, assert_matches_oracle, errors, evaluate, make_inputs, relative_error

EXACT = ("recurrent", "v2_segsum")  # the versions that hold the tolerances for all gates
LENGTHS = (1, 2, 3, 63, 64, 65, 130)


def call(inputs, **keywords):
    keywords.setdefault("output_final_state", True)
    return momentum_delta_rule(**inputs, **keywords)


def slice_tokens(inputs, start, stop):
    return {name: x[:, start:stop] for name, x in inputs.items() if name != "initial_state"}


@pytest.mark.parametrize("state", [False, True], ids=["zero_state", "initial_state"])
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("version", EXACT)
def test_matches_float64_recurrence(version, T, state):
    assert_matches_oracle(momentum_delta_rule, version, make_inputs(momentum_delta_rule, T=T, state=state))


@pytest.mark.parametrize("T", [3, 130])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("version", EXACT)
def test_matches_float64_recurrence_for_extreme_gates(version, gates, T):
    assert_matches_oracle(
        momentum_delta_rule, version, make_inputs(momentum_delta_rule, B=1, T=T, gates=gates, state=True)
    )


@pytest.mark.parametrize("version", EXACT)
def test_gates_closed_at_single_tokens_keep_the_others_exact(version):
    inputs = make_inputs(momentum_delta_rule, B=1, T=130, state=True)
    inputs["log_alpha"] = torch.full_like(inputs["log_alpha"], -0.01)
    inputs["log_mu"] = torch.full_like(inputs["log_mu"], -0.02)
    inputs["log_alpha"][:, 2::5] = -math.inf
    inputs["log_mu"][:, ::3] = -math.inf
    inputs["log_mu"][:, 1::3] = -100.0
    inputs["beta"][:, ::4] = 0.0
    assert_matches_oracle(momentum_delta_rule, version, inputs)
    results = evaluate(momentum_delta_rule, version, inputs)
    assert all(x.isfinite().all() for x in results.values())
    for gate in ("log_alpha", "log_mu"):
        closed = inputs[gate].isneginf()
        assert (results[f"d{gate}"][closed] == 0).all()
        assert (results[f"d{gate}"][inputs[gate] > -1] != 0).any()


@pytest.mark.parametrize("version", EXACT)
def test_keys_and_values_of_any_size(version):
    for K, V in ((1, 1), (5, 3), (48, 7)):
        assert_matches_oracle(
            momentum_delta_rule, version, make_inputs(momentum_delta_rule, B=1, T=67, H=3, K=K, V=V)
        )


@pytest.mark.parametrize("version", [*EXACT, "v1_logspace"])
def test_matches_equations_written_out_token_by_token(version):
    inputs = make_inputs(
        momentum_delta_rule, T=7, K=4, V=3, gates="alpha_faster_than_mu", dtype=torch.float64
    )
    q, k, v, log_alpha, beta, log_mu, eta = (x.numpy() for x in inputs.values())
    o, (S_end, M_end) = call(inputs, version=version)
    for b, h in np.ndindex(2, 2):
        S, M = np.zeros((4, 3)), np.zeros((4, 3))
        for t in range(7):
            alpha, mu = math.exp(log_alpha[b, t, h]), math.exp(log_mu[b, t, h])
            residual = v[b, t, h] - S.T @ (alpha * k[b, t, h])
            M = mu * M - eta[b, t, h] * np.outer(k[b, t, h], residual)
            S = alpha * S - beta[b, t, h] * M
            np.testing.assert_allclose(o[b, t, h].numpy(), S.T @ q[b, t, h] / 2, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(S_end[b, h].numpy(), S, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(M_end[b, h].numpy(), M, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("version", EXACT)
def test_first_error_reaches_second_state_through_memory_and_momentum(version):
    # With orthogonal keys both residuals are the values:
    # S_2 = (α_2 β_1 + β_2 μ_2) η_1 k_1 v_1ᵀ + β_2 η_2 k_2 v_2ᵀ.
    gates = {"alpha": (1.0, 0.5), "beta": (0.25, 0.125), "mu": (1.0, 0.75), "eta": (2.0, 3.0)}
    alpha, beta, mu, eta = (torch.tensor(g).reshape(1, 2, 1) for g in gates.values())
    k = torch.eye(2).reshape(1, 2, 1, 2)
    v = torch.tensor([5.0, 7.0]).reshape(1, 2, 1, 1)
    _, (S, M) = momentum_delta_rule(
        k, k, v, alpha.log(), beta, mu.log(), eta, output_final_state=True, version=version
    )
    torch.testing.assert_close(
        S.flatten(), torch.tensor([(0.5 * 0.25 + 0.125 * 0.75) * 2 * 5, 0.125 * 3 * 7])
    )
    torch.testing.assert_close(M.flatten(), torch.tensor([-0.75 * 2 * 5, -3.0 * 7]))


@pytest.mark.parametrize("version", EXACT)
def test_gradients_match_finite_differences(version):
    inputs = make_inputs(momentum_delta_rule, B=1, T=3, H=1, K=3, V=2, state=True, dtype=torch.float64)
    *tensors, (S, M) = inputs.values()

    def function(*arguments):
        o, states = momentum_delta_rule(
            *arguments[:-2], initial_state=arguments[-2:], output_final_state=True, version=version
        )
        return o, *states

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (*tensors, S, M)])


@pytest.mark.parametrize("version", EXACT)
def test_is_the_gated_delta_rule_without_momentum(version):
    inputs = make_inputs(momentum_delta_rule, T=70, gates="log_mu=-inf", dtype=torch.float64)
    inputs["eta"] = torch.ones_like(inputs["eta"])
    q, k, v, log_alpha, beta = list(inputs.values())[:5]
    o, (S_end, _) = call(inputs, version=version)
    S = torch.zeros_like(S_end)
    eye = torch.eye(k.shape[-1], dtype=torch.float64)
    for t in range(70):  # S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ
        k_t, beta_t = k[:, t, :, :, None], beta[:, t, :, None, None]
        S = log_alpha[:, t, :, None, None].exp() * (eye - beta_t * k_t @ k_t.mT) @ S
        S = S + beta_t * k_t @ v[:, t, :, None]
        torch.testing.assert_close(o[:, t], (q[:, t, :, None] @ S)[:, :, 0] / 4)
    torch.testing.assert_close(S_end, S)


@pytest.mark.parametrize("version", EXACT)
def test_beta_zero_only_decays_the_state(version):
    inputs = make_inputs(momentum_delta_rule, T=65, gates="beta=0", state=True)
    _, (S, _) = call(inputs, version=version)
    decay = inputs["log_alpha"].sum(1).exp()[..., None, None]
    torch.testing.assert_close(S, decay * inputs["initial_state"][0])
    o, _ = call({**inputs, "initial_state": None}, version=version)
    assert (o == 0).all()


@pytest.mark.parametrize("token", [0, 1, 63, 64, 80])
@pytest.mark.parametrize("version", EXACT)
def test_later_tokens_do_not_change_earlier_outputs(version, token):
    inputs = make_inputs(momentum_delta_rule, B=1, T=90)
    before, _ = call(inputs, version=version)
    other = make_inputs(momentum_delta_rule, B=1, T=90, gates="wide", seed=9)
    changed = {name: torch.cat([x[:, :token], other[name][:, token:]], 1) for name, x in inputs.items()}
    after, _ = call(changed, version=version)
    torch.testing.assert_close(after[:, :token], before[:, :token], rtol=1e-6, atol=1e-7)
    assert relative_error(after[:, token:], before[:, token:]) > 0.1


@pytest.mark.parametrize("cut", [1, 64, 70])
@pytest.mark.parametrize("version", EXACT)
def test_continuing_from_final_states_equals_one_call(version, cut):
    inputs = make_inputs(momentum_delta_rule, T=100, dtype=torch.float64)
    whole, states = call(inputs, version=version)
    first, middle = call(slice_tokens(inputs, 0, cut), version=version)
    second, end = call(slice_tokens(inputs, cut, 100), version=version, initial_state=middle)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, states)


def test_decoding_token_by_token_equals_one_call():
    inputs = make_inputs(momentum_delta_rule, T=9)
    whole, states = call(inputs)
    state, outputs = None, []
    for t in range(9):
        o, state = call(slice_tokens(inputs, t, t + 1), initial_state=state)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("version", EXACT)
class TestPackedSequences:
    lengths = (1, 70, 0, 64, 5)
    cu_seqlens = torch.tensor([0, 1, 71, 71, 135, 140])

    def inputs(self):
        return make_inputs(momentum_delta_rule, B=1, T=140, state=True, sequences=5)

    def test_match_float64_recurrence(self, version):
        assert_matches_oracle(momentum_delta_rule, version, self.inputs(), cu_seqlens=self.cu_seqlens)

    def test_equal_separate_ones(self, version):
        inputs = self.inputs()
        packed, (S, M) = call(inputs, version=version, cu_seqlens=self.cu_seqlens)
        starts = self.cu_seqlens.tolist()
        for n, length in enumerate(self.lengths):
            initial = tuple(x[n : n + 1] for x in inputs["initial_state"])
            if length == 0:
                torch.testing.assert_close((S[n : n + 1], M[n : n + 1]), initial)
                continue
            piece = slice_tokens(inputs, starts[n], starts[n + 1])
            o, states = call(piece, version=version, initial_state=initial)
            torch.testing.assert_close(packed[:, starts[n] : starts[n + 1]], o, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close((S[n : n + 1], M[n : n + 1]), states, rtol=1e-5, atol=1e-6)

    def test_do_not_leak_into_each_other(self, version):
        inputs = self.inputs()
        before, _ = call(inputs, version=version, cu_seqlens=self.cu_seqlens)
        other = make_inputs(momentum_delta_rule, B=1, T=140, gates="wide", seed=9)
        changed = {name: x.clone() for name, x in inputs.items() if name != "initial_state"}
        for name, x in changed.items():
            x[:, 1:71] = other[name][:, 1:71]
        after, _ = call(
            changed | {"initial_state": inputs["initial_state"]}, version=version, cu_seqlens=self.cu_seqlens
        )
        assert torch.equal(after[:, 71:], before[:, 71:])
        assert torch.equal(after[:, :1], before[:, :1])
        assert not torch.equal(after[:, 1:71], before[:, 1:71])


@pytest.mark.parametrize("version", EXACT)
def test_normalize_qk_divides_by_the_norms(version):
    inputs = make_inputs(momentum_delta_rule, B=1, T=66)
    inputs |= {"q": 3 * inputs["q"], "k": 0.2 * inputs["k"]}
    assert_matches_oracle(momentum_delta_rule, version, inputs, normalize_qk=True)
    o, _ = call(inputs, version=version, normalize_qk=True)
    by_hand, _ = call(
        inputs | {name: F.normalize(inputs[name], dim=-1) for name in ("q", "k")}, version=version
    )
    torch.testing.assert_close(o, by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", EXACT)
def test_scale_multiplies_queries(version):
    inputs = make_inputs(momentum_delta_rule, B=1, T=5, K=16)
    default, _ = call(inputs, version=version)
    tripled, _ = call(inputs, version=version, scale=3 / math.sqrt(16))
    torch.testing.assert_close(tripled, 3 * default)
    assert_matches_oracle(momentum_delta_rule, version, inputs, scale=1.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("version", EXACT)
def test_low_precision_inputs_are_computed_in_float32(version, dtype):
    inputs = make_inputs(momentum_delta_rule, B=1, T=65, dtype=dtype, state=True)
    results = evaluate(momentum_delta_rule, version, inputs)
    assert results["o"].dtype == results["dq"].dtype == dtype
    assert results["S0"].dtype == results["dlog_mu"].dtype == torch.float32
    found = errors(momentum_delta_rule, version, inputs)
    assert found["S0"] < 1e-5
    assert found["S1"] < 1e-5
    assert max(found.values()) < 4e-3  # half a unit in the last place of bfloat16


@pytest.mark.parametrize("version", EXACT)
def test_autocast_does_not_lower_the_precision(version):
    inputs = make_inputs(momentum_delta_rule, B=1, T=65)
    expected = call(inputs, version=version)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(call(inputs, version=version), expected)


def test_without_output_final_state_there_is_none():
    assert call(make_inputs(momentum_delta_rule, T=3), output_final_state=False)[1] is None


class TestPaperCoefficients:
    """v1_logspace is the paper's algorithm as printed; these are its known limits in float32."""

    def errors(self, gates, **keywords):
        inputs = make_inputs(momentum_delta_rule, B=1, T=256, K=16, V=16, gates=gates, **keywords)
        return errors(momentum_delta_rule, "v1_logspace", inputs, gradients=False)

    def test_right_where_alpha_decays_faster_than_mu(self):
        assert max(self.errors("alpha_faster_than_mu").values()) < 2e-5

    def test_right_in_float64(self):
        found = self.errors("log_mu=-0.05", dtype=torch.float64)
        assert 1e-7 < found["o"] < 1e-4  # not exact: the 1e-6 added to β

    def test_wrong_where_mu_decays_faster_than_alpha(self):
        assert 0.1 < self.errors("log_mu=-0.5")["o"] < math.inf
        assert self.errors("typical")["o"] > 0.1

    @pytest.mark.parametrize("gates", ["log_mu=-2", "log_mu=-20", "log_mu=-inf", "alpha=0"])
    def test_not_finite_for_small_gates(self, gates):
        o, _ = call(make_inputs(momentum_delta_rule, T=256, gates=gates), version="v1_logspace")
        assert o.isnan().any()

    def test_never_chosen(self):
        version = get(OP, "v1_logspace")
        assert not version.automatic
        assert "NaN" in version.note


def test_cpu_default_is_the_chunk_form_and_recurrent_for_one_token():
    assert choose(OP, "cpu", torch.float32, 64, 16, 16).name == "v2_segsum"
    assert choose(OP, "cpu", torch.float32, 1, 16, 16).name == "recurrent"


WRONG = {
    "v_tokens": ({"v": torch.zeros(2, 7, 2, 8)}, r"v has shape \[2, 7, 2, 8\]; expected"),
    "k_shape": ({"k": torch.zeros(2, 8, 2, 5)}, r"k has shape \[2, 8, 2, 5\]; expected \[2, 8, 2, 4\]"),
    "q_rank": ({"q": torch.zeros(8, 2, 4)}, r"q has shape \[8, 2, 4\]"),
    "no_tokens": ({"q": torch.zeros(2, 0, 2, 4)}, "none of them 0"),
    "integer_q": ({"q": torch.zeros(2, 8, 2, 4, dtype=torch.int64)}, "q is torch.int64"),
    "gate_shape": ({"beta": torch.zeros(2, 8, 3)}, r"beta has shape \[2, 8, 3\]; expected \[2, 8, 2\]"),
    "gate_dtype": ({"eta": torch.zeros(2, 8, 2).bfloat16()}, "eta is torch.bfloat16; expected torch.float32"),
    "v_dtype": ({"v": torch.zeros(2, 8, 2, 8).bfloat16()}, "v is torch.bfloat16; expected torch.float32"),
    "device": ({"log_mu": torch.zeros(2, 8, 2, device="meta")}, "log_mu is on meta; expected cpu"),
    "positive_alpha": ({"log_alpha": torch.full((2, 8, 2), 0.5)}, r"log_alpha has a positive value \(0.5\)"),
    "positive_mu": ({"log_mu": torch.full((2, 8, 2), 1e-7)}, "log_mu has a positive value"),
    "one_state": ({"initial_state": torch.zeros(2, 2, 4, 8)}, r"expected the tuple \(S, M\)"),
    "state_shape": (
        {"initial_state": (torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 8, 4))},
        r"initial_state M has shape \[2, 2, 8, 4\]; expected \[2, 2, 4, 8\]",
    ),
    "state_dtype": (
        {"initial_state": (torch.zeros(2, 2, 4, 8).half(),) * 2},
        "initial_state S is torch.float16",
    ),
    "no_tensor": ({"v": None}, "v is a NoneType; pass a tensor"),
    "no_state": (
        {"initial_state": (torch.zeros(2, 2, 4, 8), None)},
        "initial_state M is a NoneType; pass a tensor",
    ),
    "offsets_in_a_list": ({"cu_seqlens": [0, 8]}, "cu_seqlens is a list; pass a tensor"),
    "packed_batch": ({"cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens needs a batch of 1, not B=2"),
    "unknown_version": ({"version": "v9"}, "no version 'v9'; use one of recurrent, v1_logspace, v2_segsum"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(change, message):
    inputs = make_inputs(momentum_delta_rule, B=2, T=8, H=2, K=4, V=8)
    with pytest.raises(ValueError, match=message):
        momentum_delta_rule(**(inputs | change))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 8], "starts at 1"),
        ([0, 5, 3, 8], "decreases"),
        ([0, 7], "ends at 7; it must end at T=8"),
        ([0, 9], "ends at 9"),
        ([0], r"shape \[1\]"),
        ([0.0, 8.0], "torch.float32"),
    ],
)
def test_wrong_cu_seqlens_are_named(offsets, message):
    inputs = make_inputs(momentum_delta_rule, B=1, T=8)
    with pytest.raises(ValueError, match=f"cu_seqlens.*{message}"):
        momentum_delta_rule(**inputs, cu_seqlens=torch.tensor(offsets))


def test_offsets_on_a_gpu_are_read_once_and_again_when_they_change(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class OnGpu(torch.Tensor):
        is_cuda = True
        reads = 0

        def tolist(self):
            OnGpu.reads += 1
            return super().tolist()

    offsets = torch.tensor([0, 3, 8]).as_subclass(OnGpu)
    for _ in range(3):
        check_cu_seqlens(offsets, 1, 8)
    assert OnGpu.reads == 1
    with pytest.raises(ValueError, match="ends at 8; it must end at T=9"):
        check_cu_seqlens(offsets, 1, 9)
    offsets[1] = 9
    with pytest.raises(ValueError, match="decreases"):
        check_cu_seqlens(offsets, 1, 8)
    check_cu_seqlens(torch.tensor([0, 8]).as_subclass(OnGpu), 1, 8)
    assert OnGpu.reads == 3


def test_state_count_follows_the_packed_sequences():
    inputs = make_inputs(momentum_delta_rule, B=1, T=8, state=True)
    with pytest.raises(ValueError, match=r"expected \[2, 2, 16, 24\]"):
        momentum_delta_rule(**inputs, cu_seqlens=torch.tensor([0, 3, 8]))


def test_gate_check_can_be_switched_off(monkeypatch):
    inputs = make_inputs(momentum_delta_rule, T=4)
    inputs["log_alpha"] = torch.full_like(inputs["log_alpha"], 0.1)
    monkeypatch.setattr(mdn_kernels, "CHECK_GATES", False)
    o, _ = momentum_delta_rule(**inputs)
    assert o.isfinite().all()


def test_compiles_without_graph_breaks_with_the_gate_check_on():
    tensors = list(make_inputs(momentum_delta_rule, B=1, T=5, H=1, K=8, V=8).values())
    expected, _ = momentum_delta_rule(*tensors)  # imports the version
    compiled = torch.compile(lambda *x: momentum_delta_rule(*x)[0], backend="aot_eager", fullgraph=True)
    assert mdn_kernels.CHECK_GATES
    torch.testing.assert_close(compiled(*tensors), expected)
