"""One table with the scales side by side: the columns that say most of a model, at every scale."""

from mdn.reports.frame import NOT_RUN, SCHEMA
from mdn.reports.layout import LAMBADA_PPL, LM_AVERAGE, RETRIEVAL_AVERAGE, Column, Table
from mdn.reports.tables import Cell, Grid, best_of, printed

COLUMNS = (LAMBADA_PPL, LM_AVERAGE, RETRIEVAL_AVERAGE)


def across(grids: list[Grid]) -> Grid | None:
    """A row for each model with a value of ours in any of `grids`, published ones beside it; None without."""
    titles: dict[str, str] = {}
    scales: dict[str, str] = {}
    shown: set[tuple[str, str]] = set()  # columns with a number, ours or the paper's
    found: dict[tuple[str, str, str], Cell] = {}
    for grid in grids:
        for name, (title, cells) in zip(grid.table.rows, grid.rows, strict=True):
            for column, cell in zip(grid.table.columns, cells, strict=True):
                if column in COLUMNS:
                    scales[grid.scale] = grid.scale_title
                    found.setdefault((grid.scale, name, column.key), cell)
                    if cell.ok or cell.published:
                        shown.add((grid.scale, column.key))
                    if cell.ok:
                        titles[name] = title
    if not titles:
        return None
    heads, columns = [], []
    for scale, title in scales.items():
        for column in COLUMNS:
            if (scale, column.key) in shown:
                heads.append((scale, column.key))
                columns.append(Column(f"{scale}_{column.key}", f"{title} {column.title}", unit=column.unit))
    lines = {
        name: [
            found[scale, name, key].row if (scale, name, key) in found else _absent(title)
            for scale, key in heads
        ]
        for name, title in titles.items()
    }
    tops = [best_of(column, [line[n] for line in lines.values()]) for n, column in enumerate(columns)]
    rows = [
        (
            titles[name],
            [Cell(row, printed(row) == top is not None) for row, top in zip(line, tops, strict=True)],
        )
        for name, line in lines.items()
    ]
    return Grid(
        Table("scales", "Scales side by side", tuple(lines), tuple(columns)), "all", "every", True, rows
    )


def _absent(title: str) -> dict[str, object]:
    """A cell of a model without this column at this scale."""
    told = {"title": title, "status": NOT_RUN, "note": "in no table of this scale"}
    return dict.fromkeys(SCHEMA) | told | {"row": "", "scale": "", "column": ""}
