"""`python -m mdn.mqar plan | run`: the cells of a scale as JSON, and all of them on this machine's device.

`plan` reads params.yaml. `run` needs Python, NumPy and torch (on a GPU also Triton) and nothing else, so that
a machine which has only those can train from a checkout: PYTHONPATH=src:kernels python -m mdn.mqar run
cells.json
"""

import argparse
import sys
from pathlib import Path

from mdn.mqar import cells


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mdn.mqar", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("plan", help="write the cells of a scale of params.yaml as JSON")
    command.add_argument("--scale", required=True, help="of mqar.scales")
    command.add_argument("--models", nargs="+", help="in this order; default: those of mqar.runs.<scale>")
    command.add_argument("--cell", action="append", help="only this one, by name (may be given again)")
    command.add_argument("--params", type=Path, default=Path("params.yaml"), help="default: %(default)s")
    command.set_defaults(run=_plan)

    command = commands.add_parser("run", help="train and test cells; finished ones are kept, cut ones go on")
    command.add_argument("cells", type=Path, help="what `plan` wrote; - for standard input")
    command.add_argument("--workers", type=int, default=1, help="processes at a time, default: %(default)s")
    command.add_argument("--deadline-s", type=float, help="be done after so many seconds")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="default: %(default)s")
    command.add_argument("--data", type=Path, default=Path("data/mqar"), help="default: %(default)s")
    command.set_defaults(run=_run)

    command = commands.add_parser("cell", help="train and test the n-th of the cells, as `run` does")
    command.add_argument("cells", type=Path)
    command.add_argument("n", type=int)
    command.add_argument("--runs", type=Path, required=True)
    command.add_argument("--data", type=Path, required=True, help="the folder that `run` has made")
    command.add_argument("--deadline", type=float, required=True, help="as time.time() tells it")
    command.set_defaults(run=_cell)

    options = parser.parse_args()
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"mdn.mqar: {error}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    from mdn.config import load

    params = load(options.params)
    models = options.models or list(params.mqar.runs.get(options.scale, {}))
    if options.cell:
        models = options.models or list(dict.fromkeys(name.split("/")[0] for name in options.cell))
    planned = cells.plan(params, options.scale, models)
    if not planned:
        raise ValueError(f"mqar.runs.{options.scale}: lists no model; add some, or name them with --models")
    for name in options.cell or ():
        if name not in (cell.name for cell in planned):
            raise ValueError(f"--cell: {name!r} is none of {', '.join(cell.name for cell in planned)}")
    chosen = [cell for cell in planned if not options.cell or cell.name in options.cell]
    sys.stdout.write(cells.to_json(chosen))
    return 0


def _run(options: argparse.Namespace) -> int:
    from mdn.mqar.runner import run
    from mdn.training.launch import unwind

    unwind()
    from_input = str(options.cells) == "-"
    outcomes = run(
        cells.from_json(sys.stdin.read()) if from_input else cells.read(options.cells),
        runs=options.runs,
        data=options.data,
        workers=options.workers,
        deadline_s=options.deadline_s,
    )
    print("cells: " + ", ".join(f"{count} {name}" for name, count in outcomes.items() if count))
    return int(outcomes["failed"] > 0)


def _cell(options: argparse.Namespace) -> int:
    from mdn.mqar.train import train  # imports torch

    cell = cells.read(options.cells)[options.n]
    train(cell, runs=options.runs, data=options.data, deadline=options.deadline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
