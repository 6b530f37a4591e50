"""Stage `bench@kernels`: errors of the operator's versions, measured here, and the timings of
benchmarks/results, to reports/kernels.md and reports/kernels."""

import argparse
import sys
from pathlib import Path

import torch

from mdn.reports.kernels import report, timings
from mdn.tracking.record import write_json
from mdn_kernels.accuracy import measure, runnable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="of mdn_kernels.bench"
    )
    parser.add_argument("--out", type=Path, default=Path("reports"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        record = {"accuracy": measure(runnable(device), device), "timings": timings(arguments.results)}
    except ValueError as error:
        sys.exit(f"bench_kernels: {error}")
    made, folder = report(record), arguments.out / "kernels"
    write_json(folder / "record.json", record)
    for drawing in made.drawings:
        drawing.write(folder)
    (arguments.out / "kernels.md").write_text(made.markdown())
    print(arguments.out / "kernels.md")


if __name__ == "__main__":
    main()
