"""Stage train: one cell, from params.yaml and tokens to runs/<scale>/<model>.

Exit status 75: it was told to stop (SIGTERM, SIGUSR1) and saved its step; started again it resumes.
"""

import argparse
import faulthandler
import os
import sys
from pathlib import Path

from mdn.config import ConfigError, RunConfig, load
from mdn.files import Busy
from mdn.tracking.record import Record
from mdn.training import launch

# The mixers' gates are at most 1 by construction; looking at them would wait for the device in every layer.
os.environ.setdefault("MDN_CHECK_GATES", "0")


def main() -> None:
    faulthandler.enable()  # says where it was if a shard vanishes under its memory map (SIGBUS)
    stop = launch.StopRequest()
    stop.listen()  # first of all: a signal must not end what has just begun
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--params", type=Path, default="params.yaml")
    parser.add_argument("--runs", type=Path, default="runs")
    parser.add_argument("--tokens", type=Path, default="data/tokens")
    arguments = parser.parse_args()
    try:
        params = load(arguments.params)
        run = params.run(arguments.scale, arguments.model)
        machine = params.scales[arguments.scale].machine
        if launch.outside(machine):
            if _adopts(run, arguments):
                print(f"{arguments.runs / run.scale / run.name}: finished; adopted")
                return
            sys.exit(launch.start(machine, stop))
        launch.enter(machine)
    except ConfigError as error:
        sys.exit(f"{arguments.params}: {error}")

    from mdn.training.train import train  # after the checks: it imports Lightning, which takes seconds

    try:
        train(run, machine, runs=arguments.runs, tokens=arguments.tokens, uri=params.tracking.uri, stop=stop)
    except (ConfigError, FileNotFoundError, Busy) as error:  # no such kernel, no tokens yet, it is under way
        sys.exit(f"{run.scale}/{run.name}: {error}")


def _adopts(run: RunConfig, arguments: argparse.Namespace) -> bool:
    if not Record(arguments.runs / run.scale / run.name).finished:
        return False
    from mdn.training.train import adopted

    return adopted(run, runs=arguments.runs, tokens=arguments.tokens)


if __name__ == "__main__":
    main()
