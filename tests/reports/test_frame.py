import json
import math
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from mdn.config import Params
from mdn.reports.frame import AGAIN, SCHEMA, frame, published_values
from mdn.reports.layout import ACCURACIES, LONGBENCH, RETRIEVAL
from mdn.reports.runs import read_runs


def cells(params: Params, root: Path) -> pl.DataFrame:
    return frame(params, read_runs(params, root))


def cell(frame: pl.DataFrame, table: str, scale: str, row: str, column: str) -> dict:
    found = frame.filter(
        (pl.col("table") == table)
        & (pl.col("scale") == scale)
        & (pl.col("row") == row)
        & (pl.col("column") == column)
    )
    assert found.height == 1
    return found.to_dicts()[0]


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def paper(table: str, scale: str, row: str, column: str) -> float:
    number = published_values()[table, scale, row, column][0]
    assert number is not None
    return number


# Differences that the study states in its prose, independently of its tables.
@pytest.mark.parametrize(
    ("table", "scale", "column", "row", "other", "difference"),
    [
        ("table2", "400m", "retrieval_average", "mdn", "gdn", 3.83),
        ("table2", "1b3", "retrieval_average", "mdn", "gdn", 3.34),
        ("table2", "400m", "retrieval_average", "mdn", "kda", 2.29),
        ("table2", "1b3", "retrieval_average", "mdn", "comba", 0.89),
        ("table2", "400m", "retrieval_average", "transformer", "mdn", 3.66),
        ("table2", "1b3", "retrieval_average", "transformer", "mdn", 4.46),
        ("table2", "400m", "lm_average", "mdn", "kda", 0.36),
        ("table2", "1b3", "lm_average", "mdn", "kda", 0.26),
        ("table3", "1b3", "longbench_average", "mdn", "gdn", 0.90),
        ("table4-ablations", "400m", "retrieval_average", "mdn", "mdn-no-correction", 1.24),
        ("table4-ablations", "400m", "retrieval_average", "mdn", "mdn-no-momentum", 6.64),
        ("table4-ablations", "400m", "lm_average", "mdn", "mdn-no-momentum", 0.16),
        ("table4-hybrids", "400m", "lm_average", "mdn-h-7to1", "mdn-h-3to1", 1.07),
        ("table4-hybrids", "400m", "retrieval_average", "mdn-h-7to1", "mdn-h-3to1", 0.53),
    ],
)
def test_published_values_agree_with_the_differences_told_of_them(
    table, scale, column, row, other, difference
):
    assert paper(table, scale, row, column) - paper(table, scale, other, column) == pytest.approx(difference)


@pytest.mark.parametrize("scale", ["400m", "1b3"])
def test_mdn_has_the_lowest_published_perplexities_and_tables_agree_on_it(scale):
    for column in ("lambada_ppl", "wikitext_ppl"):
        rows = {
            k[2]: v[0] for k, v in published_values().items() if k[:2] == ("table2", scale) and k[3] == column
        }
        assert len(rows) == 6
        assert min(rows, key=lambda row: rows[row] or math.inf) == "mdn"
    for table in ("table4-ablations", "table4-bounds"):
        for column in ("lambada_ppl", "wikitext_ppl", "lm_average", "retrieval_average"):
            assert paper(table, "400m", "mdn", column) == paper("table2", "400m", "mdn", column)


def test_published_failures_are_text_with_their_source_and_never_numbers():
    number, text, source = published_values()["table4-ablations", "400m", "mdn-no-mu-bound", "lambada_ppl"]
    assert (number, text, source) == (None, "NaN at step 70", "Table 6, PDF p. 25")


def test_every_published_row_and_column_exists(params: Params, runs: Path):
    frame = cells(params, runs)
    for table, scale, row, column in published_values():
        found = cell(frame, table, scale, row, column)
        assert found["published"] is not None or found["published_text"]


