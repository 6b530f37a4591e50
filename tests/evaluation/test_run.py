"""A suite from files to its JSON: contents, adoption, resuming, failures."""

import gzip
import json
import math
import subprocess
import sys
from dataclasses import replace
from statistics import mean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mdn.config import Evaluation
from mdn.data.shards import ShardWriter, write_index
from mdn.evaluation import data
from mdn.evaluation.scoring import quiet
from mdn.evaluation.suites import NotRun, commonsense, lm, run
from mdn.evaluation.suites.run import Cell, run_suite, write_samples
from mdn.tracking.record import Record, write_json

from .files import write_all
from .items import EXAMPLES
from .models import EOT, VOCABULARY, Constant

SUITES = {"lm": lm, "commonsense": commonsense}
SETTING = Evaluation(limit=2, window=128, batch_tokens=512, heldout_tokens=100)


def write_tokens(folder):
    folder.mkdir(parents=True)
    splits = {}
    for name in ("train", "heldout_wiki", "heldout_c4"):
        writer = ShardWriter(folder, name, 1000)
        writer.write(np.arange(90, dtype=np.uint16))
        splits[name] = writer.close()
    write_index(folder, splits, [])


@pytest.fixture
def cell(tmp_path, monkeypatch, tiny_run, model, tokenizer) -> Cell:
    write_all(tmp_path / "raw", monkeypatch)
    write_tokens(tmp_path / "tokens/smoke")
    record = Record(tmp_path / "runs/smoke/mdn")
    record.folder.mkdir(parents=True)
    tiny_run.to_yaml(record.folder / "config.yaml")
    save_file({"head": torch.ones(1)}, record.weights)
    return Cell(record, model, tokenizer, SETTING, tmp_path / "raw", tmp_path / "tokens/smoke")


def nothing(name):
    return quiet


