"""Rows of results for suites that prompt and score by themselves."""

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any


def mean_row(
    task: str,
    metric: str,
    scores: Sequence[float],
    asked: Sequence[Any],
    *,
    limit: int | None,
    truncated: int,
    window: int,
    data: str,
) -> dict[str, Any]:
    """The mean of the items' scores with its standard error.

    Args:
        asked: prompt and answers of each item, as JSON takes them; the task's hash is over these.
        truncated: items whose text did not fit into the window.
        window: tokens of prompt and answer together.
    """
    text = json.dumps(asked, ensure_ascii=False, allow_nan=False)
    return {
        "task": task,
        "metric": metric,
        "value": math.fsum(scores) / len(scores),
        "stderr": statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None,
        "n": len(scores),
        "limit": limit,
        "truncated": truncated,
        "window": window,
        "task_hash": hashlib.sha256(text.encode()).hexdigest()[:12],
        "data": data,
    }
