import random
import re

import pytest

from mdn.config import ConfigError
from mdn.data.selection import Survey, by_hash, by_place, digest, survey

TEXTS = [f"document {n}" for n in range(2000)]


@pytest.mark.parametrize("holdout", [0.001, 0.1, 0.25, 1 / 3, 0.5, 0.999])
@pytest.mark.parametrize("count", [2, 3, 10, 249, 584])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_the_survey_holds_out_exactly_the_last_share(count, holdout, cut):
    texts = TEXTS[:count]
    wanted = int(count * holdout + 0.5)
    if not 0 < wanted < count:
        with pytest.raises(ConfigError, match=r"parts\.p\.holdout"):
            survey("p", [texts], holdout)
        return
    found = survey("p", [texts[:cut], texts[cut:]], holdout)
    assert found.documents == [cut, count - cut]
    assert found.characters == [sum(map(len, texts[:cut])), sum(map(len, texts[cut:]))]
    assert found.held == [digest(text) for text in texts[count - wanted :]]


def test_blank_documents_do_not_count(tmp_path):
    found = survey("p", [["a", "", "b", " \n", "c", "d"]], 0.25)
    assert (found.documents, found.held) == ([4], [digest("d")])


@pytest.mark.parametrize("holdout", [-0.1, 1.0, 1.5])
def test_a_share_out_of_range_is_an_error(holdout):
    with pytest.raises(ConfigError, match=re.escape(f"parts.p.holdout: {holdout}")):
        survey("p", [TEXTS], holdout)
    with pytest.raises(ConfigError, match=re.escape(f"holdout: {holdout}")):
        list(by_hash(TEXTS, 1.0, holdout))


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.01])
def test_a_share_to_keep_out_of_range_is_an_error(keep):
    with pytest.raises(ConfigError, match=f"keep: {keep}"):
        list(by_hash(TEXTS, keep, 0.0))


def test_a_part_without_text_is_an_error():
    with pytest.raises(ValueError, match=r"parts\.p: no document with text"):
        survey("p", [["", "\n"]], 0.0)


def test_half_a_surrogate_pair_is_an_error():
    with pytest.raises(ValueError, match="surrogate"):
        survey("p", [["a", "b\ud800"]], 0.5)


def test_by_place_holds_out_the_tail_and_drops_what_repeats_it():
    texts = ["a", "held", "", "b", "other", "held"]
    held = {digest("held"), digest("other")}  # "other" is held out in another part
    fates = [
        ("train", "a"),
        ("repeated", "held"),
        ("blank", ""),
        ("train", "b"),
        ("repeated", "other"),
        ("heldout", "held"),
    ]
    for cut, documents in ((0, [0, 5]), (2, [2, 3]), (3, [2, 3]), (5, [4, 1]), (6, [5, 0])):
        found = Survey(documents, [0, 0], [digest("held")])
        assert [*by_place(texts[:cut], found, 0, held), *by_place(texts[cut:], found, 1, held)] == fates


def test_by_hash_keeps_and_holds_out_independent_shares():
    fates = [fate for fate, _ in by_hash((f"text {n}" for n in range(20_000)), 0.3, 0.2)]
    kept = len(fates) - fates.count("unselected")
    # four standard deviations of the binomial around its mean
    assert abs(kept - 6000) < 4 * (20_000 * 0.3 * 0.7) ** 0.5
    assert abs(fates.count("heldout") - 0.2 * kept) < 4 * (kept * 0.2 * 0.8) ** 0.5


def test_by_hash_depends_on_the_text_alone():
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    once, twice = ({text: fate for fate, text in by_hash(order, 0.5, 0.1)} for order in (TEXTS, shuffled))
    assert once == twice
    smaller = {text: fate for fate, text in by_hash(TEXTS, 0.25, 0.1)}
    assert all(once[text] == fate for text, fate in smaller.items() if fate != "unselected")  # subsets nest