def read(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def samples(cell, suite):
    with gzip.open(cell.record.folder / f"evaluation/{suite}.samples.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_a_suite_reports_every_metric_of_every_task(cell, suite):
    found = read(run_suite(cell, suite, nothing))
    there = [task for task in SUITES[suite].TASKS if task in EXAMPLES]
    wanted = {(task, metric) for task in there for metric in EXAMPLES[task].constant}
    if suite == "lm":
        wanted |= {("heldout_wiki", "perplexity"), ("heldout_c4", "perplexity")}
    assert {(row["task"], row["metric"]) for row in found["results"]} == wanted
    assert len(found["results"]) == len(wanted)
    for row in found["results"]:
        assert set(row) == {
            "task", "metric", "value", "stderr", "n", "limit", "truncated", "task_hash", "data",
        }  # fmt: skip
        heldout = row["task"].startswith("heldout")
        assert (row["n"], row["limit"]) == ((90, 100) if heldout else (2, 2))
        assert row["truncated"] == 0
        assert row["value"] >= 0
    assert found["harness"].startswith("lm-eval 0.4.")
    assert set(found["not_run"]) == {*SUITES[suite].TASKS} - {*there}
    assert (found["window"], found["batch_tokens"]) == (128, 512)
    assert found["fingerprint"] == cell.record.config.fingerprint()
    assert found["seconds"] > 0
    assert found["manifest"]["code"] in found["identity"]
    assert not (cell.record.folder / f"evaluation/{suite}.partial").exists()
    bare = read(cell.record.folder / f"evaluation/metrics/{suite}.json")
    assert {(task, metric) for task, figures in bare.items() for metric in figures} == wanted
    assert all(bare[row["task"]][row["metric"]] == row["value"] for row in found["results"])


def test_samples_hold_prompts_answers_and_scores_that_give_the_result(cell):
    found = read(run_suite(cell, "commonsense", nothing))
    rows = samples(cell, "commonsense")
    assert len(rows) == 2 * len(commonsense.TASKS)
    first = next(row for row in rows if row["task"] == "arc_easy")
    assert tuple(first["prompts"][0]) == EXAMPLES["arc_easy"].right[0]
    for task in commonsense.TASKS:
        (result,) = [r for r in found["results"] if (r["task"], r["metric"]) == (task, "acc")]
        own = [row for row in rows if row["task"] == task]
        likeliest = [max(range(len(r["scores"])), key=lambda n, r=r: r["scores"][n][0]) for r in own]
        right = [EXAMPLES[task].right[row["id"]] for row in own]
        hits = [tuple(r["prompts"][n]) == a for r, n, a in zip(own, likeliest, right, strict=True)]
        assert result["value"] == pytest.approx(mean(hits))
        assert result["stderr"] == pytest.approx(stdev(hits) / math.sqrt(len(hits)))


def test_the_limit_takes_the_first_items_and_null_takes_all(cell):
    every = replace(cell, evaluation=replace(SETTING, limit=None))
    few = read(run_suite(cell, "commonsense", nothing))
    few_samples = samples(cell, "commonsense")
    found = read(run_suite(every, "commonsense", nothing))
    assert {r["task"]: r["n"] for r in found["results"]} == {
        task: len(EXAMPLES[task].items) for task in commonsense.TASKS
    }
    assert found["results"][0]["limit"] is None
    assert found["identity"] != few["identity"]
    hashes = [next(r["task_hash"] for r in f["results"] if r["task"] == "piqa") for f in (few, found)]
    assert hashes[0] != hashes[1]
    strip = lambda rows: [(r["task"], r["id"], r["prompts"]) for r in rows if r["id"] < 2]  # noqa: E731
    assert strip(samples(cell, "commonsense")) == strip(few_samples)


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_only_lambada_is_read_after_an_end_of_text_token(cell, suite, monkeypatch):
    firsts: set[int] = set()
    hidden = cell.model.hidden
    monkeypatch.setattr(lm, "run_heldout", lambda *_: ([], []))
    monkeypatch.setattr(run, "_rehearse", lambda model: None)
    monkeypatch.setattr(cell.model, "hidden", lambda ids: firsts.update(ids[:, 0].tolist()) or hidden(ids))
    run_suite(cell, suite, nothing)
    assert (firsts == {EOT}) if suite == "lm" else (firsts and EOT not in firsts)


def test_cut_prompts_are_counted_by_document(cell):
    short = replace(cell, evaluation=replace(SETTING, window=30))
    found = read(run_suite(short, "commonsense", nothing))
    cut = {row["task"]: row["truncated"] for row in found["results"]}
    assert cut["boolq"] == 2  # two documents of two choices
    assert found["window"] == 30


def test_a_finished_suite_is_adopted_without_work(cell, monkeypatch):
    path = run_suite(cell, "lm", nothing)
    before = path.read_bytes()
    monkeypatch.setattr(run, "_run", lambda *_: pytest.fail("evaluated again"))
    assert run_suite(cell, "lm", nothing) == path
    assert path.read_bytes() == before


def test_a_finished_suite_is_evaluated_again_if_forced_with_nothing_kept_of_an_interrupted_one(
    cell, monkeypatch
):
    path = run_suite(cell, "lm", nothing)
    before, ran, inner = read(path)["results"], [], run._run
    kept = path.with_name("lm.partial") / "lambada_openai.json"
    write_json(kept, {"identity": read(path)["identity"], "results": [], "samples": [], "seconds": 0})
    monkeypatch.setenv("MDN_FORCE", "1")
    monkeypatch.setattr(run, "_run", lambda *args: ran.append(args[2]) or inner(*args))
    assert read(run_suite(cell, "lm", nothing))["results"] == before
    assert ran == ["lambada_openai", "wikitext", "heldout_wiki", "heldout_c4"]


def change_weights(cell):
    save_file({"head": torch.zeros(1)}, cell.record.weights)
    return cell


def change_configuration(cell):
    replace(cell.record.config, seed=cell.record.config.seed + 1).to_yaml(cell.record.folder / "config.yaml")
    return replace(cell, record=Record(cell.record.folder))


def change_data(cell):
    path = cell.raw / data.PACKAGE / data.SOURCES["lambada_openai"].file
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"tea", b"ale")))
    return cell


@pytest.mark.parametrize(
    "change",
    [
        change_weights,
        change_configuration,
        change_data,
        lambda cell: replace(cell, evaluation=replace(SETTING, window=64)),
        lambda cell: replace(cell, evaluation=replace(SETTING, heldout_tokens=50)),
    ],
)
def test_other_weights_configurations_data_or_settings_are_evaluated_anew(cell, change):
    before = read(run_suite(cell, "lm", nothing))["identity"]
    assert read(run_suite(change(cell), "lm", nothing))["identity"] != before


@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_the_identity_follows_the_file_of_every_task(cell, task):
    (suite,) = (suite for suite in SUITES.values() if task in suite.TASKS)
    before, path = suite.identity(cell), cell.raw / data.PACKAGE / data.SOURCES[task].file
    path.write_bytes(path.read_bytes() + b"\n")
    assert suite.identity(cell) != before


def test_other_code_is_evaluated_anew_and_another_batch_is_not(cell, monkeypatch):
    before = read(run_suite(cell, "lm", nothing))["identity"]
    larger = replace(cell, evaluation=replace(SETTING, batch_tokens=64))
    assert read(run_suite(larger, "lm", nothing))["identity"] == before
    monkeypatch.setattr(run, "code_digest", lambda: "0" * 12)
    assert read(run_suite(cell, "lm", nothing))["identity"] != before


