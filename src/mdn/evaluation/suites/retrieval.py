"""In-context retrieval by the protocol of 'Just read twice' (arXiv 2407.05483): FDA, SWDE, SQuAD, NQ,
TriviaQA and DROP with their documents, which lm-eval's tasks of these names cut or leave out.

1. A document becomes a window of `retrieval_window` − `retrieval_answer` tokens around the place where the
   answer stands (`cut`). Documents whose answer has fewer than two characters are dropped.
2. The prompt is the window and the question, or the key whose value is wanted; nothing in front.
3. Greedy decoding, at most 48 tokens, until a newline. Right if any label is in the output, in any case.

The window of the paper's own runs is not published; `retrieval_window` is part of every result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mdn.data.shards import read_index
from mdn.evaluation import data
from mdn.evaluation.decoding import write
from mdn.evaluation.hub import HubSet, Item
from mdn.evaluation.results import mean_row
from mdn.evaluation.standins import first_heldout, numbers
from mdn.evaluation.suites import NotRun

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites import Rows
    from mdn.evaluation.suites.run import Cell

MAX_NEW_TOKENS = 48
MOST_NUMBERS = 1000  # items of the stand-in: a large data set holds out more documents than anybody needs
SUMMARY = "Summary of information above..."  # SWDE's own prompt, at the end of its texts


@dataclass(frozen=True)
class Task:
    """What the protocol does with the items of a set."""

    field: str  # that is cut
    located: tuple[str, ...]  # fields with what the window is centred on; none: the document's head
    prompt: Callable[[Item], str]  # of an item whose field is cut
    source: HubSet | None = None  # None: a stand-in
    before: Callable[[str], str] = str  # applied to the text before it is cut

    def labels(self, item: Item) -> list[str]:
        """What counts as an answer."""
        return [item["value"]] if self.field == "text" else list(item["answers"])


def ask_for_key(item: Item, around: str | None = "\n") -> str:
    """The text as a sentence, then the key with a capital, to be followed by its value. FDA.

    around: what is taken off the text's ends; None: all white space.
    """
    text, key = item["text"], item["key"]
    while text.lower().endswith(f"{key}:".lower()):
        text = text[: -len(key) - 1]
    text = text.strip(around).strip(".")
    return f"{text}. {key[0].upper()}{key[1:]}:"


def ask_for_key_of_page(item: Item) -> str:
    """SWDE's texts lose all white space around them."""
    return ask_for_key(item, around=None)


def ask_question(item: Item) -> str:
    """The context as a sentence, then the question. NQ, DROP."""
    context, question = item["context"].strip(), item["question"].strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)]
    return f"{context.strip().strip('.')}. {question}"


def ask_without_marks(item: Item) -> str:
    """TriviaQA's contexts mark paragraphs, documents and titles."""
    return ask_question({**item, "context": re.sub(r"\[(PAR|DOC|TLE)\]", "", item["context"])})


def as_it_is(item: Item) -> str:
    """SQuAD's texts end with a question reworded as text to be continued."""
    return item["text"].strip()


def without_summary(text: str) -> str:
    return text.split(SUMMARY)[0]


KEYED, ASKED = ("key", "value", "text"), ("context", "question", "answers")
SETS = {
    "fda": Task("text", ("key", "value"), ask_for_key, HubSet("hazyresearch/based-fda", "validation", KEYED)),
    "swde": Task(
        "text",
        ("key", "value"),
        ask_for_key_of_page,
        HubSet("hazyresearch/based-swde-v2", "validation", KEYED),
        without_summary,
    ),
    "squad": Task(
        "text", ("value",), as_it_is, HubSet("hazyresearch/based-squad", "validation", ("value", "text"))
    ),
    "nq": Task(
        "context", ("answers",), ask_question, HubSet("hazyresearch/based_nq_2048", "validation", ASKED)
    ),
    "triviaqa": Task(
        "context", (), ask_without_marks, HubSet("hazyresearch/based_triviaqa", "validation", ASKED)
    ),
    "drop": Task("context", (), ask_question, HubSet("hazyresearch/based_drop", "validation", ASKED)),
}
STAND_INS = {
    "retrieval_squad": Task("context", ("answers",), ask_question),
    "retrieval_drop": Task("context", (), ask_question),
    "retrieval_numbers": Task("text", ("key", "value"), ask_for_key),
}
TASKS = SETS | STAND_INS


def tasks(cell: Cell) -> list[str]:
    return list(TASKS)


