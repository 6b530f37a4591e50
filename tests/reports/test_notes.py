from pathlib import Path

from mdn.config import Params
from mdn.reports.frame import AGAIN
from mdn.reports.notes import notes
from mdn.reports.render import read_grids


def test_a_run_is_described_by_its_cells(params: Params, made: Path):
    found = notes(read_grids(params, made), "#/the/page")
    assert "smoke/mdn-h-3to1" not in found  # never trained
    text = found["400m/mdn"]
    assert text.startswith(f"MDN at 400M scale. `{AGAIN} train-400m@mdn` trains it again")
    assert "**[Table 2: main results (400M scale)](#/the/page)** (reports/index.html#table2-400m)" in text
    assert "| LM average ↑ | 49.40 ± 1.41 | 49.42 |" in text
    assert "| WikiText ppl ↓ | not run | 31.51 |" in text
    assert "](#/" not in notes(read_grids(params, made))["400m/mdn"]