def test_frame_has_the_declared_schema_with_and_without_runs(params: Params, runs: Path, tmp_path: Path):
    for root in (runs, tmp_path / "nothing"):
        frame = cells(params, root)
        assert dict(frame.schema) == {
            key: kind() if isinstance(kind, type) else kind for key, kind in SCHEMA.items()
        }
    values = cells(params, runs)["value"].drop_nulls()
    assert values.is_finite().all()
    assert values.len() > 100


def test_a_value_carries_its_provenance(params: Params, runs: Path):
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "hellaswag")
    assert (found["value"], found["stderr"], found["n"]) == (32.5, 4.0, 40)
    assert found["limit"] == params.scales["smoke"].evaluation.limit
    assert (found["status"], found["note"]) == ("ok", None)
    assert found["fingerprint"] == params.run("smoke", "mdn").fingerprint()
    assert found["kernel"] == "momentum_delta_rule: v2_segsum"
    assert (found["commit"], found["data"], found["run_id"]) == ("0123456789ab", "da7a" * 3, f"{3:032x}")
    assert found["command"] == f"{AGAIN} evaluate-smoke@mdn-commonsense"


def test_the_command_makes_just_its_cell_again_or_what_is_missing_with_all_it_needs(
    params: Params, runs: Path, add_run
):
    (runs / "smoke/gdn/evaluation/lm.json").unlink()
    frame = cells(params, runs)

    def command(row: str, column: str, table: str = "table2", scale: str = "smoke") -> str | None:
        return cell(frame, table, scale, row, column)["command"]

    assert command("mdn", "lm_average") == f"{AGAIN} evaluate-smoke@mdn-lm evaluate-smoke@mdn-commonsense"
    assert command("gdn", "hellaswag") == f"{AGAIN} evaluate-smoke@gdn-commonsense"
    assert command("gdn", "lambada_acc") == "dvc repro evaluate-smoke@gdn-lm"
    assert command("gdn", "lm_average") == "dvc repro evaluate-smoke@gdn-lm"
    ablation = command("mdn-no-momentum", "piqa", "table4-ablations")
    assert ablation == f"{AGAIN} train-smoke@mdn-no-momentum"  # it failed in training
    assert (
        command("mdn-h-3to1", "piqa", "table4-hybrids") == "dvc repro evaluate-smoke@mdn-h-3to1-commonsense"
    )
    assert command("mdn", "piqa", scale="400m") is None  # no longer listed: there is no such stage
    assert command("kda", "piqa", scale="400m") is None
    few = replace(params, suites=["commonsense"])
    assert cell(cells(few, runs), "table2", "smoke", "mdn", "lm_average")["command"] is None


def test_average_is_the_plain_mean_of_eight_with_their_errors_propagated(params: Params, runs: Path):
    folder = runs / "smoke" / "mdn" / "evaluation"
    accuracies = [0.11, 0.22, 0.33, 0.44, 0.55, 0.66, 0.77]
    errors = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]

    def spread(evaluation):
        for result, value, error in zip(evaluation["results"], accuracies, errors, strict=True):
            result |= {"value": value, "stderr": error}

    edit(folder / "commonsense.json", spread)
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "lm_average")
    assert found["value"] == pytest.approx(100 * (0.325 + sum(accuracies)) / 8, abs=1e-12)
    assert found["stderr"] == pytest.approx(100 * math.hypot(0.04, *errors) / 8, abs=1e-12)
    assert found["n"] == 320


@pytest.mark.parametrize("task", [column.task for column in ACCURACIES])
def test_average_needs_all_eight_tasks(params: Params, runs: Path, task: str):
    for path in (runs / "smoke" / "mdn" / "evaluation").glob("*.json"):
        edit(
            path,
            lambda e: e.update(
                results=[
                    r
                    for r in e["results"]
                    if (r["task"], r["metric"]) != (task, "perplexity") and r["task"] != task
                ]
            ),
        )
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "lm_average")
    assert (found["value"], found["status"]) == (None, "missing")
    assert found["note"].startswith("needs all 8 tasks; without a value: ")


def test_failed_training_says_where_and_why(params: Params, runs: Path):
    frame = cells(params, runs)
    for column in ("hellaswag", "lambada_ppl", "lm_average"):
        found = cell(frame, "table4-ablations", "smoke", "mdn-no-momentum", column)
        assert (found["value"], found["status"]) == (None, "failed")
        assert found["note"] == "training failed at step 17: loss is <nan> & not finite"


