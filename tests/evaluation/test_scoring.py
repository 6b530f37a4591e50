import pytest
import torch

from mdn.evaluation.scoring import score, token_batches

from .models import Constant


def random_pairs(seed: int, count: int, longest: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(seed)

    def ids(high: int) -> list[int]:
        length = int(torch.randint(1, high, (), generator=generator))
        return torch.randint(0, 300, (length,), generator=generator).tolist()

    return [(ids(longest), ids(7)) for _ in range(count)]


def one_by_one(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Brute force: one unpadded sequence, all logits, float64."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        logits = model.logits(model.hidden(ids)[0])[0].double().log_softmax(-1)
    span = range(len(context) - 1, ids.shape[1] - 1)
    value = sum(logits[t, ids[0, t + 1]].item() for t in span)
    return value, all(logits[t].argmax() == ids[0, t + 1] for t in span)


@pytest.mark.parametrize("batch_tokens", [1, 37, 400, 100_000])
def test_scores_are_those_of_each_sequence_alone(model, batch_tokens):
    pairs = random_pairs(0, 31, 60)
    found = score(model, pairs, window=128, batch_tokens=batch_tokens)
    for (value, greedy), pair in zip(found, pairs, strict=True):
        wanted, wanted_greedy = one_by_one(model, *pair)
        assert value == pytest.approx(wanted, abs=1e-4)
        assert greedy == wanted_greedy


def test_greedy_continuation_is_recognised_and_its_change_too(model):
    ids = [5, 6, 7]
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(model.logits(model.hidden(torch.tensor([ids]))[0])[0, -1].argmax()))
    wrong = [*ids[3:-1], ids[-1] + 1]
    found = score(model, [(ids[:3], ids[3:]), (ids[:3], wrong)], window=16, batch_tokens=100)
    assert [greedy for _, greedy in found] == [True, False]


def test_equal_inputs_are_read_once(model, monkeypatch):
    read = []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids: read.append(ids.shape) or hidden(ids))
    score(model, [([1, 2, 3], [4]), ([1, 2, 3], [9]), ([1, 2], [3, 5])], window=8, batch_tokens=100)
    assert read == [(1, 3)]


def test_only_the_last_window_tokens_are_read(model):
    pair = (list(range(50)), [60, 61])
    (found,) = score(model, [pair], window=10, batch_tokens=100)
    assert found[0] == pytest.approx(one_by_one(model, pair[0][-9:], pair[1])[0], abs=1e-4)


def test_batches_keep_to_the_budget_and_lose_nothing():
    inputs = [tuple(range(n)) for n in (90, 40, 40, 39, 12, 3, 3, 1)]
    batches = token_batches(inputs, 80)
    assert [ids for batch in batches for ids in batch] == inputs
    assert [len(batch) for batch in batches] == [1, 2, 2, 3]


def test_progress_reaches_the_end(model):
    seen = []
    pairs = [*random_pairs(1, 9, 20), ([1], [])]
    score(model, pairs, window=64, batch_tokens=40, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (10, 10)
    assert seen == sorted(seen)


def test_an_empty_continuation_is_certain(model):
    assert score(model, [([1], [])], window=4, batch_tokens=8) == [(0.0, True)]


@pytest.mark.parametrize(
    ("pair", "message"), [(([], [1]), "end-of-text"), (([1], [1, 2, 3]), "evaluation.window to 3")]
)
def test_what_cannot_be_scored_is_refused(model, pair, message):
    with pytest.raises(ValueError, match=message):
        score(model, [pair], window=2, batch_tokens=8)


@pytest.mark.parametrize("logit", [float("nan"), float("inf"), -float("inf")])
def test_likelihoods_that_are_not_finite_are_an_error(logit):
    with pytest.raises(FloatingPointError, match="not finite"):
        score(Constant(logit), [([1], [2])], window=4, batch_tokens=8)
