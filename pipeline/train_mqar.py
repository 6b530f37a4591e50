"""Stage mqar: multi-query associative recall by one model, at every width, learning rate and seed of a
scale, to runs/mqar-<scale>/<model>/<cell>, and what the best learning rates reach to metrics.json beside
them."""

import argparse
import sys
from pathlib import Path

from mdn.config import ConfigError, load
from mdn.files import Busy
from mdn.mqar import cells
from mdn.mqar.data import prepare
from mdn.mqar.runner import run
from mdn.mqar.summary import summary
from mdn.reports.runs import read_run
from mdn.tracking.record import write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--params", type=Path, default="params.yaml")
    parser.add_argument("--runs", type=Path, default="runs")
    parser.add_argument("--data", type=Path, default="data/mqar")
    arguments = parser.parse_args()
    try:
        params = load(arguments.params)
        planned = cells.plan(params, arguments.scale, [arguments.model])
    except ConfigError as error:
        sys.exit(f"{arguments.params}: {error}")
    workers = params.mqar.scales[arguments.scale].workers
    if workers > 1:
        outcomes = run(planned, runs=arguments.runs, data=arguments.data, workers=workers)
        if outcomes["failed"]:
            sys.exit(f"{arguments.model}: {outcomes['failed']} of {len(planned)} cells failed; see above")
    else:
        from mdn.mqar.train import train  # after the checks: it imports torch, which takes seconds

        for cell in planned:
            folder = prepare(cell.data, cell.data_seed, arguments.data)
            try:
                train(cell, runs=arguments.runs, data=folder)
            except Busy as error:
                sys.exit(str(error))
    here = arguments.runs / planned[0].scale / arguments.model
    write_json(here / "cells.json", [cell.name for cell in planned])
    write_json(
        here / "metrics.json", summary(read_run(arguments.runs, cell.scale, cell.name) for cell in planned)
    )


if __name__ == "__main__":
    main()
