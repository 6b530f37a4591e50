"""Stage train: one cell, from params.yaml and tokens to runs/<scale>/<model>.

Exit status 75: it was told to stop (SIGTERM, SIGUSR1) and saved its step; started again it resumes.
"""

import argparse
import faulthandler
import sys
from pathlib import Path

from mdn.config import ConfigError, load
from mdn.training import launch


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
        outside = launch.outside(machine)
        if not outside:
            launch.enter(machine)

        from mdn.training.train import adopted, train  # after the checks: Lightning takes seconds

        if outside:
            if adopted(run, runs=arguments.runs, tokens=arguments.tokens):
                print(f"{arguments.runs / run.scale / run.name}: finished; adopted")
                return
            sys.exit(launch.start(machine))
    except ConfigError as error:
        sys.exit(f"{arguments.params}: {error}")
    train(run, machine, runs=arguments.runs, tokens=arguments.tokens, uri=params.tracking.uri, stop=stop)


if __name__ == "__main__":
    main()
