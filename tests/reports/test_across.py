from pathlib import Path

from mdn.config import Params
from mdn.reports.across import across
from mdn.reports.render import read_grids


def test_a_row_has_the_same_cells_as_in_the_tables_of_its_scales(params: Params, made: Path):
    grids = read_grids(params, made)
    table = across(grids)
    assert table is not None
    keys = [column.key for column in table.table.columns]
    assert keys[:2] == ["smoke_lambada_ppl", "smoke_lm_average"]
    assert keys[-3:] == ["1b3_lambada_ppl", "1b3_lm_average", "1b3_retrieval_average"]
    cells = dict(zip(keys, dict(zip(table.table.rows, table.rows, strict=True))["mdn"][1], strict=True))
    own = next(grid for grid in grids if grid.name == "table2-400m")
    at = [column.key for column in own.table.columns].index("lm_average")
    assert cells["400m_lm_average"].row == dict(own.rows)["MDN"][at].row
    assert (cells["400m_lm_average"].value, cells["400m_lm_average"].gap) == ("49.40", "−0.02")
    assert (cells["1b3_lm_average"].value, cells["1b3_lm_average"].published) == ("not run", "58.82")


def test_only_models_with_a_value_of_ours_have_a_row(params: Params, made: Path, tmp_path: Path):
    table = across(read_grids(params, made))
    assert table is not None
    assert "mdn-no-momentum" not in table.table.rows  # failed
    assert "mdn-mu-1" not in table.table.rows  # the paper's only
    assert "mdn-tau-d" in table.table.rows  # ours only
    assert across(read_grids(params, tmp_path)) is None


def test_an_empty_cell_says_why(params: Params, made: Path):
    table = across(read_grids(params, made))
    assert table is not None
    rows = {name: cells for name, (_, cells) in zip(table.table.rows, table.rows, strict=True)}
    keys = [column.key for column in table.table.columns]
    notes = {key: cell.row["note"] for key, cell in zip(keys, rows["mdn-no-correction"], strict=True)}
    assert notes["400m_lm_average"] == "not listed in runs.400m"
    assert notes["1b3_lm_average"] == "in no table of this scale"
    assert all(cell.ok or cell.row["note"] for cells in rows.values() for cell in cells)


def test_a_cell_that_was_not_evaluated_keeps_its_own_reason(params: Params, runs: Path):
    (runs / "smoke/mdn-tau-d/evaluation/commonsense.json").unlink()
    table = across(read_grids(params, runs))
    assert table is not None
    cells = dict(zip(table.table.rows, table.rows, strict=True))["mdn-tau-d"][1]
    found = {cell.row["column"]: cell for cell in cells}["lm_average"]
    assert found.row["status"] == "missing"
    assert "without a value: HellaSwag" in found.row["note"]
    assert found.row["command"] == "dvc repro evaluate-smoke@mdn-tau-d-commonsense"


def test_the_best_is_that_of_the_column(params: Params, made: Path):
    table = across(read_grids(params, made))
    assert table is not None
    best = [{title for title, cells in table.rows if cells[n].best} for n in range(2)]
    assert best == [{"MDN"}, {"MDN"}]
