"""`mdn submit`: every training that is missing becomes a SLURM job of its own, side by side; a data set to be
tokenized, a job array.

Plain sbatch scripts, and no library around them: when SLURM warns it, the training itself saves the step at
hand, all ranks together, and asks for its restart by an exit status.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mdn.config import ConfigError, Machine, Params
from mdn.data.shards import read_index
from mdn.tracking.record import Record, identity
from mdn.training.launch import REQUEUE

LOGS = Path("runs/.slurm")  # what the jobs print
WARNING = 180  # seconds before a time limit at which SLURM sends SIGUSR1: a step and a checkpoint


def missing(params: Params, only: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """(scale, model, why not) of the cells listed under `runs` whose scale has launcher: slurm.

    why not is None for a cell that has to be submitted: without a finished record of its configuration and
    data, and without a job under way. Cells named in `only` ("400m/mdn") are submitted whatever their record
    says.

    Raises:
        ConfigError: for a cell that is not there, a scale without its tokens, or nothing to submit anywhere.
        OSError: if SLURM cannot be asked.
    """
    cells = [
        (scale, name)
        for scale, names in params.runs.items()
        for name in names
        if params.scales[scale].machine.launcher == "slurm"
    ]
    for cell in only:
        if tuple(cell.split("/")) not in cells:
            known = ", ".join("/".join(c) for c in cells) or "none: list models under runs.<scale>"
            raise ConfigError(f"{cell}: no cell of a scale with launcher: slurm; there are {known}")
    if not cells:
        raise ConfigError("runs: no model at a scale whose machine has launcher: slurm; nothing to submit")
    queued = under_way()
    for scale, name in cells:
        if only and f"{scale}/{name}" not in only:
            continue
        run = params.run(scale, name)
        record = Record(Path("runs") / scale / name)
        wanted = f"{run.fingerprint()}-{read_index(Path('data/tokens') / run.data)['digest'][:12]}-"
        if job_name(scale, name) in queued:
            yield scale, name, f"under way as job {queued[job_name(scale, name)]}"
        elif not only and record.finished and (identity(record.folder) or "").startswith(wanted):
            yield scale, name, "finished; `dvc repro` adopts it"
        else:
            yield scale, name, None


def job_name(scale: str, name: str) -> str:
    return f"mdn-{scale}-{name}"


def under_way() -> dict[str, str]:
    """Number of the job of each name that was submitted from this folder and waits or runs."""
    listed = _slurm(["squeue", "--me", "--noheader", "--format=%i %j %Z"])
    jobs = [line.split(maxsplit=2) for line in listed.splitlines()]
    return {name: number for number, name, folder in jobs if folder == str(Path.cwd())}


def script(scale: str, name: str, machine: Machine, params: Path) -> str:
    """The batch script of one training."""
    options = [
        f"--job-name={job_name(scale, name)}",
        f"--nodes={machine.nodes}",
        f"--ntasks-per-node={machine.devices}",
        f"--output={LOGS}/{scale}-{name}-%j.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=USR1@{WARNING}",
        *machine.sbatch,
    ]
    command = ["srun", "--kill-on-bad-exit=1", sys.executable, "pipeline/train_model.py"]
    command += ["--scale", scale, "--model", name, "--params", str(params)]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), shlex.join(command), "status=$?"]
    lines += [f'if [ $status -eq {REQUEUE} ]; then scontrol requeue "$SLURM_JOB_ID"; fi', "exit $status"]
    return "\n".join(lines) + "\n"


def array(name: str, tasks: int, params: Path) -> str:
    """The batch script of the job array that tokenizes a data set. A preempted task is queued again and goes
    on after its last finished group."""
    options = [
        f"--job-name={job_name('prepare', name)}",
        f"--array=0-{tasks - 1}",
        f"--output={LOGS}/prepare-{name}-%A_%a.out",
        "--open-mode=append",
        "--requeue",
    ]
    command = [sys.executable, "pipeline/prepare_data.py", name, "--params", str(params)]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    return "\n".join([*lines, f"{shlex.join(command)} --task $SLURM_ARRAY_TASK_ID/{tasks}"]) + "\n"


def submit(text: str) -> str:
    """Hands a batch script to SLURM and returns the job's number.

    Raises:
        OSError: with what sbatch said.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    answer = _slurm(["sbatch", "--parsable"], text)
    found = re.match(r"\d+", answer)
    if found is None:
        raise OSError(f"sbatch: {answer!r} is no job number")
    return found[0]


def _slurm(command: list[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise OSError(f"{command[0]}: not found; run this on a login node of the cluster") from None
    if done.returncode:
        raise OSError(f"{command[0]}: {' '.join(done.stderr.split())}")
    return done.stdout