def test_what_was_not_asked_for_and_what_is_not_there_yet_are_told_apart(params: Params, runs: Path):
    frame = cells(params, runs)
    never = cell(frame, "table4-ablations", "smoke", "mdn-alpha-1", "piqa")
    assert (never["status"], never["note"]) == ("not run", "not listed in runs.smoke")
    later = cell(frame, "table4-hybrids", "smoke", "mdn-h-3to1", "piqa")
    assert (later["status"], later["note"]) == ("missing", "listed in runs.smoke, not trained yet")


def test_a_stand_in_never_fills_the_original_column(params: Params, runs: Path):
    frame = cells(params, runs)
    own = cell(frame, "table2", "smoke", "mdn", "heldout_wiki")
    original = cell(frame, "table2", "smoke", "mdn", "wikitext_ppl")
    assert own["status"] == "ok"
    assert (original["value"], original["status"], original["note"]) == (
        None,
        "not run",
        "its data set is not here",
    )
    stand_in = cell(frame, "standins", "smoke", "mdn", "standin_squad")
    assert (stand_in["value"], stand_in["status"], stand_in["window"]) == (32.5, "ok", 256)
    for column in ("squad", "fda", "retrieval_average"):
        original = cell(frame, "table2", "smoke", "mdn", column)
        assert (original["value"], original["status"]) == (None, "not run")
        assert original["note"] == "its data set is not here"


@pytest.mark.parametrize(
    ("suite", "table", "columns", "average"),
    [
        ("retrieval", "table2", RETRIEVAL, "retrieval_average"),
        ("longbench", "table3", LONGBENCH, "longbench_average"),
    ],
)
def test_scores_of_a_suites_sets_make_its_average(params: Params, runs: Path, suite, table, columns, average):
    path = runs / "smoke" / "mdn" / "evaluation" / f"{suite}.json"
    rows = [
        {
            "task": c.task,
            "metric": c.metric,
            "value": n / 100,
            "stderr": 0.03,
            "n": 8,
            "limit": 8,
            "truncated": 1,
        }
        for n, c in enumerate(columns)
    ]
    edit(path, lambda e: e.update(results=e["results"] + rows, not_run={}))
    found = cell(cells(params, runs), table, "smoke", "mdn", average)
    assert found["value"] == pytest.approx((len(columns) - 1) / 2)
    assert found["stderr"] == pytest.approx(3 / math.sqrt(len(columns)))
    edit(path, lambda e: e["results"].pop())
    found = cell(cells(params, runs), table, "smoke", "mdn", average)
    assert (found["value"], found["status"]) == (None, "missing")
    assert found["note"] == f"needs all {len(columns)} tasks; without a value: {columns[-1].title}"


def test_tasks_of_the_same_name_in_two_suites_are_kept_apart(params: Params, runs: Path):
    row = {"task": "triviaqa", "metric": "contains", "value": 0.5, "stderr": None, "n": 1}
    path = runs / "smoke" / "mdn" / "evaluation" / "longbench.json"
    edit(path, lambda e: e["results"].append(row))
    assert cell(cells(params, runs), "table2", "smoke", "mdn", "triviaqa")["status"] == "not run"


def test_suites_that_are_switched_off_say_how_to_switch_them_on(params: Params, runs: Path):
    (runs / "smoke" / "mdn" / "evaluation" / "lm.json").unlink()
    reduced = replace(params, suites=["commonsense"])
    found = cell(cells(reduced, runs), "table2", "smoke", "mdn", "lambada_ppl")
    assert (found["status"], found["note"]) == ("missing", "needs suites: lm")
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "lambada_ppl")
    assert (found["status"], found["note"]) == ("missing", "not evaluated yet on suite lm")


