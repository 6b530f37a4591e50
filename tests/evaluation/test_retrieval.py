"""Suite retrieval: windows, prompts and scores by the protocol, whatever the batch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mdn.config import Evaluation
from mdn.evaluation import data
from mdn.evaluation.scoring import quiet
from mdn.evaluation.suites import NotRun, retrieval
from mdn.evaluation.suites.retrieval import SETS, STAND_INS, contains, cut, run

from .files import write_json_lines, write_requests, write_tokens_of
from .models import EOT, Echo, Knowing, byte_tokenizer
from .protocol_items import RETRIEVAL
from .test_mixers import lm  # noqa: F401  every kind of layer

BYTES = byte_tokenizer()
SETTING = Evaluation(
    limit=1, window=1, batch_tokens=500, heldout_tokens=1, retrieval_window=300, retrieval_answer=48
)


def ids(text: str) -> list[int]:
    return BYTES.encode(text, add_special_tokens=False).ids


def write_set(raw, task, items) -> None:
    write_json_lines(raw / "hub" / SETS[task].source.repository / "validation.jsonl", items)


@pytest.fixture
def cell(tmp_path):
    for task, cases in RETRIEVAL.items():
        write_set(tmp_path, task, [case.item for case in cases])
    texts = ["In all there were 1,024 hens and 7 cows.", "Nothing to count here.", "One two three 55 and 55."]
    write_tokens_of(tmp_path / "tokens", {"heldout_wiki": [ids(text) for text in texts]})
    return SimpleNamespace(
        model=None, tokenizer=BYTES, evaluation=SETTING, raw=tmp_path, tokens=tmp_path / "tokens"
    )


def test_every_set_has_items_of_ours():
    assert set(RETRIEVAL) == set(SETS)


@pytest.mark.parametrize("task", SETS)
def test_prompts_are_the_protocols_and_a_model_that_knows_the_answers_scores_100(cell, task):
    cases = RETRIEVAL[task]
    cell.model = Knowing([[*ids(case.prompt + case.right + "\nmore"), EOT] for case in cases])
    (row,), samples = run(cell, task, quiet)
    assert [sample["prompt"] for sample in samples] == [case.prompt for case in cases]
    assert [sample["output"] for sample in samples] == [case.right for case in cases]
    assert (row["task"], row["metric"], row["value"], row["n"]) == (task, "contains", 1.0, len(cases))
    assert (row["truncated"], row["window"], row["limit"]) == (0, 300, None)


@pytest.mark.parametrize("task", SETS)
def test_a_model_that_answers_on_the_second_line_scores_0(cell, task):
    cases = RETRIEVAL[task]
    cell.model = Knowing([[*ids(f"{case.prompt}\n{case.right}"), EOT] for case in cases])
    (row,), _ = run(cell, task, quiet)
    assert row["value"] == 0.0


def test_a_model_that_repeats_the_last_token_is_right_where_that_is_the_answer(cell):
    cow, duck = "The cow says oo, the cow says o", "A duck says quack, the duck says q"
    write_set(cell.raw, "squad", [{"text": cow, "value": "oo"}, {"text": duck, "value": "quack"}])
    cell.model = Echo()
    (row,), samples = run(cell, "squad", quiet)
    assert [sample["output"] for sample in samples] == ["o" * 48, "q" * 48]
    assert (row["value"], row["stderr"]) == (0.5, 0.5)


def test_documents_without_an_answer_are_dropped_and_cut_ones_are_counted(cell):
    text = "x" * 400 + " Ur. The river is the"
    items = [{"text": text, "value": value} for value in ("Ur", "", "U")]
    write_set(cell.raw, "squad", [*items, {"text": "Ur. The river is the", "value": "Ur"}])
    cell.model = Echo()
    (row,), samples = run(cell, "squad", quiet)
    assert (row["n"], row["truncated"]) == (2, 1)
    # half of the 252 tokens before the answer, and what follows it
    assert len(samples[0]["prompt"]) == 126 + len("Ur. The river is the")


@pytest.mark.parametrize(
    ("task", "seen"),
    [
        ("fda", "owner"),  # the earlier of key and value
        ("swde", "owner"),
        ("squad", "Ann Lee"),
        ("nq", "Ann Lee"),
        ("triviaqa", "First"),
        ("drop", "First"),
    ],
)
def test_each_set_is_cut_around_its_own_place(cell, task, seen):
    places = ("First", "owner", "Ann Lee", "last")
    item = {"key": "owner", "value": "Ann Lee", "answers": ["Ann Lee"], "question": "Who?"}
    item[SETS[task].field] = ("_" * 300).join(places)
    write_set(cell.raw, task, [item])
    cell.model = Echo()
    (row,), (sample,) = run(cell, task, quiet)
    assert [place for place in places if place in sample["prompt"]] == [seen]
    assert row["truncated"] == 1


def test_a_set_of_which_nothing_is_left_is_refused(cell):
    write_set(cell.raw, "squad", [{"text": "a", "value": ""}])
    with pytest.raises(ValueError, match="squad: none of 1 documents has an answer"):
        run(cell, "squad", quiet)


def test_the_limit_takes_the_first_documents_that_have_an_answer(cell):
    cell.evaluation = replace(SETTING, written_limit=2)
    cell.model = Echo()
    write_set(
        cell.raw, "squad", [{"text": f"{n} Ur", "value": v} for n, v in enumerate(["", "Ur", "Ur", "Ur"])]
    )
    (row,), samples = run(cell, "squad", quiet)
    assert (row["n"], row["limit"]) == (2, 2)
    assert [sample["prompt"] for sample in samples] == ["1 Ur", "2 Ur"]


def test_identity_follows_window_answer_limit_and_data(cell):
    before = retrieval.identity(cell)
    for change in ({"retrieval_window": 301}, {"retrieval_answer": 50}, {"written_limit": 3}):
        other = SimpleNamespace(**{**vars(cell), "evaluation": replace(SETTING, **change)})
        assert retrieval.identity(other) != before
    assert retrieval.identity(cell) == before
    write_set(cell.raw, "drop", [{"context": "c", "question": "q", "answers": ["a"]}])
    identities = [before, retrieval.identity(cell)]
    for task in ("retrieval_squad", "retrieval_drop"):
        write_requests(cell.raw / data.PACKAGE / data.SOURCES[task].file, [])
        identities.append(retrieval.identity(cell))
    write_tokens_of(cell.tokens, {"heldout_wiki": [ids("In all there were 99 hens.")]})
    identities.append(retrieval.identity(cell))
    assert len(set(map(tuple, identities))) == 5


@pytest.mark.parametrize("task", SETS)
def test_a_missing_set_is_not_run(cell, task):
    for path in cell.raw.rglob("*.jsonl"):
        path.unlink()
    with pytest.raises(NotRun, match="data set is not here"):
        run(cell, task, quiet)


class TestStandIns:
    def test_none_bears_the_name_of_a_set(self):
        assert all(name.startswith("retrieval_") for name in STAND_INS)

    def test_numbers_are_asked_for_by_the_words_before_them(self, cell):
        cell.model = Echo()
        (row,), samples = run(cell, "retrieval_numbers", quiet)
        text = "In all there were 1,024 hens and 7 cows. All there were:"
        assert [(s["prompt"], s["answers"]) for s in samples] == [(text, ["1,024"])]
        assert row["data"].startswith("tokens, heldout_wiki, sha256 ")

    def test_a_data_set_that_holds_nothing_out_has_no_numbers(self, cell):
        write_tokens_of(cell.tokens, {"train": [ids("In all there were 1,024 hens.")]})
        with pytest.raises(NotRun, match="holdout"):
            run(cell, "retrieval_numbers", quiet)

    def test_squad_and_drop_are_taken_out_of_scoring_requests(self, cell, monkeypatch):
        background = "Ur flows.\nQuestion: is that all? Yes."
        squad = {
            "title": "Ur",
            "query": f"Title: Ur\nBackground: {background}\nQuestion: What flows?\nAnswer:",
            "answers_text": ["Ur", "Ur"],
        }
        drop = {"passage": "Bo won.", "question": "Who won?", "answers": [["Bo"], ["Bo", "Ek"]]}
        for task, doc in (("retrieval_squad", squad), ("retrieval_drop", drop)):
            source = data.SOURCES[task]
            write_requests(cell.raw / data.PACKAGE / source.file, [{"doc": doc}])
            monkeypatch.setitem(data.SOURCES, task, replace(source, items=1))
        cell.model = Echo()
        _, (sample,) = run(cell, "retrieval_squad", quiet)
        assert sample["prompt"] == f"{background.strip('.')}. What flows?"
        assert sample["answers"] == ["Ur", "Ur"]
        _, (sample,) = run(cell, "retrieval_drop", quiet)
        assert (sample["prompt"], sample["answers"]) == ("Bo won. Who won?", ["Bo", "Bo, Ek"])


LETTERS = "abcdefghijklmnopqrstuvwxyz"


class TestCut:
    """With a token a byte, windows can be counted on the letters."""

    @pytest.mark.parametrize(
        ("located", "item", "window"),
        [
            (("v",), {"v": "mn"}, "hijklmnopq"),  # five before, the rest from the answer on
            (("v",), {"v": "MN"}, "hijklmnopq"),
            (("v",), {"v": "ab"}, "abcdefghij"),  # at the start
            (("v",), {"v": "cd"}, "abcdefghij"),
            (("v",), {"v": "yz"}, "tuvwxyz"),  # at the end there is no more to take
            (("v",), {"v": "??"}, "uvwxyz"),  # nowhere: as if at the last character
            (("k", "v"), {"k": "op", "v": "mn"}, "hijklmnopq"),  # the earlier one
            (("k", "v"), {"k": "mn", "v": "op"}, "hijklmnopq"),
            (("k", "v"), {"k": "??", "v": "op"}, "jklmnopqrs"),
            (("v",), {"v": ["mn", "ab"]}, "hijklmnopq"),  # the first of a list
            (("v",), {"v": ["??"], "alt_answers": ["!!", "mn", "ab"]}, "hijklmnopq"),
            (("v",), {"v": ["??"], "alt_answers": [], "tok_pos": 8}, "defghijklm"),
            (("v",), {"v": ["mn"], "alt_answers": ["ab"], "tok_pos": 8}, "hijklmnopq"),
            ((), {"tok_pos": 8}, "abcdefghij"),  # the head
        ],
    )
    def test_windows_are_centred_on_the_answer(self, located, item, window):
        assert cut(f" {LETTERS}\n", item, located, tokenizer=BYTES, room=10) == (window, False)

    @pytest.mark.parametrize(("room", "window"), [(11, "hijklmnopqr"), (3, "lmn"), (2, "lm"), (1, "m")])
    def test_half_is_rounded_down(self, room, window):
        assert cut(LETTERS, {"v": "mn"}, ["v"], tokenizer=BYTES, room=room) == (window, False)

    def test_a_document_that_fits_stays_whole_unless_its_answer_is_far_behind(self):
        assert cut("abcdef", {"v": "ef"}, ["v"], tokenizer=BYTES, room=10) == ("abcdef", True)
        # as in the original: half the room is kept for what follows the answer, even if nothing does
        assert cut("abcdefgh", {"v": "gh"}, ["v"], tokenizer=BYTES, room=10) == ("bcdefgh", False)

    @pytest.mark.parametrize("answer", ["", "m", [], ["m"]])
    def test_answers_of_less_than_two_characters_drop_the_document(self, answer):
        assert cut(LETTERS, {"v": answer}, ["v"], tokenizer=BYTES, room=10) is None

    def test_a_parted_character_is_marked(self):
        text, whole = cut("aäbcdefä", {"v": "bc"}, ["v"], tokenizer=BYTES, room=4) or ("", True)
        assert (text, whole) == ("äbc", False)
        text, whole = cut("aäbcdefä", {"v": "cd"}, ["v"], tokenizer=BYTES, room=4) or ("", True)
        assert (text, whole) == ("\ufffdbcd", False)

    def test_pattern_characters_in_an_answer_mean_themselves(self):
        assert cut("abc.de(fgh", {"v": ".de("}, ["v"], tokenizer=BYTES, room=4) == ("bc.d", False)


@pytest.mark.parametrize(
    ("output", "answers", "score"),
    [
        (" it is UR.", ["Ur"], 1.0),
        ("U r", ["Ur"], 0.0),
        ("Bo", ["Ann", "bo"], 1.0),
        ("axb", ["a.b"], 0.0),
        ("", ["Ur"], 0.0),
        ("Ur", [], 0.0),
    ],
)
def test_any_answer_in_any_case_counts(output, answers, score):
    assert contains(output, answers) == score


def test_no_batch_changes_what_any_kind_of_layer_writes(cell, lm, monkeypatch):  # noqa: F811
    monkeypatch.setattr(retrieval, "MAX_NEW_TOKENS", 6)
    cell.model = lm
    texts = [
        "The river of Ur flows on",
        "Bo is here",
        "A",
        "Rain, rain, and more rain falls on Ek",
    ]
    write_set(cell.raw, "squad", [{"text": f"{text} {text}", "value": "is"} for text in texts])
    found = []
    for tokens in (1, 8 * 100):
        cell.evaluation = replace(SETTING, batch_tokens=tokens)
        found.append(run(cell, "squad", quiet))
    assert found[0] == found[1]
    assert len(found[0][1]) == 4