def identity(cell: Cell) -> list[Any]:
    setting = cell.evaluation
    digests = [task.source.digest(cell.raw) for task in SETS.values() if task.source]
    digests += [data.digest(name, cell.raw) for name in STAND_INS if name in data.SOURCES]
    settings = [setting.written_limit, setting.retrieval_window, setting.retrieval_answer]
    return [*settings, *digests, read_index(cell.tokens)["digest"]]


def run(cell: Cell, task: str, progress: Progress) -> tuple[Rows, Rows]:
    setting, how = cell.evaluation, TASKS[task]
    items, description = load(cell, task)
    room = setting.retrieval_window - setting.retrieval_answer
    prompts: list[str] = []
    answers: list[list[str]] = []
    truncated = 0
    for item in items:
        if len(prompts) == setting.written_limit:
            break
        window = cut(how.before(item[how.field]), item, how.located, tokenizer=cell.tokenizer, room=room)
        if window is None:
            continue
        text, whole = window
        prompts.append(how.prompt({**item, how.field: text}))
        answers.append(how.labels(item))
        truncated += not whole
    if not prompts:
        raise ValueError(f"{task}: none of {len(items)} documents has an answer; correct its files")
    outputs = write(
        cell.model,
        cell.tokenizer,
        [cell.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts],
        [MAX_NEW_TOKENS] * len(prompts),
        lambda _, text: "\n" in text,
        batch_tokens=setting.batch_tokens,
        progress=progress,
    )
    outputs = [output.split("\n")[0] for output in outputs]
    scores = [contains(output, wanted) for output, wanted in zip(outputs, answers, strict=True)]
    row = mean_row(
        task,
        "contains",
        scores,
        list(zip(prompts, answers, strict=True)),
        limit=setting.written_limit,
        truncated=truncated,
        window=setting.retrieval_window,
        data=description,
    )
    samples = [
        {"task": task, "id": number, "prompt": prompt, "output": output, "answers": wanted, "contains": score}
        for number, (prompt, output, wanted, score) in enumerate(
            zip(prompts, outputs, answers, scores, strict=True)
        )
    ]
    return [row], samples


def load(cell: Cell, task: str) -> tuple[list[Item], str]:
    """The items of a task, and what they are.

    Raises:
        NotRun: if they are not here.
    """
    source = TASKS[task].source
    if source:
        return source.items(cell.raw), f"{source.title}, sha256 {source.digest(cell.raw)}"
    if task in data.SOURCES:
        found = data.load(task, cell.raw)
        return found.items, f"{found.title}, sha256 {found.digest}"
    split = first_heldout(cell.tokens)
    if split is None:
        raise NotRun(f"{cell.tokens.name} holds no documents out; set holdout of one of its parts")
    items = list(islice(numbers(cell.tokens, split, cell.tokenizer), MOST_NUMBERS))
    return items, f"{cell.tokens.name}, {split}, sha256 {read_index(cell.tokens)['digest'][:12]}"


def cut(
    text: str, item: Item, located: Sequence[str], *, tokenizer: Tokenizer, room: int
) -> tuple[str, bool] | None:
    """The window of a document, and whether it is the whole document; None if the document is dropped.

    The window starts room // 2 tokens before the earliest match of the `located` fields (of a list its first
    entry), or at the document's start if that is nearer, and has `room` tokens if the document goes on so
    far. Without a match the entries of `alt_answers` are looked for, then `tok_pos` says the token, and last
    the document's end is taken for the place. Without `located` the place is the document's start. A
    character whose tokens the window parts becomes U+FFFD.
    """
    text = text.strip()
    at = -1 if located else 0
    for name in located:
        wanted = item[name][0] if isinstance(item[name], list) and item[name] else item[name]
        if len(wanted) < 2:
            return None
        found = _find(wanted, text)
        at = found if at < 0 else min(at, found) if found >= 0 else at
    for wanted in item.get("alt_answers") or [] if at < 0 else []:
        at = _find(wanted, text)
        if at >= 0:
            break
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    before = len(tokenizer.encode(text[:at], add_special_tokens=False).ids)
    if at < 0 and item.get("tok_pos") is not None and before > room:
        before = int(item["tok_pos"])
    start = max(0, before - room // 2)
    stop = min(len(tokens), start + room)
    return tokenizer.decode(tokens[start:stop]), stop - start == len(tokens)


def _find(wanted: str, text: str) -> int:
    """Where a text first occurs in another, in any case; -1: nowhere."""
    found = re.search(re.escape(wanted), text, re.IGNORECASE)
    return found.start() if found else -1


def contains(output: str, answers: Sequence[str]) -> float:
    """1 if any answer is in the output, in any case."""
    return float(any(_find(answer, output) >= 0 for answer in answers))
