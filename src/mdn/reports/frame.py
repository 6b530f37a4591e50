"""Every cell of every table as one polars frame, with where it came from."""

import math
from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
from omegaconf import OmegaConf

from mdn.config import Params
from mdn.reports.layout import AVERAGES, Column, Table, tables
from mdn.reports.runs import Run, active

AGAIN = "MDN_FORCE=1 dvc repro --single-item --force"  # runs just the stages that follow, whatever is there
OK, FAILED, NOT_RUN, MISSING = "ok", "failed", "not run", "missing"

# value, stderr and published are in `unit`: a perplexity as it is, an accuracy in per cent.
SCHEMA: dict[str, Any] = {
    "table": pl.String,
    "scale": pl.String,
    "row": pl.String,
    "title": pl.String,
    "column": pl.String,
    "unit": pl.String,
    "value": pl.Float64,
    "stderr": pl.Float64,
    "n": pl.Int64,  # items (perplexities of held-out text: tokens)
    "limit": pl.Int64,
    "truncated": pl.Int64,  # prompts that were cut
    "published": pl.Float64,
    "published_text": pl.String,  # what the paper says in place of a number
    "published_source": pl.String,
    "status": pl.Enum([OK, FAILED, NOT_RUN, MISSING]),
    "note": pl.String,  # why there is no value, or what to know about it
    "run_id": pl.String,  # MLflow's
    "fingerprint": pl.String,
    "kernel": pl.String,
    "commit": pl.String,
    "data": pl.String,  # digest of the tokens trained on
    "evaluation_commit": pl.String,
    "evaluation_data": pl.String,  # digest of the items
    "task_hash": pl.String,
    "harness": pl.String,
    "window": pl.Int64,
    "command": pl.String,  # what makes this cell again
}


@cache
def published() -> dict[str, Any]:
    """published.yaml: `values` and `protocol`."""
    raw = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("published.yaml")))
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def published_values() -> dict[tuple[str, str, str, str], tuple[float | None, str | None, str]]:
    """(table, scale, row, column) -> number, text in place of a number, source."""
    found: dict[tuple[str, str, str, str], tuple[float | None, str | None, str]] = {}
    for block in published()["values"]:
        source = f"{block['source']}, PDF p. {block['page']}"
        for row, values in block["rows"].items():
            for n, column in enumerate(block["columns"]):
                number, text = (None, values) if isinstance(values, str) else (values[n], None)
                found[block["table"], block["scale"], row, column] = (number, text, source)
    return found


def published_columns(scale: str) -> dict[str, set[str]]:
    """By table, the columns that the paper gives at a scale."""
    found: dict[str, set[str]] = {}
    for table, at, _, column in published_values():
        if at == scale:
            found.setdefault(table, set()).add(column)
    return found


def layout(params: Params, runs: dict[tuple[str, str], Run]) -> dict[str, list[Table]]:
    """The tables of every scale that has runs or published values."""
    found = {
        scale: tables(params, scale, active(params, runs, scale), published_columns(scale))
        for scale in params.scales
    }
    return {scale: chosen for scale, chosen in found.items() if chosen}


def frame(params: Params, runs: dict[tuple[str, str], Run]) -> pl.DataFrame:
    """One line a cell, in the order of the tables, with the columns of SCHEMA."""
    paper = published_values()
    lines = []
    for scale, chosen in layout(params, runs).items():
        for table in chosen:
            for row in table.rows:
                run = runs[scale, row]
                for column in table.columns:
                    number, text, source = paper.get((table.key, scale, row, column.key), (None, None, None))
                    lines.append(
                        {
                            "table": table.key,
                            "scale": scale,
                            "row": row,
                            "title": params.models[row].title or row,
                            "column": column.key,
                            "unit": column.unit,
                            "published": number,
                            "published_text": text,
                            "published_source": source,
                            **_provenance(run),
                            **_cell(params, run, column),
                        }
                    )
    return pl.DataFrame([{key: line.get(key) for key in SCHEMA} for line in lines], schema=SCHEMA)


def _provenance(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.mlflow.get("run_id"),
        "fingerprint": run.manifest.get("fingerprint"),
        "kernel": run.kernel,
        "commit": run.commit,
        "data": run.manifest.get("data"),
    }


def _cell(params: Params, run: Run, column: Column) -> dict[str, Any]:
    """Value or reason of one cell; averages are computed here."""
    if column.key in AVERAGES:
        tasks = AVERAGES[column.key]
        cells = [(task, _cell(params, run, task)) for task in tasks]
        makers = [task for task, cell in cells if cell["status"] != OK] or tasks
        return {**_average(cells), "command": _command(params, run, makers)}
    command = _command(params, run, [column])
    found = _result(run, column)
    if found is None:
        return {**_reason(params, run, column), "command": command}
    evaluation, result = found
    told = {
        "command": command,
        "n": result.get("n"),
        "limit": result.get("limit"),
        "truncated": result.get("truncated"),
        "evaluation_commit": (evaluation.get("manifest") or {}).get("commit"),
        "evaluation_data": result.get("data"),
        "task_hash": result.get("task_hash"),
        "harness": evaluation.get("harness"),
        "window": result.get("window", evaluation.get("window")),
    }
    if run.foreign(column.suite):
        return {**told, "status": MISSING, "note": f"evaluation/{column.suite}.json is of another training"}
    value, stderr = _number(result.get("value"), column), _number(result.get("stderr"), column)
    if value is None:
        return {**told, "status": FAILED, "note": "the evaluation gave no finite number"}
    return {**told, "value": value, "stderr": stderr, "status": OK, "note": _outdated(params, run)}


