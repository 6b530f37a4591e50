"""Stage `render`: tables, figures and reports/index.html from the run folders."""

import argparse
import sys
from pathlib import Path

from mdn.config import load
from mdn.reports.render import render


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("reports"))
    arguments = parser.parse_args()
    try:
        print(render(load(arguments.params), arguments.runs, arguments.out))
    except ValueError as error:
        sys.exit(f"render_reports: {error}")


if __name__ == "__main__":
    main()
