import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scipy.stats import binomtest, norm

from mdn.cli import main
from mdn.config import Params
from mdn.reports.diff import diff, mark, pairs, read
from mdn.reports.figures.pairs import drawing

ROOT = Path(__file__).parents[2]


def section(text: str, title: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
    return rows[2:]


def test_only_what_differs_is_listed(runs: Path):
    text = diff(read(runs / "smoke/mdn"), read(runs / "smoke/mdn-no-correction"))
    keys = {row[0]: row[1:] for row in section(text, "Configuration")}
    assert keys == {
        "name": ["mdn", "mdn-no-correction"],
        "options.mdn.output_correction": ["True", "False"],
    }
    assert section(text, "Origin") == []


def test_results_come_with_their_difference_in_standard_errors(runs: Path):
    text = diff(read(runs / "smoke/gdn"), read(runs / "smoke/mdn"))
    rows = {(row[0], row[1]): row[2:] for row in section(text, "Results")}
    a, b, gap, errors, judged = rows["piqa", "acc, %"]
    assert (a, b, gap) == ("27.50 ± 4.00 (n = 40)", "32.50 ± 4.00 (n = 40)", "+5.00")
    assert (errors, judged) == ("+0.88", "two errors")  # 0.05 / (0.04 √2)
    assert rows["heldout_wiki", "perplexity"][-2:] == ["–", "–"]  # no standard error there


def change(run: Path, suite: str, task: str, **values: object) -> None:
    """Overwrites what a run's evaluation says of a task."""
    path = run / "evaluation" / f"{suite}.json"
    found = json.loads(path.read_text())
    for row in found["results"]:
        if row["task"] == task:
            row |= values
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("task", "a", "b", "told"),
    [
        # accuracies in per cent as in the report: half a point of a thousand items is no 0.01
        ("lambada_openai", (0.4942, 0.0158), (0.4991, 0.0158), ["49.42 ± 1.58", "49.91 ± 1.58", "+0.49"]),
        ("lambada_openai", (0.00125, 0.001), (0.0, 0.0), ["0.13 ± 0.10", "0.00 ± 0.00", "−0.13"]),
        # everything else to two digits of its error, or of the difference
        ("heldout_c4", (9377.4, 788.31), (9552.6, 834.45), ["9377 ± 788", "9553 ± 834", "+175"]),
        ("heldout_c4", (8.6158, None), (8.6192, None), ["8.6158", "8.6192", "+0.0034"]),
        ("heldout_c4", (0.99842, None), (0.99842, None), ["0.9984", "0.9984", "0"]),
        ("heldout_c4", (41.7, 0.9), (41.7004, 0.9), ["41.70 ± 0.90", "41.70 ± 0.90", "+4.0e-4"]),
        ("heldout_c4", (8.9e14, 1e14), (1.0, 0.5), ["8.90e14 ± 1.00e14", "1.00 ± 0.50", "−8.90e14"]),
    ],
)
def test_a_difference_is_never_lost_in_rounding_nor_drowned_in_digits(runs: Path, task, a, b, told):
    for name, (value, stderr) in (("gdn", a), ("mdn", b)):
        change(runs / "smoke" / name, "lm", task, value=value, stderr=stderr, n=None)
    text = diff(read(runs / "smoke/gdn"), read(runs / "smoke/mdn"))
    found = [row for row in section(text, "Results") if row[0] == task][-1]
    assert found[2:5] == told


def test_a_metric_that_was_not_finite_is_listed(runs: Path):
    change(runs / "smoke/mdn", "lm", "heldout_c4", value=None)
    for a, b in (("gdn", "mdn"), ("mdn", "gdn")):
        text = diff(read(runs / "smoke" / a), read(runs / "smoke" / b))
        row = next(row for row in section(text, "Results") if row[0] == "heldout_c4")
        assert row[2:].count("not finite") == 1
        assert row[4:] == ["–", "–", "–"]


def test_what_two_results_were_not_measured_alike_in_is_said(runs: Path):
    change(runs / "smoke/mdn", "commonsense", "piqa", task_hash="another", data="another")
    text = diff(read(runs / "smoke/gdn"), read(runs / "smoke/mdn"))
    judged = {row[0]: row[-1] for row in section(text, "Results")}
    assert judged["piqa"] == "two errors; other task, items"
    assert judged["boolq"] == "two errors"


def answer(run: Path, right: list[int], task: str = "piqa", metric: str = "acc") -> None:
    """Samples that make a run's result."""
    path = run / "evaluation/commonsense.json"
    found = json.loads(path.read_text())
    for row in found["results"]:
        if row["task"] == task:
            row |= {"value": sum(right) / len(right), "n": len(right)}
    path.write_text(json.dumps(found))
    with gzip.open(path.with_name("commonsense.samples.jsonl.gz"), "wt") as file:
        file.writelines(json.dumps({"task": task, metric: score}) + "\n" for score in right)


