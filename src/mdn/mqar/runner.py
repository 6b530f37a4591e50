"""Many cells on one device: a process each, a fixed number at a time, until all are done or time is up.

A process a cell, because small models leave a GPU idle between their kernels, which others then use, and
because one that crashes takes nothing with it.
"""

import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from mdn.mqar import cells
from mdn.mqar.cells import Cell
from mdn.mqar.data import prepare
from mdn.tracking.record import Record

POLL_SECONDS = 0.2
LAST_START = 0.85  # of the time there is; what starts later would be tested before it has learnt anything


def run(
    planned: list[Cell], *, runs: Path, data: Path, workers: int, deadline_s: float | None = None
) -> Counter[str]:
    """Runs the cells in their order, finished ones last (they only check that nothing has changed).

    runs: where records go. data: where data are made, once for all. workers: processes at a time. deadline_s:
    seconds from now after which nothing runs any more; cells that are running then have tested what they have
    reached, cells that had no turn are left for the next call.

    Returns:
        How many cells have which outcome: done, cut (by the time limit), failed (the process crashed),
        waiting.

    Raises:
        ValueError: if two cells would write to the same folder, or there is no worker.
    """
    if workers < 1:
        raise ValueError(f"workers: {workers} run nothing; use 1 or more")
    twice = [name for name, count in Counter((c.scale, c.name) for c in planned).items() if count > 1]
    if twice:
        raise ValueError(f"cells: {'/'.join(twice[0])} is there twice; plan each once")
    begun = time.time()
    deadline = math.inf if deadline_s is None else begun + deadline_s
    last_start = math.inf if deadline_s is None else begun + LAST_START * deadline_s
    runs.mkdir(parents=True, exist_ok=True)
    plan = runs / f".mqar-cells-{os.getpid()}.json"
    plan.write_text(cells.to_json(planned))
    folders = [prepare(cell.data, cell.data_seed, data) for cell in planned]
    waiting = sorted(range(len(planned)), key=lambda n: _record(runs, planned[n]).finished)
    active: dict[int, subprocess.Popen] = {}
    outcomes: Counter[str] = Counter()
    try:
        while active or (waiting and time.time() < last_start):
            while waiting and len(active) < workers and time.time() < last_start:
                n = waiting.pop(0)
                active[n] = _start(plan, n, runs, folders[n], deadline)
            for n, process in list(active.items()):
                if process.poll() is not None:
                    del active[n]
                    outcomes[_outcome(runs, planned[n], process.returncode)] += 1
            time.sleep(POLL_SECONDS)
    finally:
        for process in active.values():
            process.terminate()
        plan.unlink()
    outcomes["waiting"] = len(waiting)
    return outcomes


def _start(plan: Path, n: int, runs: Path, data: Path, deadline: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "mdn.mqar", "cell", str(plan), str(n)]
    command += ["--runs", str(runs), "--data", str(data), "--deadline", str(deadline)]
    # One thread: the processes share the cores, and on a GPU a thread has little to do.
    # Looking at the gates' values would wait for the device in every layer.
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "MDN_CHECK_GATES": "0"})


def _record(runs: Path, cell: Cell) -> Record:
    return Record(runs / cell.scale / cell.name)


def _outcome(runs: Path, cell: Cell, status: int) -> str:
    if status:
        print(f"{cell.name}: its process ended with status {status}", file=sys.stderr, flush=True)
        return "failed"
    return "done" if _record(runs, cell).finished else "cut"
