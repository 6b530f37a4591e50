"""Suite longbench: prompts, middle cut, post-processing and scores by the original's protocol."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mdn.config import Evaluation
from mdn.evaluation import data
from mdn.evaluation.scoring import quiet
from mdn.evaluation.standins import standard_library
from mdn.evaluation.suites import NotRun, longbench
from mdn.evaluation.suites.longbench import REPOSITORY, STAND_INS, middle_cut, protocol, run

from .files import write_json_lines, write_requests
from .models import EOT, Echo, Knowing, byte_tokenizer
from .protocol_items import LONGBENCH, PROMPTS
from .test_mixers import lm  # noqa: F401  every kind of layer

BYTES = byte_tokenizer()
SETTING = Evaluation(limit=1, window=1, batch_tokens=3000, heldout_tokens=1, longbench_window=2048)


def ids(text: str) -> list[int]:
    return BYTES.encode(text, add_special_tokens=False).ids


def write_task(cell, task, items) -> None:
    write_json_lines(cell.raw / "hub" / REPOSITORY / f"{task}.jsonl", items)


@pytest.fixture
def cell(tmp_path):
    cell = SimpleNamespace(model=Echo(), tokenizer=BYTES, evaluation=SETTING, raw=tmp_path)
    for task, (item, _) in LONGBENCH.items():
        write_task(cell, task, [item])
    return cell


def prompt(task: str) -> str:
    item, _ = LONGBENCH[task]
    return protocol()[task].prompt.replace("{context}", item["context"]).replace("{input}", item["input"])


def test_the_fourteen_tasks_have_the_originals_metrics_and_answer_lengths():
    assert {task: (how.metric, how.tokens) for task, how in protocol().items()} == {
        "narrativeqa": ("qa_f1", 128),
        "qasper": ("qa_f1", 128),
        "multifieldqa_en": ("qa_f1", 64),
        "hotpotqa": ("qa_f1", 32),
        "2wikimqa": ("qa_f1", 32),
        "musique": ("qa_f1", 32),
        "gov_report": ("rouge_l", 512),
        "qmsum": ("rouge_l", 512),
        "multi_news": ("rouge_l", 512),
        "trec": ("classification", 64),
        "triviaqa": ("qa_f1", 32),
        "samsum": ("rouge_l", 128),
        "lcc": ("code_similarity", 64),
        "repobench-p": ("code_similarity", 64),
    }
    assert set(LONGBENCH) == set(protocol())
    assert [task for task, how in protocol().items() if how.first_line] == ["trec", "triviaqa", "samsum"]


@pytest.mark.parametrize("task", PROMPTS)
def test_prompts_are_the_originals(task):
    assert prompt(task) == PROMPTS[task]


@pytest.mark.parametrize("task", LONGBENCH)
def test_a_model_that_knows_the_answers_scores_100(cell, task):
    item, answer = LONGBENCH[task]
    cell.model = Knowing([[*ids(prompt(task) + answer), EOT]])
    (row,), (sample,) = run(cell, task, quiet)
    assert row["value"] == pytest.approx(1.0, abs=1e-8)  # the package's rouge adds 1e-8 to its denominator
    assert (row["metric"], row["n"], row["truncated"], row["stderr"]) == (protocol()[task].metric, 1, 0, None)
    assert (sample["prompt"], sample["answers"]) == (prompt(task), item["answers"])


@pytest.mark.parametrize(
    ("task", "truth", "score"),
    [
        ("hotpotqa", ":" * 32, 0.0),  # nothing is left of "::::"
        ("triviaqa", "b" * 32, 1.0),  # one word of as many letters as there are tokens
        ("triviaqa", "b", 0.0),
        ("samsum", "b" * 128, 1.0),
        ("samsum", f"{'b' * 128} and one two", 2 * (1 / 4) / (5 / 4)),
        ("trec", "b", 1.0),
        ("lcc", "x", 0.0),  # the prompt ends with a newline: there are only empty lines
        ("lcc", "", 1.0),
    ],
)
def test_a_model_that_repeats_the_last_token_scores_what_one_counts_by_hand(cell, task, truth, score):
    item, _ = LONGBENCH[task]
    write_task(cell, task, [{**item, "input": "Answer: b", "answers": [truth], "all_classes": ["b", "c"]}])
    (row,), _ = run(cell, task, quiet)
    assert row["value"] == pytest.approx(score, abs=1e-7)


def test_the_best_of_several_answers_counts_and_tasks_are_averaged(cell):
    item, _ = LONGBENCH["triviaqa"]
    item = {**item, "input": "Answer: b"}
    answers = (["a", "b" * 32], ["a"], ["c"])
    write_task(cell, "triviaqa", [{**item, "answers": truths} for truths in answers])
    (row,), _ = run(cell, "triviaqa", quiet)
    assert (row["value"], row["n"]) == (pytest.approx(1 / 3), 3)
    assert row["stderr"] == pytest.approx(1 / 3)  # √(((2/3)² + 2 (1/3)²) / 2 / 3)


@pytest.mark.parametrize(
    ("task", "written", "kept"),
    [
        ("triviaqa", "\n\nBo\nPassage: more", "\n\nBo\n"),  # no more is asked for than counts
        ("samsum", " they part. And more.\nDialogue:", " they part. And more.\n"),
        ("lcc", "# why\n\n`x`\n    return x + 1\nmore", "# why\n\n"),  # the empty line is a line of code
        ("lcc", "\n# why\nreturn x\nmore", "\n# why\nreturn x\n"),
        ("hotpotqa", "\n\nBo\nmore", "\n\nBo\nmore"),
    ],
)
def test_writing_ends_where_nothing_counts_any_more(cell, task, written, kept):
    cell.model = Knowing([[*ids(prompt(task) + written), EOT]])
    _, (sample,) = run(cell, task, quiet)
    assert sample["output"] == kept


class TestMiddleCut:
    @pytest.mark.parametrize(
        ("room", "kept"),
        [(10, "0123456789"), (9, "01236789"), (8, "01236789"), (3, "09"), (2, "09"), (12, "0123456789")],
    )
    def test_as_many_of_the_first_as_of_the_last_are_kept(self, room, kept):
        assert middle_cut(list(range(10)), room) == [int(digit) for digit in kept]

    def test_instruction_and_question_stay_and_cut_prompts_are_counted(self, cell):
        item, _ = LONGBENCH["qasper"]
        items = [item, {**item, "context": "word " * 1000}]
        write_task(cell, "qasper", items)
        (row,), samples = run(cell, "qasper", quiet)
        assert (row["truncated"], row["n"], row["window"]) == (1, 2, 2048)
        assert len(ids(samples[1]["prompt"])) == 2048 - 128
        assert samples[1]["prompt"].startswith("You are given a scientific article")
        assert samples[1]["prompt"].endswith("Question: What do they use?\n\nAnswer:")

    def test_a_parted_character_changes_no_other(self, cell):
        item, _ = LONGBENCH["lcc"]
        write_task(cell, "lcc", [{**item, "context": "ä" * 2000}])
        cell.evaluation = replace(SETTING, longbench_window=64 + 101)
        _, (sample,) = run(cell, "lcc", quiet)
        assert sample["prompt"].startswith("Please complete the code given below. \nä")
        assert sample["prompt"].endswith("äNext line of code:\n")

    def test_a_window_without_room_for_a_prompt_runs_nothing(self, cell):
        cell.evaluation = replace(SETTING, longbench_window=512)
        with pytest.raises(NotRun, match="window of 512 has no room beside an answer of 512"):
            run(cell, "gov_report", quiet)


def test_identity_follows_window_limit_protocol_and_data(cell, monkeypatch):
    before = longbench.identity(cell)
    for change in ({"longbench_window": 100}, {"written_limit": 3}):
        other = SimpleNamespace(**{**vars(cell), "evaluation": replace(SETTING, **change)})
        assert longbench.identity(other) != before
    assert longbench.identity(cell) == before
    write_task(cell, "trec", [LONGBENCH["trec"][0]] * 2)
    changed = longbench.identity(cell)
    assert changed != before
    other = {**protocol(), "lcc": replace(protocol()["lcc"], prompt="{context}")}
    monkeypatch.setattr(longbench, "protocol", lambda: other)
    assert longbench.identity(cell) != changed
    monkeypatch.undo()
    monkeypatch.setattr(longbench, "standard_library", lambda: standard_library()[1:])
    assert longbench.identity(cell) != changed
    monkeypatch.undo()
    write_requests(cell.raw / data.PACKAGE / data.SOURCES["longbench_qasper"].file, [])
    assert longbench.identity(cell) != changed


def test_the_limit_takes_the_first_items(cell):
    item, _ = LONGBENCH["triviaqa"]
    write_task(cell, "triviaqa", [{**item, "answers": [f"{n}"]} for n in range(3)])
    cell.evaluation = replace(SETTING, written_limit=2)
    (row,), samples = run(cell, "triviaqa", quiet)
    assert (row["n"], row["limit"]) == (2, 2)
    assert [sample["answers"] for sample in samples] == [["0"], ["1"]]


def test_a_missing_set_is_not_run(cell):
    (cell.raw / "hub" / REPOSITORY / "trec.jsonl").unlink()
    with pytest.raises(NotRun, match="data set is not here"):
        run(cell, "trec", quiet)


class TestStandIns:
    def test_each_is_asked_as_a_task_of_its_shape_and_bears_a_name_of_its_own(self):
        assert set(STAND_INS.values()) <= set(protocol())
        assert not set(STAND_INS) & set(protocol())

    def test_a_modules_line_is_to_be_written_after_all_before_it(self, tmp_path):
        lines = [f"x{n} = {n}" for n in range(8)]
        lines[6:] = ["# a remark of some length", "    y = x0 + x1  # said"]
        (tmp_path / "m.py").write_text("\n".join(lines) + "\n")
        (tmp_path / "short.py").write_text("x = 1\n")
        (item,) = standard_library(tmp_path)
        assert item["answers"] == ["    y = x0 + x1  # said"]
        assert item["context"] + item["answers"][0] + "\n" == (tmp_path / "m.py").read_text()

    def test_the_standard_library_has_modules_enough(self):
        items = standard_library()
        assert len(items) > 100
        assert all(item["answers"][0].strip() and item["context"] for item in items)

    def test_papers_of_qasper_are_put_together_and_each_question_asked_once(self, cell, monkeypatch):
        doc = {
            "question_id": "q",
            "title": "GRUs",
            "abstract": "We use them.",
            "full_text": {"section_name": ["Start", ""], "paragraphs": [["One.", "Two."], ["Three."]]},
            "question": "Do they?",
            "answer": "Yes",
        }
        source = data.SOURCES["longbench_qasper"]
        write_requests(cell.raw / data.PACKAGE / source.file, [{"doc": doc}, {"doc": doc}])
        monkeypatch.setitem(data.SOURCES, "longbench_qasper", replace(source, items=1))
        _, (sample,) = run(cell, "longbench_qasper", quiet)
        assert "Article: GRUs\nWe use them.\nStart\nOne.\nTwo.\nThree.\n\n Answer" in sample["prompt"]
        assert sample["answers"] == ["Yes"]


def test_no_batch_changes_what_any_kind_of_layer_writes(cell, lm):  # noqa: F811
    item, _ = LONGBENCH["triviaqa"]
    write_task(cell, "triviaqa", [{**item, "context": "word " * n} for n in (3, 60, 9, 3)])
    cell.model, found = lm, []
    for tokens in (1, 8 * 200):
        cell.evaluation = replace(SETTING, longbench_window=160, batch_tokens=tokens)
        found.append(run(cell, "triviaqa", quiet))
    assert found[0] == found[1]
    assert found[0][0][0]["truncated"] == 4