def test_the_same_items_are_compared_one_by_one(runs: Path):
    a, b = runs / "smoke/gdn", runs / "smoke/mdn"
    answer(a, [0] * 20 + [1] * 5 + [1] * 15)
    answer(b, [1] * 20 + [0] * 5 + [1] * 15)

    def judged() -> list[str]:
        return next(row[-2:] for row in section(diff(read(a), read(b)), "Results") if row[0] == "piqa")

    z = norm.isf(binomtest(20, 25).pvalue / 2)
    assert judged() == [f"+{z:.2f} \\*\\*", "40 items: 20 up, 5 down"]
    assert " 1 are judged item by item" in diff(read(a), read(b))
    answer(b, [1] * 39)  # one item less: not the same
    assert judged()[1] == "two errors"


def test_the_log_is_compared_at_steps_that_both_have(runs: Path):
    rows = section(diff(read(runs / "smoke/gdn"), read(runs / "smoke/mdn")), "Log: train/loss")
    steps = [int(row[0]) for row in rows]
    assert (steps[0], steps[-1]) == (1, 60)
    assert 5 not in steps  # not finite there
    for _, a, b, gap in rows:
        assert float(gap.replace("−", "-")) == pytest.approx(float(b) - float(a), abs=2e-4)


def test_a_run_is_the_same_as_itself(runs: Path):
    text = diff(read(runs / "smoke/mdn"), read(runs / "smoke/mdn"))
    assert text.count("\n\nthe same\n") == 2
    assert all(row[4] == "0" for row in section(text, "Results"))


def test_a_failed_run_says_why(runs: Path):
    text = diff(read(runs / "smoke/mdn"), read(runs / "smoke/mdn-no-momentum"))
    assert "smoke/mdn-no-momentum failed: `loss is <nan> & not finite`" in text
    assert "no metric that both have" in text


def test_the_command_prints_it_and_names_a_missing_run(runs: Path, params: Params, capsys):
    assert main(["diff", str(runs / "smoke/gdn"), str(runs / "smoke/mdn")]) == 0
    assert capsys.readouterr().out.startswith("# smoke/gdn against smoke/mdn\n")
    assert main(["diff", str(runs / "smoke/gdn"), str(runs / "smoke/none")]) == 2
    assert "neither a run folder nor a revision" in capsys.readouterr().err


def test_an_archived_run_can_be_compared(runs: Path):
    place = runs / ".archive/smoke/gdn/abc"
    place.parent.mkdir(parents=True)
    (runs / "smoke/gdn").rename(place)
    config = json.loads((place / "manifest.json").read_text())
    assert config["fingerprint"]
    assert "gdn" in diff(read(place), read(runs / "smoke/mdn"))


def shift(run: Path, by: float) -> None:
    """Moves the accuracies of a run."""
    path = run / "evaluation/commonsense.json"
    found = json.loads(path.read_text())
    for row in found["results"]:
        row["value"] += by
    path.write_text(json.dumps(found))


@pytest.mark.parametrize(("z", "stars"), [(None, ""), (1.95, ""), (-1.97, "*"), (2.6, "**"), (-40.0, "***")])
def test_stars_follow_the_normal_distribution(z, stars):
    assert mark(z) == stars


def test_what_is_beyond_chance_is_marked_and_counted(runs: Path):
    shift(runs / "smoke/mdn", 0.16)  # 0.05 + 0.16 = 0.21 are 3.7 standard errors of 0.04 √2
    text = diff(read(runs / "smoke/gdn"), read(runs / "smoke/mdn"))
    rows = {(row[0], row[1]): row[-2] for row in section(text, "Results")}
    assert rows["piqa", "acc, %"] == "+3.71 \\*\\*\\*"
    assert rows["lambada_openai", "acc, %"] == "+0.88"
    marked = [value for value in rows.values() if value.endswith("*")]
    judged = [value for value in rows.values() if value != "–"]
    assert f"{len(marked)} of {len(judged)} differences are beyond 1.96 standard errors" in text
    assert f"about {0.05 * len(judged):.1f} would be" in text


def test_folders_of_runs_are_paired_by_name_and_only_differences_are_listed(runs: Path, tmp_path: Path):
    other = Path(shutil.copytree(runs / "smoke", tmp_path / "other"))
    shutil.rmtree(other / "kda")
    shift(other / "mdn", 0.16)
    text = diff(read(runs / "smoke"), read(other))
    assert text.startswith("# smoke against other\n")
    assert [row[0] for row in section(text, "Runs")] == ["kda"]
    assert {row[0] for row in section(text, "Results")} == {"mdn"}
    assert {row[2] for row in section(text, "Results")} == {"acc, %", "acc_norm, %"}
    assert section(text, "Configuration") == []


def test_two_scales_of_a_model(runs: Path):
    text = diff(read(runs / "smoke/mdn"), read(runs / "400m/mdn"))
    keys = {row[0]: row[1:] for row in section(text, "Configuration")}
    assert keys["scale"] == ["smoke", "400m"]
    assert keys["training.context"] == ["256", "4096"]


