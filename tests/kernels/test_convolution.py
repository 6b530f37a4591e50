"""The short causal convolution against a loop over tokens and taps."""

from itertools import pairwise

import pytest
import torch

from mdn_kernels.common.convolution import short_convolution


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_hand(x_BTD, weight_DW, state_BRD):
    reach = weight_DW.shape[1] - 1
    y = torch.zeros_like(x_BTD)
    for t in range(x_BTD.shape[1]):
        for lag in range(reach + 1):
            source = x_BTD[:, t - lag] if t >= lag else state_BRD[:, reach + t - lag]
            y[:, t] += weight_DW[:, reach - lag] * source
    return y


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 3, 9])
def test_matches_loop_over_taps(T, W):
    x, weight, state = random(2, T, 5), random(5, W, seed=1), random(2, W - 1, 5, seed=2)
    y, new_state = short_convolution(x, weight, state)
    torch.testing.assert_close(y, by_hand(x, weight, state))
    assert torch.equal(new_state, torch.cat([state, x], 1)[:, T:])
    from_nothing, _ = short_convolution(x, weight)
    torch.testing.assert_close(from_nothing, by_hand(x, weight, torch.zeros_like(state)))


def test_decoding_token_by_token_equals_one_call():
    x, weight = random(2, 7, 5), random(5, 4, seed=1)
    whole, end = short_convolution(x, weight)
    state, outputs = None, []
    for t in range(7):
        y, state = short_convolution(x[:, t : t + 1], weight, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    assert torch.equal(state, end)


@pytest.mark.parametrize("offsets", [[0, 9], [0, 1, 9], [0, 4, 4, 6, 9], [0, 0, 9]])
def test_packed_sequences_equal_separate_ones(offsets):
    x, weight = random(1, 9, 5), random(5, 4, seed=1)
    state = random(len(offsets) - 1, 3, 5, seed=2)
    y, new_state = short_convolution(x, weight, state, torch.tensor(offsets))
    for n, (start, stop) in enumerate(pairwise(offsets)):
        piece = torch.cat([state[n], x[0, start:stop]])
        assert torch.equal(new_state[n], piece[len(piece) - 3 :])
        torch.testing.assert_close(y[:, start:stop], by_hand(x[:, start:stop], weight, state[n : n + 1]))


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 2, 5])], ids=["batch", "packed"])
def test_gradients_match_finite_differences(cu_seqlens):
    N = 1 if cu_seqlens is None else 2
    arguments = [random(1, 5, 2), random(2, 4, seed=1), random(N, 3, 2, seed=2)]
    assert torch.autograd.gradcheck(
        lambda *a: short_convolution(*a, cu_seqlens), [a.requires_grad_() for a in arguments]
    )


def test_output_and_state_have_the_inputs_dtype():
    y, state = short_convolution(random(1, 5, 2, dtype=torch.bfloat16), random(2, 4, dtype=torch.float32))
    assert y.dtype == state.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_DW": torch.zeros(3, 4)}, r"weight has shape \[3, 4\]; expected \[D, W\] = \[5, W\]"),
        ({"weight_DW": torch.zeros(5, 0)}, "W ≥ 1"),
        (
            {"state": torch.zeros(1, 4, 5)},
            r"state has shape \[1, 4, 5\]; expected \[N, W - 1, D\] = \[1, 3, 5\]",
        ),
        ({"cu_seqlens": torch.tensor([0, 8])}, "ends at 8; it must end at T=9"),
        ({"state": torch.zeros(1, 3, 5), "cu_seqlens": torch.tensor([0, 2, 9])}, r"= \[2, 3, 5\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"x_BTD": torch.zeros(1, 9, 5), "weight_DW": torch.zeros(5, 4)}
    with pytest.raises(ValueError, match=message):
        short_convolution(**(arguments | change))
