"""`python -m mdn.efficiency plan | run`: what is measured at a scale as JSON, and all of it on this machine.

`plan` reads params.yaml. `run` needs Python, NumPy and torch, on a GPU also Triton, and FLA for its kernels;
what cannot run is recorded as failed. From a checkout: PYTHONPATH=src:kernels python -m mdn.efficiency run
plan.json
"""

import argparse
import sys
from pathlib import Path

from mdn.efficiency import cells


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mdn.efficiency", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("plan", help="write what is measured at a scale of params.yaml as JSON")
    command.add_argument("--scale", required=True)
    command.add_argument(
        "--models", nargs="+", default=cells.MODELS, help="model or model:kernel; %(default)s"
    )
    command.add_argument("--kinds", nargs="+", help=f"of {', '.join(cells.KINDS)}")
    command.add_argument("--params", type=Path, default=Path("params.yaml"), help="default: %(default)s")
    command.set_defaults(run=_plan)

    command = commands.add_parser("run", help="measure; what is measured already is kept")
    command.add_argument("plan", type=Path, help="what `plan` wrote; - for standard input")
    command.add_argument("--deadline-s", type=float, help="be done after so many seconds")
    command.add_argument("--warm", action="store_true", help="compile all kernels first, on all cores")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="default: %(default)s")
    command.set_defaults(run=_run)

    command = commands.add_parser("work", help="the process in which `run` measures")
    command.add_argument("plan", type=Path)
    command.add_argument("at", type=Path)
    command.add_argument("deadline", type=float)
    command.add_argument("--runs", type=Path, required=True)
    command.set_defaults(run=_work)

    command = commands.add_parser("warm", help="compile the n-th of `count` shares of the kernels")
    command.add_argument("plan", type=Path)
    command.add_argument("n", type=int)
    command.add_argument("count", type=int)
    command.set_defaults(run=_warm)

    options = parser.parse_args()
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"mdn.efficiency: {error}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    from mdn.config import load

    sys.stdout.write(
        cells.to_json(cells.plan(load(options.params), options.scale, options.models, options.kinds))
    )
    return 0


def _run(options: argparse.Namespace) -> int:
    from mdn.efficiency.runner import run
    from mdn.training.launch import unwind

    unwind()
    from_input = str(options.plan) == "-"
    plan = cells.from_json(sys.stdin.read()) if from_input else cells.read(options.plan)
    outcomes = run(plan, runs=options.runs, deadline_s=options.deadline_s, warm=options.warm)
    print("cells: " + ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())))
    return int(outcomes["failed"] > 0)


def _work(options: argparse.Namespace) -> int:
    from mdn.efficiency.work import work  # imports torch

    work(cells.read(options.plan), runs=options.runs, at=options.at, deadline=options.deadline)
    return 0


def _warm(options: argparse.Namespace) -> int:
    from mdn.efficiency.warm import compile_share

    compile_share(cells.read(options.plan), options.n, options.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
