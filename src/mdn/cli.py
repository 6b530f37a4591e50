"""The command `mdn`. Each subcommand is one function and imports what it needs itself: `--help` is quick."""

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mdn.config import ConfigError, Params, load

if TYPE_CHECKING:
    from mdn.reports.figures.style import Drawing


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand and returns its exit status: 2 for a mistake in params.yaml or the arguments."""
    parser = argparse.ArgumentParser(
        prog="mdn",
        description="Checks, plans, compares and shows what `dvc repro` trains and evaluates; see README.md.",
    )
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--params", type=Path, default=Path("params.yaml"), help="default: %(default)s")

    command = commands.add_parser(
        "check", parents=[common], help="check params.yaml: one line for the first mistake, and what to write"
    )
    command.set_defaults(run=_check)

    command = commands.add_parser(
        "doctor", help="what this machine can run, and whether its gradients are right"
    )
    command.set_defaults(run=_doctor)

    command = commands.add_parser(
        "plan",
        parents=[common],
        help="parameters, FLOPs, memory, GPU-hours and disk of the models under runs",
    )
    command.add_argument("--scale", action="append", help="of params.yaml, default: all (may be given again)")
    command.add_argument("--nodes", type=_count, help="instead of the scale's machine.nodes")
    command.add_argument(
        "--memory", type=float, default=79.0, help="GiB of a GPU, default: %(default)s (H100)"
    )
    command.add_argument(
        "--throughput", type=float, help="tokens/s of a GPU, default: what the runs at this scale measured"
    )
    command.add_argument("--runs", type=Path, default=Path("runs"), help="default: %(default)s")
    command.add_argument("--results", type=Path, default=Path("results"), help="default: %(default)s")
    command.set_defaults(run=_plan)

    command = commands.add_parser(
        "submit", parents=[common], help="start every missing training as a SLURM job"
    )
    command.add_argument(
        "cells",
        nargs="*",
        metavar="scale/model",
        help="these, even if they are finished; or prepare@<set>: a job array that tokenizes a data set",
    )
    command.add_argument("--tasks", type=_count, help="of the job array, at most as many as groups of files")
    command.add_argument("--print", action="store_true", help="only print the batch scripts")
    command.set_defaults(run=_submit)

    command = commands.add_parser("generate", parents=[common], help="continue a prompt with a trained model")
    command.add_argument("--run", dest="folder", type=Path, required=True, help="for example runs/smoke/mdn")
    command.add_argument("--prompt", required=True, help="the text to continue")
    command.add_argument("--tokens", type=_count, default=64, help="how many to add, default: %(default)s")
    command.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default: the most likely token"
    )
    command.add_argument("--seed", type=int, default=42, help="of the samples, default: %(default)s")
    command.add_argument("--raw", type=Path, default=Path("data/raw"), help="default: %(default)s")
    command.set_defaults(run=_generate)

    command = commands.add_parser(
        "diff",
        parents=[common],
        help="compare runs, revisions or kernel versions",
        description="Compares two runs (runs/smoke/gdn runs/smoke/mdn), two scales (runs/smoke runs/small), "
        "two git revisions (HEAD~1 HEAD; one alone: with the runs as they are now), or two kernel versions "
        "(--kernel v1_logspace v2_segsum).",
    )
    command.add_argument("a", help="a run folder, a folder of runs, or a git revision")
    command.add_argument("b", nargs="?", default="runs", help="likewise, default: the runs as they are now")
    command.add_argument(
        "--kernel", action="store_true", help="a and b are versions of the momentum delta rule"
    )
    command.add_argument("--out", type=Path, help="a folder for diff.md and its figures; goes to MLflow too")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="default: %(default)s")
    command.set_defaults(run=_diff)

    command = commands.add_parser("sync", parents=[common], help="send run folders to MLflow")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="default: %(default)s")
    command.set_defaults(run=_sync)

    command = commands.add_parser("ui", parents=[common], help="show MLflow's pages of this project")
    command.add_argument("--print", action="store_true", help="only print the command")
    command.set_defaults(run=_ui)

    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"mdn: {error}", file=sys.stderr)
        return 2


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} cannot work; use 1 or more")
    return int(text)


def _check(options: argparse.Namespace) -> int:
    params = load(options.params)
    cells = {scale: len(runs) for scale, runs in params.runs.items() if runs}
    chosen = [(scale, name) for scale, runs in params.runs.items() for name in runs]
    chosen = [(scale, name) for scale, name in chosen if params.models[name].kernel != "auto"]
    if chosen:  # the kernels' names are known to torch's side only, which takes a second to import
        import torch

        from mdn.models.lm import LanguageModel

        for scale, name in chosen:
            try:
                with torch.device("meta"):
                    LanguageModel(params.run(scale, name))
            except ConfigError as error:
                raise ConfigError(f"models.{name}.{error}") from None
    print(f"{options.params}: in order; " + ", ".join(f"{n} models at {scale}" for scale, n in cells.items()))
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from mdn_kernels.doctor import examine

    sick = False
    for finding in examine():
        mark = {True: "ok  ", False: "BAD ", None: "    "}[finding.ok]
        print(f"{mark} {finding.subject:34} {finding.text}", flush=True)
        sick |= finding.ok is False
    return int(sick)


def _plan(options: argparse.Namespace) -> int:
    """Of the models listed at a scale, or of all with a shape there if none is. Returns 1 if one does not fit
    into the memory of its GPUs."""
    from rich.console import Console

    from mdn import plan

    params = load(options.params)
    console, fits = Console(), True
    console.width = max(console.width, 100)  # of the second table, also in a pipe
    for scale in options.scale or params.scales:
        if scale not in params.scales:
            raise ConfigError(f"--scale: {scale!r} is unknown; use {', '.join(params.scales)}")
        runs = [params.run(scale, name) for name in params.runs.get(scale) or params.shapes.get(scale, {})]
        console.print(plan.costs(params.scales[scale], runs))
        machine = plan.machine(params, scale, options.nodes)
        measured = partial(plan.measured, options.runs, results=options.results, machine=machine)
        needs = plan.needs(
            params.scales[scale],
            machine,
            runs,
            available=int(options.memory * 2**30),
            speed=(lambda _: options.throughput) if options.throughput else measured,
        )
        console.print(needs.table)
        for run in runs:
            if step := plan.measured_step(options.runs, run, options.results):
                print(f"measured: {run.name}, {step}")
        print(*needs.remedies, sep="\n")
        fits &= not needs.remedies
    return 0 if fits else 1


def _submit(options: argparse.Namespace) -> int:
    from mdn.training.submit import LOGS, missing, script, submit

    params = load(options.params)
    if options.tasks or any(cell.startswith("prepare@") for cell in options.cells):
        return _submit_array(options, params)
    for scale, name, why_not in list(missing(params, options.cells)):
        text = script(scale, name, params.scales[scale].machine, options.params)
        if why_not is not None:
            print(f"{scale}/{name}: {why_not}")
        elif options.print:
            print(text)
        else:
            number = submit(text)
            print(f"{scale}/{name}: job {number}, prints to {LOGS}/{scale}-{name}-{number}.out")
    return 0


def _submit_array(options: argparse.Namespace, params: Params) -> int:
    from mdn.training.submit import LOGS, array, job_name, submit, under_way

    known = [f"prepare@{name}" for name in params.data.sets]
    if len(options.cells) != 1 or options.cells[0] not in known:
        raise ConfigError(
            f"{' '.join(options.cells) or 'nothing'}: cannot be a job array; write one of {', '.join(known)}"
        )
    cell, name = options.cells[0], options.cells[0].removeprefix("prepare@")
    if not options.tasks:
        raise ConfigError(f"{cell}: --tasks is missing; write for example --tasks 64")
    text = array(name, options.tasks, options.params)
    if options.print:
        print(text)
    elif number := under_way().get(job_name("prepare", name)):
        print(f"{cell}: under way as job {number}")
    else:
        number = submit(text)
        print(f"{cell}: job {number}, prints to {LOGS}/prepare-{name}-{number}_*.out")
    return 0


def _generate(options: argparse.Namespace) -> int:
    import torch

    from mdn.data import gpt2
    from mdn.data.tokenization import tokenizer
    from mdn.models.lm import load as load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(options.folder, device)
    encoder = tokenizer(options.raw / gpt2.FOLDER)
    ids = encoder.encode(options.prompt).ids or [gpt2.EOT]
    generator = torch.Generator(device).manual_seed(options.seed)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        out = model.generate(
            torch.tensor([ids], device=device), options.tokens, options.temperature, gpt2.EOT, generator
        )
    print(encoder.decode(out[0].tolist()))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from contextlib import ExitStack

    from mdn.reports.diff import Side, diff, pairs, read, read_all
    from mdn.reports.revisions import revision

    if options.kernel:
        return _diff_kernels(options)
    with ExitStack() as stack:  # a revision's files last as long as it is open

        def side(name: str) -> Side:
            if Path(name) == options.runs:
                return read_all(options.runs, options.params)
            if Path(name).exists():
                return read(Path(name))
            found = stack.enter_context(revision(name))
            return Side(name, found.runs, found.params)

        a, b = side(options.a), side(options.b)
        text = diff(a, b)
        drawings = []
        if options.out:
            from mdn.reports.figures.pairs import drawing

            drawn = drawing("loss", (a.title, b.title), pairs(a, b))
            drawings = [drawn] if drawn else []
    return _hand_over(options, f"{a.title} against {b.title}", text, drawings)


def _diff_kernels(options: argparse.Namespace) -> int:
    import torch

    from mdn.reports.diff import diff, kernel_pairs
    from mdn.reports.figures.pairs import drawing
    from mdn.reports.kernels import report, timings
    from mdn_kernels.accuracy import measure, runnable, timing
    from mdn_kernels.momentum_delta_rule import OP
    from mdn_kernels.registry import get

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [get(OP, name).name for name in (options.a, options.b)]
    here = [name for name in names if name in runnable(device)]
    benched = timings(Path("benchmarks/results"))
    if here:
        benched = [{"file": "here.json", **timing(here, device)}, *benched]
    made = report({"accuracy": measure(here, device), "timings": benched}, only=names)
    title, drawings = f"{names[0]} against {names[1]}", made.drawings
    lines = [made.markdown(title, "" if options.out else None), "## Runs that differ only in the kernel", ""]
    found = kernel_pairs(options.runs, *names)
    if not found:
        lines.append(
            "None. Set `kernel` of a model in params.yaml, `dvc repro`, and the run on the other version "
            f"stays beside it, in {options.runs}/.archive."
        )
    for n, (a, b) in enumerate(found):
        lines.append(diff(a, b).replace("\n## ", "\n#### ").replace("# ", "### ", 1))
        if options.out and (
            drawn := drawing(f"loss-{n + 1}", (a.title, b.title), {"": (a.runs[""], b.runs[""])})
        ):
            drawings.append(drawn)
            lines.append(f"![{drawn.title}]({drawn.name}.svg)\n")
    return _hand_over(options, title, "\n".join(lines), drawings, linked=True)


def _hand_over(
    options: argparse.Namespace, title: str, text: str, drawings: "list[Drawing]", linked: bool = False
) -> int:
    """Prints a comparison, or writes it with its figures and sends all of it to MLflow. linked: the text has
    its figures already."""
    if options.out is None:
        print(text)
        return 0
    from mdn.tracking.mlflow import attach

    for drawing in drawings:
        drawing.write(options.out)
        if not linked:
            text += f"## Loss\n\n![{drawing.title}]({drawing.name}.svg)\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "diff.md").write_text(text)
    written = [options.out / name for drawing in drawings for name in drawing.files()]
    attach(
        options.out, load(options.params).tracking.uri, [options.out / "diff.md", *written], f"diff: {title}"
    )
    print(options.out / "diff.md")
    return 0


def _sync(options: argparse.Namespace) -> int:
    from mdn.tracking.mlflow import sync_all

    sent = sync_all(options.runs, _uri(options))
    for folder, run in sent.items():
        print(f"{folder}: {run or 'not sent'}")
    if not sent:
        print(f"{options.runs}: no run folders")
    return int(None in sent.values())


def _ui(options: argparse.Namespace) -> int:
    from mdn.tracking.mlflow import experiment_pages, ui_command

    uri = _uri(options)
    if uri.startswith("http"):
        print(f"open {uri} in a browser")
        return 0
    command = ui_command(uri)
    print(command, flush=True)
    if options.print:
        return 0
    for name, page in experiment_pages(uri).items():
        print(f"{name}: http://127.0.0.1:5000/{page}", file=sys.stderr, flush=True)
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # eight processes that nothing here needs
    os.execv(sys.executable, [sys.executable, "-m", *shlex.split(command)])  # this environment's mlflow


def _uri(options: argparse.Namespace) -> str:
    uri = load(options.params).tracking.uri
    if uri is None:
        raise ConfigError("tracking.uri: null means no store; write for example sqlite:///mlflow.db")
    return uri