def test_another_lm_eval_is_evaluated_anew_where_it_makes_the_prompts(cell, monkeypatch):
    monkeypatch.setattr(run, "code_digest", lambda: "0" * 12)
    identities = {}
    for release in ("0.4.13", "0.4.14"):
        monkeypatch.setattr(run, "version", lambda name, release=release: release)
        identities[release] = [run._identity(cell, suite) for suite in ("lm", "commonsense", "positions")]
    same = [old == new for old, new in zip(*identities.values(), strict=True)]
    assert same == [False, False, True]


def test_the_code_digest_covers_decoding_too(root):
    """What decodes a token is another version of the operator, and its module is imported when first used."""
    program = """
import sys
from types import SimpleNamespace
from mdn.config import load
from mdn.evaluation.decoding import decode
from mdn.evaluation.suites.run import _rehearse
from mdn.models.lm import build

params = load(sys.argv[1])
for name in ("transformer", "mamba2", "gdn", "comba", "kda", "mdn"):
    model = build(params.run("smoke", name)).eval()
    _rehearse(SimpleNamespace(model=model, evaluation=params.scales["smoke"].evaluation))
    before = set(sys.modules)
    decode(model, [[1, 2, 3]], lambda n, ids: len(ids) > 1, batch_tokens=64)
    late = [module for module in set(sys.modules) - before if module.startswith("mdn")]
    assert not late, (name, late)
"""
    command = [sys.executable, "-c", program, str(root / "params.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_interrupted_suite_goes_on_with_the_next_task(cell, monkeypatch):
    inner, ran = run._run, []

    def interrupted(suite, cell, name, progress):
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append(name)
        return inner(suite, cell, name, progress)

    monkeypatch.setattr(run, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_suite(cell, "commonsense", nothing)
    assert not (cell.record.folder / "evaluation/commonsense.json").exists()
    again = []

    def continued(suite, cell, name, progress):
        again.append(name)
        return {**inner(suite, cell, name, progress), "seconds": 100.0}

    monkeypatch.setattr(run, "_run", continued)
    kept = [read(path) for path in (cell.record.folder / "evaluation/commonsense.partial").iterdir()]
    found = read(run_suite(cell, "commonsense", nothing))
    assert found["seconds"] == pytest.approx(sum(task["seconds"] for task in kept) + 400, abs=0.01)
    assert tuple(ran + again) == commonsense.TASKS
    assert len({row["task"] for row in found["results"]}) == 7
    assert len(samples(cell, "commonsense")) == 14


def test_what_an_interrupted_suite_left_of_other_weights_is_not_used(cell, monkeypatch):
    inner = run._run

    def interrupted(suite, cell, name, progress):
        if name != "piqa":
            raise KeyboardInterrupt
        return inner(suite, cell, name, progress)

    monkeypatch.setattr(run, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_suite(cell, "commonsense", nothing)
    ran = []
    monkeypatch.setattr(run, "_run", lambda s, c, name, p: ran.append(name) or inner(s, c, name, p))
    run_suite(change_weights(cell), "commonsense", nothing)
    assert tuple(ran) == commonsense.TASKS


def test_a_model_that_gives_nan_ends_as_failed_with_the_reason(cell):
    found = read(run_suite(replace(cell, model=Constant(float("nan"))), "lm", nothing))
    assert found["failed"].startswith("lambada_openai: ")
    assert found["results"] == []


def test_a_task_without_data_is_listed_with_the_reason_and_the_others_run(cell, monkeypatch):
    inner = commonsense.run_task

    def absent(cell, name, progress):
        if name == "piqa":
            raise NotRun("no data here")
        return inner(cell, name, progress)

    monkeypatch.setattr(commonsense, "run_task", absent)
    found = read(run_suite(cell, "commonsense", nothing))
    assert found["not_run"] == {"piqa": "no data here"}
    assert {row["task"] for row in found["results"]} == {*commonsense.TASKS} - {"piqa"}


def test_a_suite_of_our_own_does_not_wait_for_lm_eval():
    """Importing it takes seconds, which a smoke cell has not got."""
    suites = ", ".join(f"mdn.evaluation.suites.{name}" for name in ("run", "niah", "positions"))
    program = f"import sys, {suites}; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_held_out_results_are_those_of_a_constant_model(cell):
    found = read(run_suite(replace(cell, model=Constant()), "lm", nothing))
    rows = [row for row in found["results"] if row["task"].startswith("heldout")]
    assert [row["value"] for row in rows] == pytest.approx([VOCABULARY] * 2, rel=1e-4)
    assert [row["stderr"] for row in rows] == [None, None]  # a single window


def test_the_error_of_a_held_out_perplexity_is_that_of_the_windows_mean_loss(cell):
    """The bootstrap against the delta method: d exp(x) = exp(x) dx, for windows of one length."""
    short = replace(cell, evaluation=replace(SETTING, window=5))
    (row,), windows = lm.run_heldout(short, "heldout_wiki", quiet)
    losses = [-window["loglikelihood"] / window["tokens"] for window in windows]
    assert row["value"] == pytest.approx(math.exp(mean(losses)))
    assert row["stderr"] == pytest.approx(row["value"] * stdev(losses) / math.sqrt(len(losses)), rel=0.1)


def test_samples_are_the_same_bytes_for_the_same_rows(tmp_path, monkeypatch):
    rows = [{"task": "piqa", "prompts": [["Wärme?", " ja"]], "scores": [[-1.5, True]]}]
    write_samples(tmp_path / "a.jsonl.gz", rows)
    monkeypatch.setattr("time.time", lambda: 2e9)
    write_samples(tmp_path / "b.jsonl.gz", rows)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert json.loads(gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes())) == rows[0]


def test_samples_that_cannot_be_written_leave_those_before(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    write_samples(path, [{"score": 1.5}])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON compliant"):
        write_samples(path, [{"score": 2.5}, {"score": math.nan}])
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_suite_told_to_fails_on_prompts_that_were_cut_and_keeps_what_is_done(cell):
    strict = replace(SETTING, window=30, fail_on_truncation=["commonsense"])
    told = r"piqa: 2 of 2 prompts do not fit into the window of 30 tokens; .*fail_on_truncation"
    with pytest.raises(ValueError, match=told):
        run_suite(replace(cell, evaluation=strict), "commonsense", nothing)
    assert (cell.record.folder / "evaluation/commonsense.partial/piqa.json").exists()
    run_suite(replace(cell, evaluation=strict), "lm", nothing)  # another suite may cut
    run_suite(replace(cell, evaluation=replace(strict, fail_on_truncation=[])), "commonsense", nothing)
    with pytest.raises(ValueError, match=told):  # adopting it does not pass either
        run_suite(replace(cell, evaluation=strict), "commonsense", nothing)


class TestStage:
    """pipeline/evaluate_model.py"""

    @pytest.fixture
    def stage(self, root, tmp_path, monkeypatch, capsys):
        namespace: dict = {"__name__": "stage", "__doc__": ""}
        source = (root / "pipeline/evaluate_model.py").read_text()
        exec(compile(source, "evaluate_model.py", "exec"), namespace)

        def call(suite="lm", model="mdn"):
            folders = {"params": root / "params.yaml", "runs": tmp_path / "runs", "raw": tmp_path / "raw"}
            folders["tokens"] = tmp_path / "tokens"
            options = [text for name, path in folders.items() for text in (f"--{name}", str(path))]
            monkeypatch.setattr(
                "sys.argv", ["stage", "--scale", "smoke", "--model", model, "--suite", suite, *options]
            )
            namespace["main"]()

        return SimpleNamespace(call=call)

    def test_a_trained_model_is_loaded_and_evaluated(self, cell, stage, monkeypatch, tokenizer, capsys):
        from mdn.models.lm import build

        torch.manual_seed(0)
        save_file(build(cell.record.config).state_dict(), cell.record.weights)
        monkeypatch.setattr("mdn.data.tokenization.tokenizer", lambda folder: tokenizer)
        stage.call()
        found = read(cell.record.folder / "evaluation/lm.json")
        assert {row["task"] for row in found["results"]} == {"lambada_openai", "heldout_wiki", "heldout_c4"}
        assert capsys.readouterr().out.strip().endswith("lm.json")

    def test_a_failed_training_gives_a_file_that_says_so(self, cell, stage):
        cell.record.weights.unlink()
        (cell.record.folder / "failed.json").write_text('{"error": "loss is nan", "step": 3}')
        stage.call("commonsense")
        found = read(cell.record.folder / "evaluation/commonsense.json")
        assert found["failed"] == "training failed: loss is nan"
        assert found["results"] == []
        assert samples(cell, "commonsense") == []

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda cell: cell.record.weights.unlink(), r"model.safetensors: not found; train mdn at smoke"),
            (lambda cell: (cell.tokens / "index.json").unlink(), r"index.json: not found"),
            (lambda cell: [p.unlink() for p in cell.raw.rglob("*.gz")], r"requests.jsonl.gz: not found"),
        ],
    )
    def test_what_is_missing_is_said_in_one_line(self, cell, stage, monkeypatch, tokenizer, damage, message):
        from mdn.models.lm import build

        save_file(build(cell.record.config).state_dict(), cell.record.weights)
        monkeypatch.setattr("mdn.data.tokenization.tokenizer", lambda folder: tokenizer)
        damage(cell)
        with pytest.raises(SystemExit, match=message) as stopped:
            stage.call()
        assert isinstance(stopped.value.code, str)
        assert "\n" not in stopped.value.code

    def test_an_unknown_model_is_said_in_one_line(self, stage):
        with pytest.raises(SystemExit, match=r"'nobody' is unknown"):
            stage.call(model="nobody")
