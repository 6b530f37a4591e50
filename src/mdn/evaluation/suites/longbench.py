"""LongBench by its own protocol: 14 tasks, long prompts cut in the middle, its post-processing and metrics.

A prompt of more than `longbench_window` − answer tokens keeps as many of its first tokens as of its last, so
that instruction and question both stay; lm-eval cuts from the left. The ids are joined as they are, where the
original decodes and encodes them again. Answers are greedy. Where only the first line of an answer counts, or
its first line of code, writing ends with that line, which changes no score. (For SAMSum the original forbids
a newline as the first token; here newlines in front of the answer are passed over.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mdn.evaluation import data, metrics
from mdn.evaluation.decoding import write
from mdn.evaluation.hub import HubSet, Item
from mdn.evaluation.results import mean_row
from mdn.evaluation.standins import PYTHON, digest, standard_library
from mdn.evaluation.suites import NotRun

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites import Rows
    from mdn.evaluation.suites.run import Cell

REPOSITORY = "Xnhyacinth/LongBench"
FIELDS = ("context", "input", "answers", "all_classes")
# A stand-in is asked as the task is whose shape it has.
STAND_INS = {"longbench_qasper": "qasper", "longbench_code": "lcc"}


@dataclass(frozen=True)
class Task:
    """A line of longbench.yaml."""

    prompt: str
    tokens: int  # longest answer
    metric: str
    first_line: bool = False


@cache
def protocol() -> dict[str, Task]:
    """longbench.yaml."""
    raw = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("longbench.yaml")))
    assert isinstance(raw, dict)
    return {str(name): Task(**entry) for name, entry in raw.items()}


def tasks(cell: Cell) -> list[str]:
    return [*protocol(), *STAND_INS]


def identity(cell: Cell) -> list[Any]:
    setting = cell.evaluation
    found: list[Any] = [setting.written_limit, setting.longbench_window]
    found += [[asdict(task), hub_set(name).digest(cell.raw)] for name, task in protocol().items()]
    return [*found, data.digest("longbench_qasper", cell.raw), digest(standard_library())]


def run(cell: Cell, task: str, progress: Progress) -> tuple[Rows, Rows]:
    setting, how = cell.evaluation, protocol()[STAND_INS.get(task, task)]
    items, description = load(cell, task)
    items = items[: setting.written_limit]
    room = setting.longbench_window - how.tokens
    if room < 2:
        raise NotRun(f"a window of {setting.longbench_window} has no room beside an answer of {how.tokens}")
    whole = [
        cell.tokenizer.encode(how.prompt.format_map(item), add_special_tokens=False).ids for item in items
    ]
    prompts = [middle_cut(ids, room) for ids in whole]
    outputs = write(
        cell.model,
        cell.tokenizer,
        prompts,
        [how.tokens] * len(prompts),
        lambda _, text: answered(how, text),
        batch_tokens=setting.batch_tokens,
        progress=progress,
    )
    scores = [score(how, output, item) for output, item in zip(outputs, items, strict=True)]
    texts = [cell.tokenizer.decode(ids) for ids in prompts]
    row = mean_row(
        task,
        how.metric,
        scores,
        [(text, item["answers"]) for text, item in zip(texts, items, strict=True)],
        limit=setting.written_limit,
        truncated=sum(len(ids) > room for ids in whole),
        window=setting.longbench_window,
        data=description,
    )
    samples = [
        {
            "task": task,
            "id": number,
            "prompt": text,
            "output": output,
            "answers": item["answers"],
            how.metric: value,
        }
        for number, (text, output, item, value) in enumerate(zip(texts, outputs, items, scores, strict=True))
    ]
    return [row], samples


def hub_set(task: str) -> HubSet:
    return HubSet(REPOSITORY, "test", FIELDS, config=task)


def load(cell: Cell, task: str) -> tuple[list[Item], str]:
    """The items of a task, and what they are.

    Raises:
        NotRun: if they are not here.
    """
    if task == "longbench_code":
        items = standard_library()
        return items, f"{PYTHON}, {len(items)} modules, sha256 {digest(items)}"
    if task in data.SOURCES:
        found = data.load(task, cell.raw)
        return found.items, f"{found.title}, sha256 {found.digest}"
    source = hub_set(task)
    return source.items(cell.raw), f"{source.title}, sha256 {source.digest(cell.raw)}"


def middle_cut(ids: list[int], room: int) -> list[int]:
    """The ids, or if they are more than `room`, their first and last room // 2."""
    return ids if len(ids) <= room else ids[: room // 2] + ids[-(room // 2) :]


def answered(how: Task, text: str) -> bool:
    """Has all been written that counts?"""
    lines = text.lstrip("\n").split("\n")[:-1]  # complete ones
    if how.metric == "code_similarity":
        return any(metrics.is_code(line) for line in lines)
    return how.first_line and bool(lines)


def score(how: Task, output: str, item: Item) -> float:
    """The best score of an answer against any of the true ones."""
    if how.first_line:
        output = output.lstrip("\n").split("\n")[0]
    if how.metric == "classification":
        return max(metrics.classification(output, truth, item["all_classes"]) for truth in item["answers"])
    metric: Callable[[str, str], float] = getattr(metrics, how.metric)
    return max(metric(output, truth) for truth in item["answers"])
