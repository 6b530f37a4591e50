"""Stage evaluate: one suite on one trained model, to runs/<scale>/<model>/evaluation/<suite>.json."""

import argparse
import os
import sys
from pathlib import Path

from mdn.config import SUITES, ConfigError, load
from mdn.tracking.record import Record, read_json

# The mixers' gates are at most 1 by construction; looking at them would wait for the device in every layer.
os.environ.setdefault("MDN_CHECK_GATES", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--suite", required=True, choices=SUITES)
    parser.add_argument("--params", type=Path, default="params.yaml")
    parser.add_argument("--runs", type=Path, default="runs")
    parser.add_argument("--raw", type=Path, default="data/raw")
    parser.add_argument("--tokens", type=Path, default="data/tokens")
    arguments = parser.parse_args()
    try:
        params = load(arguments.params)
        params.run(arguments.scale, arguments.model)
    except ConfigError as error:
        sys.exit(f"{arguments.params}: {error}")
    record = Record(arguments.runs / arguments.scale / arguments.model)
    failed = record.folder / "failed.json"
    if not record.weights.exists() and not failed.exists():
        sys.exit(f"{record.weights}: not found; train {arguments.model} at {arguments.scale} first")

    # After the checks: these take seconds to import.
    from mdn.evaluation.suites.run import Cell, run_suite, write_failed

    if failed.exists():  # diverged: its weights are the last finite ones, and no model to judge
        write_failed(record, arguments.suite, f"training failed: {read_json(failed)['error']}")
        return

    import torch

    from mdn.data import gpt2
    from mdn.data.tokenization import tokenizer
    from mdn.evaluation.progress import bars
    from mdn.models.lm import load as load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        cell = Cell(
            record,
            load_model(record.folder, device),
            tokenizer(arguments.raw / gpt2.FOLDER),
            params.scales[arguments.scale].evaluation,
            arguments.raw,
            arguments.tokens / record.config.data,
        )
        with bars() as show:
            print(run_suite(cell, arguments.suite, show))
    except (ValueError, OSError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
