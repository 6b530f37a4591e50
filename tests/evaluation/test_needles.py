"""RULER's prompts: worded as by lm-eval's own generator, filled, frozen, every needle in its place."""

import hashlib
import json
import re
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import pytest
from tokenizers import Tokenizer

from mdn.evaluation import needles
from mdn.evaluation.needles import DEPTHS, KINDS, NEW_TOKENS, Needles, recall

from .haystacks import ADJECTIVES, NOUNS, trained_tokenizer, write_haystacks

LENGTHS = (512, 1024, 2048, 4096, 16384)
END = re.compile(r"""(?<=[.!?])["')\]”’]* """)  # of a sentence, in essays without line breaks
FOUND = re.compile(r"One of the special magic (number|uuid)s for (\S+) is: (\S+)\.")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return write_haystacks(tmp_path_factory.mktemp("haystacks") / "raw")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return trained_tokenizer()


@pytest.fixture(scope="module")
def of_length(raw, words):
    return {length: Needles(raw, words, length) for length in LENGTHS}


def digest(items) -> str:
    text = json.dumps([[list(item.ids), item.answers] for item in items])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_and_answer_fill_95_per_cent_of_the_length_and_never_more_than_it(of_length, length, task):
    for item in of_length[length].items(task, 6):
        assert 0.95 * length <= len(item.ids) + NEW_TOKENS <= length


@pytest.mark.parametrize("task", KINDS)
def test_a_length_that_cannot_be_filled_is_refused(raw, words, task):
    for length in (200, 200_000):  # no room for the needles; more than the essays have
        if task == "niah_single_1" and length > 1000:
            continue  # its sentence can be said as often as one likes
        with pytest.raises(ValueError, match=rf"niah_lengths: {length} .* use lengths from 512"):
            Needles(raw, words, length).item(task, 0)


@pytest.mark.parametrize("task", KINDS)
def test_fewer_items_are_the_first_of_the_same_and_all_differ(of_length, task):
    few, more = (of_length[512].items(task, count) for count in (3, 8))
    assert few == more[:3]
    assert len({tuple(item.ids) for item in more}) == 8
    assert len({tuple(item.answers) for item in more}) == 8


def test_prompts_are_frozen(of_length, words, raw):
    """The same bytes in any process and after any change: with other prompts, other results."""
    here = {task: digest(of_length[1024].items(task, 4)) for task in KINDS}
    program = (
        "import sys; from pathlib import Path; from tokenizers import Tokenizer;"
        "from tests.evaluation.test_needles import digest; from mdn.evaluation.needles import KINDS, Needles;"
        "made = Needles(Path(sys.argv[1]), Tokenizer.from_str(sys.stdin.read()), 1024);"
        "print(*(digest(made.items(task, 4)) for task in KINDS))"
    )
    command = [sys.executable, "-c", program, str(raw)]
    elsewhere = subprocess.run(
        command,
        input=words.to_str(),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert elsewhere.stdout.split() == list(here.values())


def test_draws_are_frozen(of_length):
    """random.Random promises the same floats for a seed and no more: a new Python may choose otherwise."""
    drawn = [[i.needles, i.depths, i.answers] for task in KINDS for i in of_length[512].items(task, 4)]
    assert hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16] == "505836125c469920"


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("length", [512, 4096])
def test_needles_stand_between_sentences_at_their_depth_and_nothing_else_is_changed(
    of_length, words, raw, length, task
):
    if KINDS[task].essays:
        text = " ".join(path.read_text(encoding="utf-8") for path in sorted((raw / needles.ESSAYS).iterdir()))
        whole, separator = " ".join(text.split()), " "
        end = END
    else:
        whole, separator = "\n".join([needles.NOISE] * length), "\n"
        end = re.compile("\n")
    for item in of_length[length].items(task, 5):
        context = words.decode(item.ids).split("\n", 1)[1].rsplit("\n", 1)[0]
        bare = context
        for needle in item.needles:
            assert bare.count(needle) == 1
            with_separator = f"{needle}{separator}"
            bare = bare.replace(with_separator if with_separator in bare else f"{separator}{needle}", "")
        assert whole.startswith(bare)
        starts = [0, *(found.end() for found in end.finditer(bare)), len(bare) + len(separator)]
        before = 0
        for needle, depth in zip(item.needles, item.depths, strict=True):
            place = starts[int((len(starts) - 1) * depth)]
            assert context.index(needle) == place + before
            before += len(needle) + len(separator)


@pytest.mark.parametrize(
    ("task", "keys", "values", "asked"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_2", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 1, 1),
        ("niah_multiquery", 4, 1, 4),
        ("niah_multivalue", 1, 4, 1),
    ],
)
def test_prompts_hide_and_ask_as_much_as_rulers(of_length, words, task, keys, values, asked):
    for item in of_length[1024].items(task, 10):
        text = words.decode(item.ids)
        hidden: dict[str, list[str]] = {}
        for kind, key, value in FOUND.findall(text):
            hidden.setdefault(key, []).append(value)
            shape = r"\d{7}" if kind == "number" else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
            assert re.fullmatch(shape, value)
            assert (kind == "uuid") == (task == "niah_single_3")
        assert [len(found) for found in hidden.values()] == [values] * keys
        question = text.split("\n")[-1]
        shown = item.shown.split("\n")
        assert [shown[0], shown[2]] == [text.split("\n")[0], question]
        assert FOUND.findall(shown[1]) == FOUND.findall(text)
        queried = [key for key in hidden if question.count(f" {key}") == 2]
        assert len(queried) == asked
        assert sorted(item.answers) == sorted(value for key in queried for value in hidden[key])
        assert not any(answer in question for answer in item.answers)


