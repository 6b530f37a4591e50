"""What MLflow shows as the description of a run: its cells in the tables, and where they come from."""

from mdn.reports.frame import AGAIN
from mdn.reports.tables import Grid


def notes(grids: list[Grid], report: str | None = None) -> dict[str, str]:
    """Markdown by run folder, "scale/model", of every run with a value in a table. report: the page's
    address, if it has one."""
    found: dict[str, list[str]] = {}
    for grid in grids:
        for name, (title, cells) in zip(grid.table.rows, grid.rows, strict=True):
            if not any(cell.ok for cell in cells):
                continue
            place = f"reports/index.html#{grid.name}"
            head = f"[{grid.title}]({report})" if report else grid.title
            lines = ["", f"**{head}** ({place})", "", "| | ours | paper |", "| --- | ---: | ---: |"]
            for column, cell in zip(grid.table.columns, cells, strict=True):
                if cell.ok or cell.published:
                    ours = f"{cell.value} {cell.stderr}".strip()
                    lines.append(f"| {column.title} {column.arrow} | {ours} | {cell.published} |")
            start = [
                f"{title} at {grid.scale_title} scale. `{AGAIN} train-{grid.scale}@{name}` trains it again; "
                "the command of each cell is in the report."
            ]
            found.setdefault(f"{grid.scale}/{name}", start).extend(lines)
    return {name: "\n".join(lines) for name, lines in found.items()}
