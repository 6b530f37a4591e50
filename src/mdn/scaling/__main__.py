"""`python -m mdn.scaling plan | run`: cells as JSON, and all of them on the devices of this machine.

`plan` reads params.yaml. `run` needs what a training needs (torch, on a GPU Triton, Lightning, safetensors,
rich) and no OmegaConf, and starts the ranks itself:
PYTHONPATH=src:kernels python -m mdn.scaling run cells.json
"""

import argparse
import sys
from pathlib import Path

from mdn.scaling import cells


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mdn.scaling", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("plan", help="write cells as JSON, the most telling first")
    command.add_argument("--scales", nargs="+", default=cells.SCALES)
    command.add_argument("--models", nargs="+", default=cells.MODELS)
    command.add_argument("--devices", nargs="+", type=int, default=cells.DEVICES)
    command.add_argument("--sequences", type=int, default=4, help="a device, in weak scaling; default: 4")
    command.add_argument("--data", help="token set, if not the scale's")
    command.add_argument("--cell", action="append", help="only this one, by name (may be given again)")
    command.add_argument("--params", type=Path, default=Path("params.yaml"), help="default: %(default)s")
    command.set_defaults(run=_plan)

    command = commands.add_parser("run", help="measure cells; finished ones are kept")
    command.add_argument("cells", type=Path, help="what `plan` wrote; - for standard input")
    command.add_argument("--deadline-s", type=float, help="be done after so many seconds")
    command.set_defaults(run=_run)

    command = commands.add_parser("cell", help="the n-th of the cells, as `run` does")
    command.add_argument("cells", type=Path)
    command.add_argument("n", type=int)
    command.set_defaults(run=_cell)

    for command in (commands.choices["run"], commands.choices["cell"]):
        command.add_argument("--runs", type=Path, default=Path("runs"), help="default: %(default)s")
        command.add_argument("--tokens", type=Path, default=Path("data/tokens"), help="default: %(default)s")

    options = parser.parse_args()
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"mdn.scaling: {error}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    from mdn.config import load

    planned = cells.plan(
        load(options.params),
        options.scales,
        options.models,
        options.devices,
        options.sequences,
        options.data,
    )
    for name in options.cell or ():
        if name not in (cell.name for cell in planned):
            raise ValueError(f"--cell: {name!r} is none of {', '.join(cell.name for cell in planned)}")
    sys.stdout.write(cells.to_json([c for c in planned if not options.cell or c.name in options.cell]))
    return 0


def _run(options: argparse.Namespace) -> int:
    import torch

    from mdn.scaling.runner import run
    from mdn.training.launch import unwind

    unwind()
    from_input = str(options.cells) == "-"
    outcomes = run(
        cells.from_json(sys.stdin.read()) if from_input else cells.read(options.cells),
        runs=options.runs,
        tokens=options.tokens,
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else None,
        deadline_s=options.deadline_s,
    )
    print("cells: " + ", ".join(f"{count} {name}" for name, count in outcomes.items()))
    return int(outcomes["failed"] > 0)


def _cell(options: argparse.Namespace) -> int:
    from mdn.training import launch

    cell = cells.read(options.cells)[options.n]
    if launch.outside(cell.machine):
        return launch.start(cell.machine, launch.StopRequest())
    launch.enter(cell.machine)

    from mdn.scaling.measure import measure  # imports Lightning, which takes seconds

    measure(cell, runs=options.runs, tokens=options.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
