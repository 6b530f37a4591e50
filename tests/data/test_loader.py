import numpy as np
import pytest
import torch
from test_shards import make_documents, write_set
from torch.utils.data import DataLoader

from mdn.data import gpt2
from mdn.data.loader import TrainingWindows, packed
from mdn.data.order import Order, window_count
from mdn.data.shards import open_split

CONTEXT = 7
DOCUMENTS = make_documents([11] * 40, seed=3)
TOKENS = np.concatenate(DOCUMENTS).astype(np.int64)


@pytest.fixture
def split(tmp_path):
    return open_split(write_set(tmp_path / "tiny", DOCUMENTS, shard_tokens=50), "train")


def order(batch: int = 8) -> Order:
    return Order(window_count(len(TOKENS), CONTEXT), batch, 42)


def test_items_are_the_windows_of_the_order_and_their_next_tokens(split):
    windows = TrainingWindows(split, CONTEXT, order(), 0, 20)  # 160 of 62 windows: two epochs and a half
    assert len(windows) == 20
    for step, item in enumerate(windows):
        starts = order().indices(step) * CONTEXT
        for row, start in enumerate(starts):
            assert item["ids"][row].tolist() == TOKENS[start : start + CONTEXT].tolist()
            assert item["labels"][row].tolist() == TOKENS[start + 1 : start + CONTEXT + 1].tolist()
        assert item["ids"].dtype == item["labels"].dtype == torch.int64
        assert item["ids"].shape == item["labels"].shape == (8, CONTEXT)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(split, ranks):
    whole = TrainingWindows(split, CONTEXT, order(), 0, 10)
    parts = [TrainingWindows(split, CONTEXT, order(), 0, 10, rank, ranks) for rank in range(ranks)]
    for step in range(10):
        for key in ("ids", "labels"):
            assert torch.equal(torch.cat([part[step][key] for part in parts]), whole[step][key])


def test_a_resumed_run_goes_on_where_it_stopped(split):
    whole = [item["ids"] for item in TrainingWindows(split, CONTEXT, order(), 0, 12)]
    for first, last in [(0, 5), (5, 9), (9, 12)]:  # two interruptions
        again = [item["ids"] for item in TrainingWindows(split, CONTEXT, order(), first, last)]
        assert all(torch.equal(a, b) for a, b in zip(again, whole[first:last], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_keep_the_order(split, workers):
    windows = TrainingWindows(split, CONTEXT, order(), 3, 9)
    loaded = list(DataLoader(windows, batch_size=None, num_workers=workers))
    assert len(loaded) == 6
    assert all(torch.equal(item["ids"], windows[i]["ids"]) for i, item in enumerate(loaded))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"order": Order(99, 8, 42)}, r"order\.windows: 99, but split train has 62 windows of 7"),
        ({"context": 8}, r"order\.windows: 62, but split train has 54 windows of 8"),
        ({"world_size": 3}, "world_size: 3 does not divide a batch of 8"),
        ({"rank": 2, "world_size": 2}, "rank: 2 is not below world_size 2"),
        ({"rank": -1}, "rank: -1"),
        ({"first_step": 5, "last_step": 4}, "first_step: 5 is not between 0 and last_step 4"),
    ],
)
def test_what_does_not_fit_together_is_an_error(split, change, error):
    arguments = {"split": split, "context": CONTEXT, "order": order(), "first_step": 0, "last_step": 1}
    with pytest.raises(ValueError, match=error):
        TrainingWindows(**{**arguments, **change})


def test_packing_opens_a_sequence_at_every_row_and_end_of_text():
    E = gpt2.EOT
    ids = torch.tensor([[5, 6, E, 7], [E, E, 8, 9]])
    batch = packed({"ids": ids, "labels": ids + 1})
    assert batch["ids"].tolist() == [[5, 6, E, 7, E, E, 8, 9]]
    assert batch["labels"].tolist() == [[6, 7, E + 1, 8, E + 1, E + 1, 9, 10]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 4, 5, 8]
    assert ids.tolist() == [[5, 6, E, 7], [E, E, 8, 9]]
