"""How far two results lie apart, in standard errors: item by item where both were judged on the same ones."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

Row = Mapping[str, Any]  # of results, or a sample
FEW = 12  # items that differ, up to which all their signs are counted: 4096 sums
ITEMS = ("task_hash", "data", "limit", "n", "window")  # results that agree in these are of the same items
# How a result comes from the mean of its samples, and whether it grows with it.
FROM_MEAN: tuple[tuple[Callable[[float], float], int], ...] = (
    (lambda mean: mean, 1),
    (lambda mean: math.exp(min(-mean, 700)), -1),  # perplexity
    (lambda mean: -mean / math.log(2), -1),  # bits per byte
)


def paired(a: Row, b: Row, of_a: Sequence[Row], of_b: Sequence[Row]) -> tuple[float | None, str] | None:
    """The difference of two results in standard errors (None if every item is alike), and how many items went
    up and down.

    a, b: rows of results; of_a, of_b: samples of their task. None unless they are of the same items and the
    samples give the results.

    The items' differences could as well have had the other sign. The error of their sum is then the root of
    the sum of their squares; of few items, where the sum is far from normal, all signs are counted. Where an
    item is right or wrong, it is McNemar's exact test.
    """
    mine, other = scores(a, of_a), scores(b, of_b)
    same = all(a.get(key) == b.get(key) for key in ITEMS)
    if not same or mine is None or other is None or len(mine) != len(other):
        return None
    gaps = [y - x for x, y in zip(mine, other, strict=True)]
    up, down = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    if not up + down:
        return None, f"{len(gaps)} items, all alike"
    told = f"{len(gaps)} items: {up} up, {down} down"
    if {*mine, *other} <= {0, 1}:
        return mcnemar(up, down), told
    if up + down <= FEW:
        return exchange(gaps), told
    return math.fsum(gaps) / math.hypot(*gaps), told


def scores(row: Row, samples: Sequence[Row]) -> list[float] | None:
    """A number an item, which grows with the result; None where the samples do not give the result."""
    if not samples:
        return None
    pairs = [_score(row["metric"], sample) for sample in samples]
    if any(value is None for value, _ in pairs):
        return None
    mean = math.fsum(value for value, _ in pairs) / math.fsum(weight for _, weight in pairs)
    for result, sign in FROM_MEAN:
        if math.isclose(result(mean), row["value"], rel_tol=1e-6, abs_tol=1e-12):
            return [sign * value for value, _ in pairs]
    return None


def _score(metric: str, sample: Row) -> tuple[Any, float]:
    """Score and weight of an item; of a text its log-likelihood, and the words or tokens it counts for."""
    if "loglikelihood" in sample:
        return sample["loglikelihood"], sample["tokens"]
    score = sample.get(metric)
    return (score[0], score[1]) if isinstance(score, list) else (score, 1)


def mcnemar(up: int, down: int) -> float:
    """The two-sided exact test of `up` against `down` as the standard errors with the same probability."""
    n, most = up + down, max(up, down)
    return _errors(sum(math.comb(n, k) for k in range(most, n + 1)) / 2**n, up - down)


def exchange(gaps: Sequence[float]) -> float:
    """The two-sided exact test of the sum of `gaps` against all their signs, as `mcnemar`."""
    sums, total = [0.0], math.fsum(gaps)
    for gap in filter(None, gaps):
        sums = [found + side for found in sums for side in (gap, -gap)]
    least = abs(total) - 1e-9 * max(sums)
    return _errors(sum(found >= least for found in sums) / len(sums), total)


def _errors(tail: float, sign: float) -> float:
    """The standard errors beyond which `tail` of a normal distribution lies."""
    if tail >= 0.5:
        return 0.0
    return math.copysign(NormalDist().inv_cdf(max(tail, sys.float_info.min)), sign)
