import re
from pathlib import Path

import polars as pl
import pytest

from mdn.config import Params
from mdn.reports.frame import frame, layout
from mdn.reports.runs import read_runs
from mdn.reports.tables import Grid, error, grids, latex, markdown, number, signed, tex


def formatted(params: Params, root: Path) -> dict[str, Grid]:
    runs = read_runs(params, root)
    return {grid.name: grid for grid in grids(frame(params, runs), layout(params, runs), params.scales)}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.125, "0.13"),
        (0.135, "0.14"),
        (2.675, "2.68"),
        (-0.125, "-0.13"),
        (12.5, "12.50"),
        (0.0, "0.00"),
        (0.005, "0.01"),
        (0.0012, "1.2e-3"),
        (999.994, "999.99"),
        (-1000.5, "-1001"),
        (235298.16, "235298"),
        (1234567.0, "1.23e6"),
        (8.9e14, "8.90e14"),
    ],
)
def test_numbers_keep_what_can_be_read_and_never_vanish(value, text):
    assert number(value) == text


def test_differences_carry_their_sign():
    assert (signed(0.08), signed(-13.484), signed(0.0)) == ("+0.08", "−13.48", "+0.00")


@pytest.mark.parametrize(
    ("stderr", "value", "text"),
    [
        (830.52, 9524.0, "831"),
        (1017.3, 6691.0, "1017"),
        (0.0, 12.5, "0.00"),
        (0.3, 1234.0, "0.30"),
        (7.774, 16.67, "7.77"),
        (1e-3, 0.0, "1.0e-3"),
        (2e6, 3e6, "2.00e6"),
    ],
)
def test_an_error_has_no_more_digits_than_its_value(stderr, value, text):
    assert error(stderr, value) == text


def test_markdown_lets_no_tag_of_html_through(params: Params, runs: Path):
    text = markdown(formatted(params, runs)["table4-ablations-smoke"])
    assert "training failed at step 17: loss is &lt;nan> & not finite" in text
    assert "<" not in text


def test_notes_name_where_the_papers_values_stand(params: Params, runs: Path):
    found = formatted(params, runs)
    assert "paper: Table 2, PDF p. 8" in found["table2-400m"].notes()
    assert "paper: Table 4, PDF p. 9; Table 6, PDF p. 25" in found["table4-ablations-400m"].notes()
    assert any("13.40, 11.45 and 8.95 above the best other" in note for note in found["niah-1b3"].notes())
    assert not any(note.startswith("paper") for note in found["table2-smoke"].notes())


def test_table_3_names_the_window_where_it_is_not_the_papers(params: Params, runs: Path):
    found = formatted(params, runs)
    assert found["table3-1b3"].table.title == "Table 3: LongBench at 16K"
    window = params.scales["smoke"].evaluation.longbench_window
    assert found["table3-smoke"].table.title == f"Table 3: LongBench in windows of {window} tokens"


def test_best_follows_the_direction_of_its_column(params: Params, runs: Path):
    grid = formatted(params, runs)["table2-smoke"]
    keys = [column.key for column in grid.table.columns]
    best = {key: [title for title, cells in grid.rows if cells[n].best] for n, key in enumerate(keys)}
    assert best["heldout_wiki"] == best["lambada_ppl"] == best["hellaswag"] == best["lm_average"] == ["MDN"]
    assert best["wikitext_ppl"] == best["retrieval_average"] == []
    worst = [title for title, cells in grid.rows if cells[keys.index("lambada_ppl")].value == "55.60"]
    assert worst == ["KDA"]


def test_nothing_is_the_best_of_one_or_of_equals_and_equals_share_it(params: Params, runs: Path, add_run):
    def best() -> list[str]:
        grid = formatted(params, runs)["table2-400m"]
        at = [column.key for column in grid.table.columns].index("piqa")
        return [title for title, cells in grid.rows if cells[at].best]

    hybrids = formatted(params, runs)["table4-hybrids-smoke"]
    assert not any(cell.best for _, cells in hybrids.rows for cell in cells)
    assert best() == []
    add_run("400m", "kda", 0.4)
    assert best() == ["GDN", "MDN"]


