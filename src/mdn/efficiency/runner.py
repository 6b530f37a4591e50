"""Runs a plan on this machine: the models of a part take turns, and every turn adds to its run's record.

All turns are in one process (see work.py). One that fails leaves its reason in the record and the next
begins; one that breaks the process, or lasts too long, is blamed here, and another process goes on with the
rest. At the deadline the process is stopped; the next call measures what is missing.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from mdn.efficiency import cells
from mdn.efficiency.cells import Plan
from mdn.efficiency.records import fail, finish, forgive, measured
from mdn.efficiency.warm import LATER, compile_all
from mdn.tracking.record import Record

POLL_SECONDS = 0.2
TURN_SECONDS = 150.0  # the longest turn; FLA's kernels tune themselves in their first
WARMING = 0.4  # of the time there is, at most, for compiling


def run(plan: Plan, *, runs: Path, deadline_s: float | None = None, warm: bool = False) -> Counter[str]:
    """Measures what the records in `runs` lack of a plan, in its order.

    deadline_s: seconds from now after which nothing runs any more. warm: compile all kernels first, in
    parallel.

    Returns:
        How many cells (a model at a shape) have which outcome: measured, failed, waiting.
    """
    started = time.time()
    deadline = float("inf") if deadline_s is None else started + deadline_s
    runs.mkdir(parents=True, exist_ok=True)
    file, at = (runs / f".efficiency-{os.getpid()}.{suffix}" for suffix in ("json", "at"))
    file.write_text(cells.to_json(plan))
    command = [sys.executable, "-m", "mdn.efficiency", "work", str(file), str(at), str(deadline)]
    environment = os.environ | {"MDN_CHECK_GATES": "0"}  # as in training
    for wanted in plan.runs:
        forgive(Record(runs / wanted.scale / wanted.name))
    try:
        if warm and any(part.kind not in LATER for part in plan.parts):
            compile_all(file, started + WARMING * (deadline - started))
        while True:
            at.unlink(missing_ok=True)
            process = subprocess.Popen([*command, "--runs", str(runs)], env=environment)
            trouble = _watch(process, at, deadline)
            if trouble is None:
                break
            if not at.exists():
                raise ValueError(f"efficiency: {trouble} before it measured anything")
            hand = json.loads(at.read_text())
            print(f"{hand['run']}: {', '.join(hand['cells'])}: {trouble}", file=sys.stderr, flush=True)
            fail(Record(runs / plan.runs[0].scale / hand["run"]), hand["cells"], trouble)
    finally:
        file.unlink()
        at.unlink(missing_ok=True)
    return _close(plan, runs)


def _watch(process: subprocess.Popen, at: Path, deadline: float) -> str | None:
    """Waits for the process, at most until the deadline, and says what was wrong with it."""
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if time.time() > deadline:
                return None
            if at.exists() and time.time() - at.stat().st_mtime > TURN_SECONDS:
                return f"stopped after {TURN_SECONDS:.0f} seconds"
    finally:
        process.kill()
        process.wait()
    return f"its process ended with status {process.returncode}" if process.returncode else None


def _close(plan: Plan, runs: Path) -> Counter[str]:
    """Counts the cells by outcome, and writes into each record whether it is complete."""
    found: Counter[str] = Counter()
    for run in plan.runs:
        record = Record(runs / run.scale / run.name)
        exists = (record.folder / "manifest.json").exists()
        failures = record.manifest["failures"] if exists else {}
        own: Counter[str] = Counter()
        for part in plan.parts:
            for cell in map(part.cell, part.shapes if run.name in part.models else []):
                done = all(measured(record, cell, n) for n in range(part.rounds))
                own["measured" if done else "failed" if cell in failures else "waiting"] += 1
        if exists:
            finish(record, own["waiting"])
        found += own
    return found
