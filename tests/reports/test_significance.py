import itertools
import math
import random
from statistics import pstdev

import pytest
from scipy.stats import binomtest, norm, permutation_test

from mdn.reports.significance import mcnemar, paired, scores


def row(value: float, metric: str = "f1", **changed: object) -> dict:
    """A result of some items."""
    items = {"task_hash": "abc", "data": "set, sha256 123", "limit": None, "n": 9, "window": 64}
    return {"task": "qasper", "metric": metric, "value": value, **items, **changed}


def samples(values: list, metric: str = "f1") -> list[dict]:
    return [{"task": "qasper", metric: value} for value in values]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


@pytest.mark.parametrize(("up", "down"), [(20, 5), (5, 20), (1, 0), (0, 6), (7, 7), (4, 3), (700, 810)])
def test_right_and_wrong_answers_have_the_probability_of_the_exact_test(up, down):
    z = mcnemar(up, down)
    assert 2 * norm.sf(abs(z)) == pytest.approx(binomtest(up, up + down).pvalue, rel=1e-9)
    assert z * (up - down) >= 0


def test_thousands_of_changed_answers_are_a_finite_number_of_errors():
    assert mcnemar(0, 5000) < -30


def test_the_error_of_paired_scores_is_that_over_all_exchanges_of_the_two():
    chance = random.Random(1)
    a, b = ([chance.random() for _ in range(13)] for _ in range(2))
    gaps = [y - x for x, y in zip(a, b, strict=True)]
    exchanged = [
        mean([sign * gap for sign, gap in zip(signs, gaps, strict=True)])
        for signs in itertools.product((1, -1), repeat=13)
    ]
    z, told = paired(row(mean(a)), row(mean(b)), samples(a), samples(b))
    assert z == pytest.approx(mean(gaps) / pstdev(exchanged))
    assert told == f"13 items: {sum(gap > 0 for gap in gaps)} up, {sum(gap < 0 for gap in gaps)} down"


@pytest.mark.parametrize(
    "gaps", [[0.5] * 4, [-0.5] * 7, [0.1, 0.4, -0.2, 0.0, 0.9], [0.3, -0.3], [0.25] * 12]
)
def test_few_items_have_the_probability_of_the_exact_test(gaps):
    """Four items that all went up are no star: one in eight would by chance."""
    a = [0.125 * (n % 3) for n in range(len(gaps))]
    b = [x + gap for x, gap in zip(a, gaps, strict=True)]
    z, _ = paired(row(mean(a)), row(mean(b)), samples(a), samples(b))
    exact = permutation_test(
        (b, a), lambda x, y: math.fsum(x) - math.fsum(y), permutation_type="samples", vectorized=False
    )
    assert 2 * norm.sf(abs(z)) == pytest.approx(exact.pvalue)
    assert z * math.fsum(gaps) >= 0


def test_items_that_are_all_alike_have_no_error():
    same = row(0.5), row(0.5), samples([0.5, 0.5]), samples([0.5, 0.5])
    assert paired(*same) == (None, "2 items, all alike")


@pytest.mark.parametrize("changed", [{"task_hash": "abd"}, {"data": "other"}, {"limit": 9}, {"window": 32}])
def test_other_items_are_not_paired(changed):
    a, b = [0.1, 0.5], [0.3, 0.2]
    assert paired(row(mean(a)), row(mean(b)), samples(a), samples(b))
    assert paired(row(mean(a)), row(mean(b), **changed), samples(a), samples(b)) is None


@pytest.mark.parametrize("left", [[], samples([0.1, 0.6]), samples([0.1]), [{"task": "qasper"}, {}]])
def test_samples_that_do_not_give_the_result_are_not_used(left):
    a, b = [0.1, 0.5], [0.3, 0.2]
    assert paired(row(mean(a)), row(mean(b)), left, samples(b)) is None


@pytest.mark.parametrize(
    ("metric", "value", "kept"),
    [
        ("perplexity", math.exp(7 / 3), samples([-1.0, -2.0, -4.0], "perplexity")),
        ("word_perplexity", math.exp(7 / 10), samples([[-1.0, 2], [-2.0, 3], [-4.0, 5]], "word_perplexity")),
        ("bits_per_byte", 0.7 / math.log(2), samples([[-1.0, 2], [-2.0, 3], [-4.0, 5]], "bits_per_byte")),
        (
            "perplexity",
            math.exp(7 / 10),
            [{"loglikelihood": v, "tokens": n} for v, n in ((-1.0, 2), (-2.0, 3), (-4.0, 5))],
        ),
    ],
)
def test_items_of_a_perplexity_count_by_their_loss(metric, value, kept):
    assert scores(row(value, metric), kept) == [1.0, 2.0, 4.0]
    assert scores(row(value + 0.01, metric), kept) is None