def _command(params: Params, run: Run, columns: Iterable[Column]) -> str | None:
    """What makes these results again and nothing else, or those that are not there yet, with all they need.
    None where params.yaml asks for no such stage."""
    suites = list(dict.fromkeys(column.suite for column in columns))
    if run.name not in params.runs.get(run.scale, {}) or not {*suites} <= {*params.suites}:
        return None
    if run.state == "failed":
        stages = [f"train-{run.scale}@{run.name}"]
    else:
        stages = [f"evaluate-{run.scale}@{run.name}-{suite}" for suite in suites]
    evaluated = run.state == "finished" and {*suites} <= {*run.evaluations}
    here = run.campaign is None and (run.state == "failed" or evaluated)
    return " ".join([AGAIN if here else "dvc repro", *stages])


def _result(run: Run, column: Column) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The contents of a suite's file and the line of a column in it."""
    if run.state != "finished" or column.suite not in run.evaluations:
        return None
    evaluation = run.evaluations[column.suite]
    for result in evaluation.get("results", []):
        if (result.get("task"), result.get("metric")) == (column.task, column.metric):
            return evaluation, result
    return None


def _reason(params: Params, run: Run, column: Column) -> dict[str, Any]:
    """Why a cell has no value."""
    if run.state == "failed":
        error, step = run.failure.get("error", "no reason recorded"), run.failure.get("step")
        at = f" at step {step}" if step is not None else ""
        return {"status": FAILED, "note": f"training failed{at}: {error}"}
    if run.state == "unfinished":
        return {"status": MISSING, "note": f"training stands at step {run.last_step} of {run.steps}"}
    if run.state == "absent" and run.name not in params.runs.get(run.scale, {}):
        return {"status": NOT_RUN, "note": f"not listed in runs.{run.scale}"}
    if column.suite not in params.suites:
        return {"status": MISSING, "note": f"needs suites: {column.suite}"}
    if run.state == "absent":
        return {"status": MISSING, "note": f"listed in runs.{run.scale}, not trained yet"}
    if column.suite not in run.evaluations:
        return {"status": MISSING, "note": f"not evaluated yet on suite {column.suite}"}
    if why := (run.evaluations[column.suite].get("not_run") or {}).get(column.task):
        return {"status": NOT_RUN, "note": why}
    if failed := run.evaluations[column.suite].get("failed"):
        return {"status": FAILED, "note": f"evaluation failed: {failed}"}
    return {"status": MISSING, "note": f"evaluation/{column.suite}.json has no {column.task} {column.metric}"}


def _outdated(params: Params, run: Run) -> str | None:
    """A run whose configuration is no longer what params.yaml says keeps its numbers, with a remark."""
    try:
        wanted = params.run(run.scale, run.name).fingerprint()
    except ValueError:  # its shape is gone from params.yaml
        wanted = "nothing"
    if wanted == run.manifest.get("fingerprint"):
        return None
    return f"trained with another configuration than params.yaml has now ({wanted})"


def _average(parts: list[tuple[Column, dict[str, Any]]]) -> dict[str, Any]:
    """Plain mean of the tasks' scores, if all are there; their errors are independent."""
    results = [cell for _, cell in parts]
    lacking = [(column, cell) for column, cell in parts if cell["status"] != OK]
    if lacking:
        statuses = {cell["status"] for _, cell in lacking}
        notes = {cell["note"] for _, cell in lacking}
        status = FAILED if FAILED in statuses else statuses.pop() if len(statuses) == 1 else MISSING
        if len(lacking) == len(parts) and len(notes) == 1:
            return {"status": status, "note": notes.pop()}
        names = ", ".join(column.title for column, _ in lacking)
        return {"status": status, "note": f"needs all {len(parts)} tasks; without a value: {names}"}
    errors, limits = [cell["stderr"] for cell in results], {cell["limit"] for cell in results}
    return {
        "value": math.fsum(cell["value"] for cell in results) / len(results),
        "stderr": math.sqrt(sum(e * e for e in errors)) / len(results) if None not in errors else None,
        "n": sum(cell["n"] for cell in results) if all(cell["n"] for cell in results) else None,
        "limit": limits.pop() if len(limits) == 1 else None,
        "status": OK,
        "note": results[0]["note"],
    }


def _number(value: Any, column: Column) -> float | None:
    """A finite number in the column's unit, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(Decimal(repr(value)).scaleb(2)) if column.unit == "%" else float(value)