def test_gap_is_ours_minus_the_papers(params: Params, runs: Path):
    grid = formatted(params, runs)["table2-400m"]
    at = [column.key for column in grid.table.columns].index("lm_average")
    cells = dict(grid.rows)["MDN"]
    assert (cells[at].value, cells[at].published, cells[at].gap) == ("49.40", "49.42", "−0.02")
    assert dict(grid.rows)["KDA"][at].gap == ""


def test_markdown_shows_every_kind_of_cell(params: Params, runs: Path):
    found = formatted(params, runs)
    text = markdown(found["table4-ablations-smoke"])
    line = next(line for line in text.splitlines() if line.startswith("| MDN |"))
    assert "**32.50** ± 4.00" in line
    assert "HellaSwag acc_n ↑ (n = 40)" in text
    assert "- failed (w/o momentum (GDN with gate bounds)): training failed at step 17" in text
    assert "Not comparable with the paper: Smoke is not one of its scales." in text
    assert "NaN" not in text
    text = markdown(found["table4-ablations-400m"])
    assert "NaN at step 70" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


@pytest.mark.parametrize(
    ("plain", "source"),
    [
        ("τ = √(d/8)", r"$\tau$ = $\surd$(d/8)"),
        ("log μ ≥ −1.5", r"log $\mu$ $\geq$ $-$1.5"),
        ("α_max = 1", r"$\alpha$\_max = 1"),
        (
            "a_b & 50% #1 {x} ~ ^ \\ <y> $",
            r"a\_b \& 50\% \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} $<$y$>$ \$",
        ),
        ("naïve 模", "naive ?"),
    ],
)
def test_latex_escapes_text(plain, source):
    assert tex(plain) == source


def test_latex_is_ascii_balanced_and_even(params: Params, runs: Path):
    for grid in formatted(params, runs).values():
        text = latex(grid)
        assert text.isascii()
        opened, closed = re.findall(r"\\begin\{(\w+)\}", text), re.findall(r"\\end\{(\w+)\}", text)
        assert opened == closed[::-1] == ["table", "tabular"]
        bare = re.sub(r"\\[{}$]", "", text)
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        body = text[text.index(r"\midrule") + 8 : text.index(r"\bottomrule")].strip().splitlines()
        for line in body:
            assert line.endswith(r" \\")
            spans = re.search(r"\\multicolumn\{(\d+)\}", line)
            ampersands = len(re.findall(r"(?<!\\)&", line)) + (int(spans[1]) - 1 if spans else 0)
            assert ampersands == len(grid.table.columns)


def test_csv_holds_value_error_items_published_gap_and_status(rendered: Path):
    table = pl.read_csv(rendered / "tables" / "table2-400m.csv")
    mdn = table.filter(pl.col("row") == "mdn").to_dicts()[0]
    assert (mdn["lm_average_value"], mdn["lm_average_published"], mdn["lm_average_gap"]) == (
        49.4,
        49.42,
        -0.02,
    )
    assert (mdn["wikitext_ppl_value"], mdn["wikitext_ppl_status"]) == (None, "not run")


def test_notes_tell_windows_cut_prompts_and_what_stand_ins_are(params: Params, runs: Path):
    notes = formatted(params, runs)["standins-smoke"].notes()
    code, qasper = "Standard library", "Qasper yes/no F1"
    assert any(note.startswith("SQuAD questions: 1000 real items of SQuAD") for note in notes)
    windows = f"256 (SQuAD questions, DROP questions, Held-out numbers); 512 ({qasper}, {code})"
    assert f"window, tokens: {windows}" in notes
    assert f"cut to fit into it: {qasper} 3 of 8; {code} 3 of 8" in notes
    notes = formatted(params, runs)["table2-smoke"].notes()
    assert "window, tokens: 1024" in notes
    assert not any(note.startswith("cut") for note in notes)
