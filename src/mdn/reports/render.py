"""Writes everything under reports/ from params.yaml and the run folders."""

import json
from pathlib import Path

from mdn.config import Params
from mdn.files import replacing
from mdn.reports import efficiency, mqar, rules, scaling, site
from mdn.reports.across import across
from mdn.reports.figures import drawings
from mdn.reports.frame import frame, layout
from mdn.reports.kernels import report
from mdn.reports.runs import read_runs
from mdn.reports.tables import Grid, csv, grids, latex, markdown


def read_grids(params: Params, root: Path) -> list[Grid]:
    """The tables of the run folders under `root`."""
    runs = read_runs(params, root)
    return grids(frame(params, runs), layout(params, runs), params.scales)


def render(params: Params, root: Path, out: Path, results: Path | None = None) -> Path:
    """Writes tables/, figures/, cells.csv and index.html; returns the path of index.html.

    root: the run folders. results: run folders of other machines, for what `root` lacks.

    What stage `bench@kernels` left in kernels/ has a section of its own. The same inputs give the same bytes.
    Files in tables/ and figures/ that this render does not write are of an earlier one and are removed.

    Raises:
        ValueError: if a file of a run folder cannot be read; names it.
    """
    runs = read_runs(params, root, results)
    cells = frame(params, runs)
    formatted, drawn = grids(cells, layout(params, runs), params.scales), drawings(params, runs)
    files: dict[Path, bytes] = {Path("cells.csv"): cells.write_csv().encode()}
    files[Path("tables", f"{rules.NAME}.md")] = rules.markdown(params).encode()
    files[Path("tables", f"{rules.NAME}.tex")] = rules.latex(params).encode()
    scales = across(formatted)
    for grid in [*formatted, *filter(None, [scales])]:
        for suffix, write in (("md", markdown), ("tex", latex), ("csv", csv)):
            files[Path("tables", f"{grid.name}.{suffix}")] = write(grid).encode()
    chapters = [module.chapter(params, runs) for module in (mqar, efficiency, scaling)]
    for sheet in (sheet for chapter in chapters for sheet in chapter.sheets):
        for suffix, text in (("md", sheet.markdown()), ("tex", sheet.latex()), ("csv", sheet.csv())):
            files[Path("tables", f"{sheet.name}.{suffix}")] = text.encode()
    for drawing in drawn:
        files |= {Path("figures", name): content for name, content in drawing.files().items()}
    record = out / "kernels" / "record.json"
    kernels = report(json.loads(record.read_text())) if record.exists() else None
    page = site.render(params, runs, formatted, drawn, chapters, scales, kernels)
    files[Path("index.html")] = page.encode()
    for name, content in files.items():
        with replacing(out / name) as temporary:
            temporary.write_bytes(content)
    for folder in ("tables", "figures"):
        for path in sorted((out / folder).glob("*")):
            if path.relative_to(out) not in files:
                path.unlink()
    return out / "index.html"