def sentences(text: str) -> list[str]:
    starts = [0, *(found.end() for found in END.finditer(text)), len(text) + 1]
    return [text[start : stop - 1] for start, stop in pairwise(starts)]


@pytest.fixture(scope="module")
def lm_eval_ruler():
    """lm-eval's modules, with stand-ins for the two packages that they need and we do not."""
    lists = SimpleNamespace(_categories={"nouns": NOUNS, "adjectives": ADJECTIVES, "verbs": []})
    nltk = SimpleNamespace(data=SimpleNamespace(find=lambda name: None), sent_tokenize=sentences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wonderwords", SimpleNamespace(RandomWord=lambda: lists))
        patch.setitem(sys.modules, "nltk", nltk)
        yield (
            import_module("lm_eval.tasks.ruler.prepare_niah"),
            import_module("lm_eval.tasks.ruler.niah_utils"),
        )
        for name in ("prepare_niah", "niah_utils"):
            patch.delitem(sys.modules, f"lm_eval.tasks.ruler.{name}")


class Scripted:
    """lm-eval's generator draws from this what one of our items drew."""

    def __init__(self, needles: list[str], hidden: dict[str, list[str]], samples: list[list[int]]) -> None:
        self.needles, self.samples = needles, iter(samples)
        self.keys, self.values = iter(hidden), (value for found in hidden.values() for value in found)

    def choice(self, words: list[str]) -> str:
        key = next(self.keys)
        assert key in words
        return key

    def randint(self, low: int, high: int) -> int:
        value = int(next(self.values))
        assert low <= value <= high
        return value

    def getrandbits(self, bits: int) -> int:
        return UUID(next(self.values)).int

    def Random(self, seed: int):
        return self

    def shuffle(self, found: list[str]) -> None:
        assert sorted(found) == sorted(self.needles)
        found[:] = self.needles

    def sample(self, population, count: int) -> list[int]:
        drawn = next(self.samples)
        assert len(drawn) == count
        assert set(drawn) <= set(population)
        return drawn


@pytest.mark.parametrize("task", KINDS)
def test_with_the_same_draws_lm_eval_writes_the_same_prompt(
    of_length, words, raw, lm_eval_ruler, monkeypatch, task
):
    prepare, tasks = lm_eval_ruler
    asked_for = {}
    monkeypatch.setattr(tasks, "get_haystack", lambda type_haystack: None)
    monkeypatch.setattr(tasks, "get_tokenizer", lambda name: None)
    monkeypatch.setattr(tasks, "generate_samples", lambda _, **wanted: asked_for.update(wanted) or [{"x": 0}])
    getattr(tasks, task)(max_seq_lengths=[2048], tokenizer="any")
    assert asked_for.pop("num_samples") == 500
    assert asked_for.pop("max_seq_length") == 2048
    asked_for.pop("TOKENIZER")
    queries = asked_for.get("num_needle_q", 1)
    asked_for["num_needle_k"] = max(asked_for.get("num_needle_k", 1), queries)
    asked_for.setdefault("num_needle_v", 1)

    for item in of_length[2048].items(task, 4):
        text = words.decode(item.ids)
        found = [needle.groups() for needle in FOUND.finditer(text)]
        key_of = {value: key for _, key, value in found}
        keys = dict.fromkeys([*(key_of[answer] for answer in item.answers), *key_of.values()])
        hidden = {key: [v for v in [*item.answers, *key_of] if key_of[v] == key] for key in keys}
        hidden = {key: list(dict.fromkeys(values)) for key, values in hidden.items()}
        if asked_for["type_haystack"] == "essay":
            haystack = " ".join(p.read_text() for p in sorted((raw / needles.ESSAYS).iterdir())).split()
            bare = FOUND.sub("", text.split("\n", 1)[1].rsplit("\n", 1)[0])
            count, places = len(bare.split()), [round(100 * depth) for depth in item.depths]
        else:
            haystack, count = needles.NOISE, text.count(needles.NOISE)
            places = [int(count * item.depths[0])]
        monkeypatch.setattr(prepare, "random", Scripted(item.needles, hidden, [places, list(range(queries))]))
        wanted, answers, query = prepare.generate_input_output(count, haystack, **asked_for)
        values = "uuid" if task == "niah_single_3" else "number"
        prefix = f"The special magic {values} for {query} mentioned in the provided text is"
        if len(answers) > 1:
            prefix = f"The special magic {values}s for {query} mentioned in the provided text are"
        # Where a needle stands first, last or next to another, RULER leaves a second space.
        assert text == re.sub(" (?= |\n)|(?<=\n) ", "", f"{wanted} {prefix}")
        assert item.answers == answers


def test_depths_are_rulers():
    assert np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int).tolist() == DEPTHS


@pytest.mark.parametrize(
    ("text", "answers", "share"),
    [
        (" 1234567.", ["1234567"], 1.0),
        ("\x07 1234567\x00", ["1234567"], 1.0),
        (" 1234567 and 7654321", ["7654321", "1111111", "1234567", "2222222"], 0.5),
        (" 123456", ["1234567"], 0.0),
        (" 12345678", ["1234567"], 1.0),  # as RULER counts
        (" 86D1C673-3513", ["86d1c673-3513"], 1.0),
        ("", ["1234567"], 0.0),
    ],
)
def test_recall_is_rulers_string_match_all(text, answers, share):
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    assert recall(text, answers) == share == string_match_all(postprocess_pred([text]), [answers])
