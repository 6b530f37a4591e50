"""Kernels compiled before anything is timed, by as many processes as there are cores.

Each goes through all models, from another one on, and through the candidates of kernels that tune themselves
(FLA's), from another one on: what one has compiled the others find in Triton's cache on disk.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from mdn.efficiency.cells import Plan
from mdn.pattern import parse

VOCABULARY = 512
LATER = ("loader", "prefill")  # use the kernels of the others, and take long
# Of a candidate; by default an eighth of a second, half a minute for each of FLA's operators.
TUNING_MS = {"warmup": 5, "rep": 30}


def compile_all(plan: Path, deadline: float) -> None:
    """Starts the processes, on a machine with an NVIDIA GPU, and waits for them, at most until `deadline`, as
    time.time() tells it."""
    if shutil.which("nvidia-smi") is None:
        return
    count = os.cpu_count() or 1
    command = [sys.executable, "-m", "mdn.efficiency", "warm", str(plan)]
    environment = (
        os.environ
        | {"OMP_NUM_THREADS": "1", "FLA_CACHE_RESULTS": "0"}
        | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    )
    active = [subprocess.Popen([*command, str(n), str(count)], env=environment) for n in range(count)]
    try:
        for process in active:
            process.wait(max(0.0, deadline - time.time()))
    except subprocess.TimeoutExpired:
        print("warm: not all kernels are compiled", flush=True)
    finally:
        for process in active:
            process.kill()
            process.wait()


def compile_share(plan: Plan, n: int, count: int, kind: str = "cuda") -> None:
    """What process n of `count` does: of each model its smallest stack, untimed. Tuned kernels do not ask
    for the length, so one shape of a part is enough; what torch.compile makes is made by one process."""
    import torch

    from mdn.efficiency.measure import MEASUREMENTS

    share_candidates(n / count)
    device = torch.device(kind)
    turns = [(part, run) for run in plan.runs for part in plan.parts if run.name in part.models]
    alone = [turn for i, turn in enumerate(turns) if turn[0].kind == "compiled" and i % count == n]
    shared = [turn for turn in turns if turn[0].kind not in (*LATER, "compiled")]
    at = len(shared) * n // count
    for part, run in alone + shared[at:] + shared[:at]:
        small = replace(run, shape=replace(run.shape, layers=len(parse(run.pattern))))
        try:
            for _ in MEASUREMENTS[part.kind](small, device, VOCABULARY).samples(*part.shapes[0], 1):
                pass
        except Exception as error:  # it is met, and recorded, where it is measured
            if n == 0:
                print(f"warm: {run.name}, {part.kind}: {type(error).__name__}: {error}"[:200], flush=True)


def share_candidates(share: float) -> None:
    """In this process tuned kernels run each of their candidates once, beginning after that share of them."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def rotated(self, *arguments, **options):
        found = prune(self, *arguments, **options)
        at = int(share * len(found))
        return found[at:] + found[:at]

    def once(call, quantiles):
        call()
        return [0.0] * len(quantiles)

    Autotuner.prune_configs = rotated
    Autotuner.do_bench = property(lambda self: once)


def tune_quickly() -> None:
    """In this process kernels that tune themselves time their candidates for TUNING_MS."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = property(lambda self: partial(do_bench, **TUNING_MS))
