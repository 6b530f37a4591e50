"""Table 1 in every form."""

import re
from pathlib import Path

import pytest

from mdn.config import Params
from mdn.options import Options
from mdn.reports.rules import formula, latex, markdown, rows
from mdn.rules import RULES


def test_every_mixer_has_a_rule():
    assert RULES.keys() == vars(Options()).keys()


def test_every_system_of_the_paper_is_a_row_with_its_state_at_the_papers_scales(params: Params):
    found = {row.system: row for row in rows(params)}
    assert [*found] == ["transformer", "mamba2", "gdn", "comba", "kda", "mdn"]
    assert found["gdn"].sizes == ["4.129M", "16.52M"]  # 21 · 6 · 128 · 256, 21 · 6 · 256 · 512
    assert found["mdn"].sizes == ["8.258M", "33.03M"]
    assert found["transformer"].sizes == ["201.3M", "402.7M"]  # 24 · 2 · 1024 · 4096
    assert [row.rule.state for row in found.values()] == ["2dT", "HKV", "HKV", "HKV", "HKV", "2HKV"]


def test_markdown_has_a_line_a_system_with_as_many_cells_as_heads(params: Params):
    table = [line for line in markdown(params).splitlines() if line.startswith("|")]
    assert len(table) == 2 + 6
    assert {line.count("|") for line in table} == {8}
    assert all(line.count("$`") == line.count("`$") >= 4 for line in table[2:])


def test_latex_has_a_line_a_system_with_as_many_cells_as_heads(params: Params):
    text = latex(params)
    body = text[text.index("\\midrule") : text.index("\\bottomrule")].splitlines()[1:]
    assert [line.split(" & ")[0] for line in body] == ["Transformer", "Mamba2", "GDN", "Comba", "KDA", "MDN"]
    assert {line.count(" & ") for line in body} == {6}
    assert text.count("{") == text.count("}")
    assert text.isascii()


@pytest.mark.parametrize("name", RULES)
def test_every_formula_can_be_drawn(name):
    rule = RULES[name]
    for line in (*rule.update, rule.gates, *rule.transition, rule.state):
        svg = formula(line)
        assert svg.startswith("<svg")
        left, _, width, height = map(float, re.search(r'viewBox="([^"]+)"', svg)[1].split())
        assert 5 < width < 200
        assert 3 < height < 20
        numbers = [float(x) for x in re.findall(r"-?\d+\.?\d*", re.search(r' d="([^"]+)"', svg)[1])]
        assert max(numbers) <= left + width + 0.02


def test_a_formula_tells_its_source_to_a_screen_reader():
    assert 'aria-label="S_t &lt; 1"' in formula("S_t < 1")


def test_the_page_and_the_files_have_the_table(rendered: Path):
    page = (rendered / "index.html").read_text()
    article = page[page.index('id="table1"') :]
    article = article[: article.index("</article>")]
    assert article.count('<svg class="formula"') == 6 * 4 + 2  # MDN has two lines twice
    assert "8.258M" in article
    assert (rendered / "tables" / "table1.md").exists()
    assert "\\end{table}" in (rendered / "tables" / "table1.tex").read_text()