def test_the_figure_has_both_losses_and_their_difference(runs: Path):
    a, b = (read(runs / "smoke" / name) for name in ("gdn", "mdn"))
    drawn = drawing("loss", (a.title, b.title), pairs(a, b))
    assert drawn is not None
    losses, gap = drawn.readings.panels
    assert {series.label for series in losses.series} == {
        "smoke/gdn",
        "smoke/mdn",
        "smoke/gdn, validation",
        "smoke/mdn, validation",
    }
    at = {series.label: dict(zip(series.xs, series.ys, strict=True)) for series in losses.series}
    (line,) = gap.series
    for x, y in zip(line.xs, line.ys, strict=True):
        assert y == pytest.approx(at["smoke/mdn"][x] - at["smoke/gdn"][x])


def test_a_figure_of_many_runs_has_a_panel_each_and_none_without_logs(runs: Path, tmp_path: Path):
    a = read(runs / "smoke")
    drawn = drawing("loss", ("a", "b"), pairs(a, a))
    assert drawn is not None
    assert [panel.title for panel in drawn.readings.panels] == list(a.runs)
    (runs / "smoke/gdn/log.jsonl").unlink()
    alone = read(runs / "smoke/gdn")
    assert drawing("loss", ("a", "b"), pairs(alone, alone)) is None


@pytest.fixture
def repository(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project at two commits: between them gdn got better, mdn another learning rate, and kda went."""
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "somebody@example.org")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")

    def call(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + done.stdout

    def commit(names: list[str]) -> None:
        outs = [
            str(path.relative_to(tmp_path))
            for name in names
            for kind in ("config.yaml", "manifest.json", "log.jsonl", "metrics.json", "evaluation/*.*")
            for path in (runs / "smoke" / name).glob(kind)
        ]
        stage = {"stages": {"all": {"cmd": "true", "outs": outs}}}
        Path("dvc.yaml").write_text(json.dumps(stage))
        call(sys.executable, "-m", "dvc", "commit", "--force", "--quiet")
        call("git", "add", "params.yaml", "dvc.yaml", "dvc.lock")
        call("git", "commit", "-qm", "runs")

    for scale in [path for path in runs.iterdir() if path.name != "smoke"]:
        shutil.rmtree(scale)
    failed = runs / "smoke/mdn-no-momentum/evaluation/lm.json"
    failed.parent.mkdir()
    failed.write_text(json.dumps({"suite": "lm", "failed": "training failed: loss is <nan>"}))
    text = (ROOT / "params.yaml").read_text().replace("uri: sqlite:///mlflow.db", "uri: null")
    Path("params.yaml").write_text(text)
    call("git", "init", "-q")
    call(sys.executable, "-m", "dvc", "init", "--quiet")
    commit(["gdn", "mdn", "kda", "mdn-no-momentum"])
    shift(runs / "smoke/gdn", 0.16)
    config = runs / "smoke/mdn/config.yaml"
    config.write_text(config.read_text().replace("lr: 0.003", "lr: 0.001"))
    Path("params.yaml").write_text(
        text.replace("lr: null\n    options: {mdn: {tau", "lr: 1e-3\n    options: {mdn: {tau")
    )
    commit(["gdn", "mdn", "mdn-no-momentum"])
    return tmp_path


@pytest.mark.slow
def test_two_revisions(repository: Path, capsys):
    assert main(["diff", "HEAD~1", "HEAD"]) == 0
    text = capsys.readouterr().out
    assert section(text, "Parameters") == [["models.mdn.lr", "–", "0.001"]]
    assert [row[0] for row in section(text, "Runs")] == ["smoke/kda"]
    assert ["smoke/mdn", "lr", "0.003", "0.001"] in section(text, "Configuration")
    assert {row[0] for row in section(text, "Results")} == {"smoke/gdn"}
    assert "mdn-no-momentum of HEAD~1 failed: `loss is <nan>`" in text

    # against the runs as they are now, written with its figure
    shift(repository / "runs/smoke/mdn", 0.16)
    assert main(["diff", "HEAD", "--out", "made"]) == 0
    text = Path("made/diff.md").read_text()
    assert text.startswith("# HEAD against now\n")
    assert {row[0] for row in section(text, "Results")} == {"smoke/mdn"}
    assert "](loss.svg)" in text
    assert Path("made/loss.png").exists()


@pytest.mark.slow
def test_revisions_that_cannot_be_read_say_why(repository: Path, capsys):
    assert main(["diff", "nowhere", "HEAD"]) == 2
    assert "nowhere: neither a run folder nor a revision that can be read" in capsys.readouterr().err
    shutil.rmtree(repository / ".dvc/cache")
    shutil.rmtree(repository / "runs")
    assert main(["diff", "HEAD", "HEAD~1"]) == 2
    error = capsys.readouterr().err
    assert "HEAD: no run folder of it is in DVC's cache" in error
    assert error.count("\n") == 1
