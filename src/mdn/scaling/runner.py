"""All cells on this machine, one after another, each in processes of its own: one that fails, hangs or runs
out of memory takes nothing with it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from mdn.scaling import cells
from mdn.scaling.cells import Cell
from mdn.tracking.record import Record, write_json

CELL_SECONDS = 300.0  # after which a cell has failed
GRACE = 5.0  # seconds that the ranks have to end when told


def run(
    planned: list[Cell], *, runs: Path, tokens: Path, gpus: int | None, deadline_s: float | None = None
) -> Counter[str]:
    """Measures the cells in their order; finished ones are kept, failed ones tried again.

    gpus: how many there are; None: ranks run on the CPU. deadline_s: seconds from now after which nothing
    runs any more; a cell begins only while half the time of the longest one is left: the first ones compile.

    Returns:
        How many cells have which outcome: done, failed, waiting (no time left, or cut), no GPUs (too few).
    """
    deadline = float("inf") if deadline_s is None else time.monotonic() + deadline_s
    runs.mkdir(parents=True, exist_ok=True)
    plan = runs / f".scaling-{os.getpid()}.json"
    plan.write_text(cells.to_json(planned))
    outcomes: Counter[str] = Counter()
    longest = 0.0
    try:
        for n, cell in enumerate(planned):
            record = Record(runs / cell.scale / cell.name)
            if record.finished and record.manifest["fingerprint"] == cell.fingerprint():
                outcomes["done"] += 1
                continue
            if gpus is not None and cell.machine.devices > gpus:
                outcomes["no GPUs"] += 1
                continue
            begun = time.monotonic()
            if deadline - begun <= longest / 2:
                outcomes["waiting"] += 1
                continue
            command = [sys.executable, "-m", "mdn.scaling", "cell", str(plan), str(n)]
            command += ["--runs", str(runs), "--tokens", str(tokens)]
            error = _measured(command, record, min(CELL_SECONDS, deadline - begun))
            longest = max(longest, time.monotonic() - begun)
            if error and time.monotonic() >= deadline:  # the limit's fault: the next call measures it
                shutil.rmtree(record.folder)
                outcomes["waiting"] += 1
                continue
            outcomes["failed" if error else "done"] += 1
            print(f"{cell.scale}/{cell.name}: {error or told(record)}", flush=True)
    finally:
        plan.unlink()
    return outcomes


def _measured(command: list[str], record: Record, seconds: float) -> str | None:
    """Why the cell failed, which is written to its record; None if it did not."""
    record.folder.mkdir(parents=True, exist_ok=True)
    output = record.folder / "output.txt"
    with output.open("w") as file:
        # Looking at the gates' values would wait for the device in every layer.
        process = subprocess.Popen(
            command,
            env=os.environ | {"MDN_CHECK_GATES": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            process.terminate()  # it tells its ranks
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0 and record.finished:
        return None
    lines = output.read_text(errors="replace").split("\n")
    said = [line for line in lines if "Error" in line] or [line for line in lines if line.strip()] or [""]
    reason = f"status {status}" if status is not None else f"stopped after {seconds:.0f} s"
    error = f"{reason}: {said[-1].strip()[:300]}"
    write_json(record.folder / "failed.json", {"error": error, "step": len(record.log())})
    return error


def told(record: Record) -> str:
    figures = record.metrics
    words = [f"{figures['tokens_per_second']:,.0f} tokens/s"]
    for name, form in (
        ("mfu", "{:.1%} of peak"),
        ("peak_gib", "{:.1f} GiB"),
        ("communication_alone", "{:.1%} in messages alone"),
        ("data_wait", "{:.2%} waiting for data"),
        ("loss", "loss {:.4f}"),
    ):
        if name in figures:
            words.append(form.format(figures[name]))
    return ", ".join(words)