def test_a_training_that_was_stopped_says_how_far_it_came(params: Params, runs: Path):
    (runs / "smoke" / "mdn" / "metrics.json").unlink()
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "piqa")
    steps = params.scales["smoke"].training.steps
    assert (found["status"], found["note"]) == ("missing", f"training stands at step 60 of {steps}")


def test_an_evaluation_of_another_training_is_not_shown(params: Params, runs: Path):
    edit(runs / "smoke" / "mdn" / "evaluation" / "lm.json", lambda e: e.update(fingerprint="0" * 12))
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "lambada_ppl")
    assert (found["value"], found["status"]) == (None, "missing")
    assert found["note"] == "evaluation/lm.json is of another training"


def test_an_outdated_run_keeps_its_value_with_a_remark(params: Params, runs: Path):
    later = replace(params, seed=params.seed + 1)
    found = cell(cells(later, runs), "table2", "smoke", "mdn", "piqa")
    assert (found["value"], found["status"]) == (32.5, "ok")
    assert later.run("smoke", "mdn").fingerprint() in found["note"]


def test_one_failed_accuracy_fails_the_average(params: Params, runs: Path):
    path = runs / "smoke" / "mdn" / "evaluation" / "commonsense.json"
    edit(path, lambda e: e["results"][2].update(value=None))
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "lm_average")
    assert (found["value"], found["status"]) == (None, "failed")
    assert found["note"] == "needs all 8 tasks; without a value: ARC-C acc_n"


@pytest.mark.parametrize("value", [None, "nan", True])
def test_a_result_that_is_no_finite_number_fails(params: Params, runs: Path, value):
    edit(
        runs / "smoke" / "mdn" / "evaluation" / "commonsense.json",
        lambda e: e["results"][0].update(value=value),
    )
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "hellaswag")
    assert (found["value"], found["status"]) == (None, "failed")


def test_a_suite_that_broke_keeps_what_came_before(params: Params, runs: Path):
    edit(
        runs / "smoke" / "mdn" / "evaluation" / "lm.json",
        lambda e: e.update(failed="heldout_wiki: not finite", results=e["results"][:2]),
    )
    frame = cells(params, runs)
    assert cell(frame, "table2", "smoke", "mdn", "lambada_acc")["status"] == "ok"
    found = cell(frame, "table2", "smoke", "mdn", "heldout_wiki")
    assert (found["status"], found["note"]) == ("failed", "evaluation failed: heldout_wiki: not finite")


def test_a_training_that_diverged_shows_no_value_of_its_last_weights(params: Params, runs: Path):
    (runs / "smoke" / "mdn" / "failed.json").write_text('{"error": "loss is nan", "step": 70}')
    found = cell(cells(params, runs), "table2", "smoke", "mdn", "piqa")
    assert (found["value"], found["status"]) == (None, "failed")
    assert found["note"] == "training failed at step 70: loss is nan"


def test_an_evaluation_of_other_weights_is_not_shown(params: Params, runs: Path):
    folder = runs / "smoke" / "mdn"
    edit(folder / "manifest.json", lambda m: m.update(weights="a" * 12))
    edit(folder / "evaluation" / "lm.json", lambda e: e.update(identity="b" * 12 + "-x"))
    edit(folder / "evaluation" / "commonsense.json", lambda e: e.update(identity="a" * 12 + "-x"))
    frame = cells(params, runs)
    assert cell(frame, "table2", "smoke", "mdn", "lambada_ppl")["status"] == "missing"
    assert cell(frame, "table2", "smoke", "mdn", "piqa")["status"] == "ok"


def test_a_broken_file_is_named(params: Params, runs: Path):
    path = runs / "smoke" / "mdn" / "evaluation" / "lm.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"smoke/mdn/evaluation/lm\.json: not valid JSON"):
        cells(params, runs)


def test_scales_without_runs_or_published_values_make_no_table(params: Params, runs: Path):
    frame = cells(params, runs)
    assert set(frame["scale"]) == {"smoke", "400m", "1b3"}
    assert set(frame.filter(pl.col("scale") == "1b3")["table"]) == {"table2", "table3", "niah"}
    assert "table4-bounds" not in set(frame.filter(pl.col("scale") == "smoke")["table"])
