import math
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
import torch

from mdn.config import Evaluation
from mdn.data.shards import ShardWriter, open_split, write_index
from mdn.evaluation.positions import buckets, by_position
from mdn.evaluation.scoring import quiet
from mdn.evaluation.suites import NotRun, positions
from mdn.evaluation.suites.run import Cell
from mdn.tracking.record import Record

from .models import EOT, VOCABULARY, Constant

TOKENS = 700


@pytest.fixture
def folder(tmp_path):
    """Documents of 300, 1 and 399 tokens in two shards; a part that is shorter than a window."""
    random = np.random.default_rng(0)
    splits = {}
    for split, lengths in (("heldout_wiki", (300, 1, 399)), ("heldout_c4", (50,))):
        writer = ShardWriter(tmp_path, split, 350)
        for length in lengths:
            tokens = random.integers(0, 300, length, dtype=np.uint16)
            tokens[-1] = EOT
            writer.write(tokens)
        splits[split] = writer.close()
    write_index(tmp_path, splits, [])
    return tmp_path


def alone(model, tokens: list[int]) -> list[float]:
    """Brute force: the loss of every token, each from a pass over what is before it."""
    found = []
    with torch.no_grad():
        for n, token in enumerate(tokens):
            h, _ = model.hidden(torch.tensor([[EOT, *tokens[:n]]]))
            found.append(-model.logits(h[0, -1]).double().log_softmax(-1)[token].item())
    return found


@pytest.mark.parametrize("batch_tokens", [1, 300, 10_000])
def test_losses_are_those_of_each_token_alone(model, folder, batch_tokens):
    split = open_split(folder, "heldout_wiki")
    found = by_position(model, split, length=128, most=9, batch_tokens=batch_tokens)
    assert found.shape == (TOKENS // 128, 128)
    for window in (0, 2, 4):  # the third spans two shards
        wanted = alone(model, split.tokens(128 * window, 128 * (window + 1)).tolist())
        assert found[window].tolist() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("most", "windows"), [(1, 1), (3, 3), (5, 5), (100, 5)])
def test_windows_are_whole_and_no_more_than_asked_for(folder, most, windows):
    split = open_split(folder, "heldout_wiki")
    found = by_position(Constant(), split, length=128, most=most, batch_tokens=300)
    assert found.shape == (windows, 128)
    assert found.tolist() == pytest.approx(np.full(found.shape, math.log(VOCABULARY)), rel=1e-5)


@pytest.mark.parametrize("length", [64, 128, 1024, 16384])
def test_buckets_cover_every_position_once_up_to_powers_of_two(length):
    found = buckets(length)
    assert [n for start, stop in found for n in range(start, stop)] == list(range(length))
    assert all(math.log2(stop).is_integer() for _, stop in found)
    assert found[-1] == ((0, 64) if length == 64 else (length // 2, length))


@pytest.fixture
def cell(folder, model) -> Cell:
    setting = Evaluation(
        limit=None, window=64, batch_tokens=300, heldout_tokens=0, position_length=256, position_windows=4
    )
    return Cell(Record(folder / "run"), model, None, setting, folder, folder)


def test_a_bucket_is_the_mean_over_its_positions_and_windows(cell, folder, model):
    assert positions.tasks(cell) == ["heldout_wiki", "heldout_c4"]
    results, samples = positions.run(cell, "heldout_wiki", quiet)
    split = open_split(folder, "heldout_wiki")
    losses = [alone(model, split.tokens(start, start + 256).tolist()) for start in (0, 256)]
    assert [row["metric"] for row in results] == ["nll@64", "nll@128", "nll@256"]
    for row, span in zip(results, [slice(0, 64), slice(64, 128), slice(128, 256)], strict=True):
        each = [mean(loss[span]) for loss in losses]
        assert row["value"] == pytest.approx(mean(each), abs=1e-4)
        assert row["stderr"] == pytest.approx(stdev(each) / math.sqrt(2), abs=1e-4)
        assert row["n"] == 2 * (span.stop - span.start)
        assert [sample[row["metric"]] for sample in samples] == pytest.approx(each, abs=1e-4)


def test_one_window_has_no_error(cell):
    one = replace(cell, evaluation=replace(cell.evaluation, position_length=512))
    results, _ = positions.run(one, "heldout_wiki", quiet)
    assert [row["stderr"] for row in results] == [None] * 4


def test_a_part_shorter_than_a_window_is_left_out_and_says_why(cell):
    with pytest.raises(NotRun, match=r"position_length: 256 .* 50 tokens of heldout_c4"):
        positions.run(cell, "heldout_c4", quiet)


def test_the_identity_follows_windows_and_tokens(cell, folder):
    before = positions.identity(cell)
    for change in ({"position_length": 128}, {"position_windows": 3}):
        assert positions.identity(replace(cell, evaluation=replace(cell.evaluation, **change))) != before
    writer = ShardWriter(folder, "heldout_wiki", 350)
    writer.write(np.arange(300, dtype=np.uint16))
    write_index(folder, {"heldout_wiki": writer.close()}, [])
    assert positions.identity(cell) != before


def test_likelihoods_that_are_not_finite_are_refused(cell):
    with pytest.raises(FloatingPointError, match="not finite"):
        positions.run(replace(cell, model=Constant(float("nan"))), "heldout_wiki", quiet)
