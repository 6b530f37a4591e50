import json
from pathlib import Path

import pytest

from mdn.cli import main
from mdn.config import Params
from mdn.reports.diff import diff, read


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
    a, b, gap, errors = rows["piqa", "acc"]
    assert (a, b, gap) == ("0.28 ± 0.04 (n = 40)", "0.33 ± 0.04 (n = 40)", "+0.05")
    assert errors == "+0.88"  # 0.05 / (0.04 √2)
    assert rows["heldout_wiki", "perplexity"][-1] == "–"  # no standard error there


def test_the_log_is_compared_at_steps_that_both_have(runs: Path):
    rows = section(diff(read(runs / "smoke/gdn"), read(runs / "smoke/mdn")), "Log: train/loss")
    steps = [int(row[0]) for row in rows]
    assert (steps[0], steps[-1]) == (1, 60)
    assert 5 not in steps  # not finite there
    for _, a, b, gap in rows:
        assert float(gap) == pytest.approx(float(b) - float(a), abs=2e-4)


def test_a_run_is_the_same_as_itself(runs: Path):
    text = diff(read(runs / "smoke/mdn"), read(runs / "smoke/mdn"))
    assert text.count("the same") == 2
    assert all(row[4] == "+0.00" for row in section(text, "Results"))


def test_a_failed_run_says_why(runs: Path):
    text = diff(read(runs / "smoke/mdn"), read(runs / "smoke/mdn-no-momentum"))
    assert "smoke/mdn-no-momentum failed: loss is <nan> & not finite" in text
    assert "no metric that both have" in text


def test_the_command_prints_it_and_names_a_missing_run(runs: Path, params: Params, capsys):
    assert main(["diff", str(runs / "smoke/gdn"), str(runs / "smoke/mdn")]) == 0
    assert capsys.readouterr().out.startswith("# smoke/gdn against smoke/mdn\n")
    assert main(["diff", str(runs / "smoke/gdn"), str(runs / "smoke/none")]) == 2
    assert "no run there" in capsys.readouterr().err


def test_an_archived_run_can_be_compared(runs: Path):
    place = runs / ".archive/smoke/gdn/abc"
    place.parent.mkdir(parents=True)
    (runs / "smoke/gdn").rename(place)
    config = json.loads((place / "manifest.json").read_text())
    assert config["fingerprint"]
    assert "gdn" in diff(read(place), read(runs / "smoke/mdn"))
