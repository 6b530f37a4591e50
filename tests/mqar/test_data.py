"""MQAR's data against its definition: answers found by reading, frequencies against exact probabilities."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from mdn.config import Examples, MqarData
from mdn.mqar.data import (
    IGNORED,
    SPLITS,
    _distinct,
    batches,
    generate,
    open_split,
    prepare,
    read_index,
)

TINY = MqarData(
    vocabulary=64,
    train=[Examples(16, 2, 40), Examples(32, 8, 21)],
    test=[Examples(64, 4, 12)],
    validation_examples=5,
)


def made(length: int, pairs: int, examples: int, vocabulary: int = 8192, seed: int = 0):
    return generate(Examples(length, pairs, examples), vocabulary, np.random.default_rng(seed))


def answer(prefix: list[int]) -> int:
    """What a reader with nothing but the tokens so far answers to the last of them: the token that
    followed it when it first came."""
    return prefix[prefix.index(prefix[-1]) + 1]


@pytest.mark.parametrize(("length", "pairs"), [(8, 2), (64, 4), (256, 64), (250, 33), (2048, 512)])
def test_every_query_has_the_answer_that_reading_the_prefix_gives(length, pairs):
    data = made(length, pairs, 10)
    labels_NT = data.labels_NT()
    for ids, labels in zip(data.ids_NT.tolist(), labels_NT.tolist(), strict=True):
        asked = [t for t, label in enumerate(labels) if label != IGNORED]
        assert len(asked) == pairs
        assert [answer(ids[: t + 1]) for t in asked] == [labels[t] for t in asked]
        assert sorted(ids[t] for t in asked) == sorted(ids[0 : 2 * pairs : 2])
        assert all(t >= 2 * pairs and t % 2 == 0 for t in asked)


def test_keys_and_values_are_distinct_and_from_their_halves():
    data = made(2048, 512, 20)
    keys, values = data.ids_NT[:, :1024:2], data.ids_NT[:, 1:1024:2]
    assert all(len(set(row)) == 512 for row in [*keys.tolist(), *values.tolist()])
    assert keys.min() >= 1
    assert keys.max() < 4096 <= values.min()
    assert values.max() < 8192


def test_the_smallest_vocabulary_uses_every_key():
    keys = made(32, 7, 50, vocabulary=16).ids_NT[:, 0:14:2]
    assert (np.sort(keys, 1) == np.arange(1, 8)).all()


def test_distinct_numbers_come_in_every_order_equally_often():
    """Three of five, 60 ordered choices: chi-squared with 59 degrees of freedom, 3 standard deviations."""
    rows = _distinct(np.random.default_rng(3), 60_000, 3, 0, 5)
    counts = [np.count_nonzero((rows == choice).all(1)) for choice in permutations(range(5), 3)]
    assert sum(counts) == 60_000
    chi = sum((count - 1000) ** 2 / 1000 for count in counts)
    assert abs(chi - 59) < 3 * np.sqrt(2 * 59)


def test_queries_are_placed_by_successive_draws_with_power_law_weights():
    """Two keys on four places against the exact probability of every outcome."""
    N = 60_000
    data = made(12, 2, N, vocabulary=64, seed=5)
    places = (data.queries_NP - 4) // 2
    weights = np.arange(1, 5) ** (0.01 - 1)  # Zoology's power_a
    p = weights / weights.sum()
    for i, j in permutations(range(4), 2):
        expected = p[i] * p[j] / (1 - p[i])
        share = np.mean((places[:, 0] == i) & (places[:, 1] == j))
        assert share == pytest.approx(expected, abs=4 * np.sqrt(expected / N))


def test_noise_is_uniform_over_the_whole_vocabulary():
    data = made(64, 1, 2000, vocabulary=16)
    noise = np.ones(data.ids_NT.shape, bool)
    noise[:, :2] = False
    np.put_along_axis(noise, data.queries_NP.astype(int), False, 1)
    counts = np.bincount(data.ids_NT[noise], minlength=16)
    expected = noise.sum() / 16
    assert abs(counts - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 14, "pairs": 4}, ["length: 14", "pairs=4", "16"]),
        ({"length": 15, "pairs": 1}, ["length: 15", "even"]),
        ({"pairs": 0}, ["pairs=0"]),
        ({"examples": 0}, ["examples=0"]),
    ],
)
def test_what_cannot_be_made_is_refused(change, words):
    with pytest.raises(ValueError, match="length") as error:
        replace(Examples(16, 2, 1), **change)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("vocabulary", [63, 16, 2**15 + 2])
def test_a_vocabulary_that_cannot_hold_the_pairs_is_refused(vocabulary):
    with pytest.raises(ValueError, match=f"vocabulary: {vocabulary}.*18 to 32768"):
        replace(TINY, vocabulary=vocabulary)


def test_data_are_made_once_and_depend_on_the_seed_alone(tmp_path):
    folder = prepare(TINY, 1, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare(TINY, 1, tmp_path) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    again, other = prepare(TINY, 1, tmp_path / "again"), prepare(TINY, 2, tmp_path)
    assert read_index(again) == read_index(folder)
    assert read_index(other)["digest"] != read_index(folder)["digest"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for split, sizes in zip(SPLITS, ([40, 21], [5], [12]), strict=True):
        assert [len(part) for part in open_split(folder, TINY, split)] == sizes


def test_another_part_changes_no_other(tmp_path):
    more = replace(TINY, train=[Examples(8, 1, 3), *TINY.train])
    old = open_split(prepare(TINY, 1, tmp_path), TINY, "train")
    new = open_split(prepare(more, 1, tmp_path), more, "train")
    assert all((a.ids_NT == b.ids_NT).all() for a, b in zip(old, new[1:], strict=True))


def test_no_keys_of_the_test_are_those_of_a_validation_example(tmp_path):
    folder = prepare(TINY, 1, tmp_path)
    validation, test = (
        {tuple(keys) for part in open_split(folder, TINY, split) for keys in part.ids_NT[:, :8:2].tolist()}
        for split in ("validation", "test")
    )
    assert not validation & test


def test_an_epoch_has_every_example_once_in_batches_of_one_length():
    parts = [made(16, 2, 40), made(32, 8, 21)]
    order = batches(parts, 8, seed=3, epoch=1)
    assert sorted(len(rows) for _, rows in order) == [5] + [8] * 7
    for n, part in enumerate(parts):
        assert sorted(np.concatenate([rows for m, rows in order if m == n])) == list(range(len(part)))

    def plain(seed: int, epoch: int) -> list:
        return [(n, rows.tolist()) for n, rows in batches(parts, 8, seed, epoch)]

    assert plain(3, 1) == plain(3, 1)
    assert plain(3, 1) != plain(3, 2)
    assert plain(3, 1) != plain(4, 1)
    assert [n for n, _ in order] not in ([0] * 5 + [1] * 3, [1] * 3 + [0] * 5)
