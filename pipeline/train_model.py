"""Stage train: one cell, from params.yaml and tokens to runs/<scale>/<model>."""

import argparse
import sys
from pathlib import Path

from mdn.config import ConfigError, load


def main() -> None:
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
    except ConfigError as error:
        sys.exit(f"{arguments.params}: {error}")

    from mdn.training.train import train  # after the checks: it imports Lightning, which takes seconds

    machine = params.scales[arguments.scale].machine
    train(run, machine, runs=arguments.runs, tokens=arguments.tokens, uri=params.tracking.uri)


if __name__ == "__main__":
    main()
