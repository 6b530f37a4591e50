"""Stage render: tables, figures and reports/index.html from the run folders; all of it to MLflow, too."""

import argparse
import sys
from pathlib import Path

from mdn.config import load
from mdn.reports.notes import notes
from mdn.reports.render import read_grids, render
from mdn.tracking.mlflow import artifact_page, attach, describe, sync_all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=Path("reports"))
    arguments = parser.parse_args()
    try:
        params = load(arguments.params)
        print(render(params, arguments.runs, arguments.out, arguments.results))
    except ValueError as error:
        sys.exit(f"render_reports: {error}")
    if uri := params.tracking.uri:
        sync_all(arguments.runs, uri)
        written = [path for path in sorted(arguments.out.rglob("*")) if path.is_file()]
        run = attach(arguments.out, uri, written)
        page = artifact_page(uri, run, "index.html") if run else None
        describe(arguments.runs, uri, notes(read_grids(params, arguments.runs), page))


if __name__ == "__main__":
    main()
