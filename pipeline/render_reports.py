"""Stage render: tables, figures and reports/index.html from the run folders; then all of it to MLflow."""

import argparse
import sys
from pathlib import Path

from mdn.config import load
from mdn.reports.render import render
from mdn.tracking.mlflow import attach, sync_all


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
    if params.tracking.uri:
        sync_all(arguments.runs, params.tracking.uri)
        written = [path for path in sorted(arguments.out.rglob("*")) if path.is_file()]
        attach(arguments.out, params.tracking.uri, written)


if __name__ == "__main__":
    main()
