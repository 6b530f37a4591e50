"""Kernels compiled before anything is timed, by as many processes as there are cores.

Each goes through all models, from another one on, and through the candidates of kernels that tune themselves
(FLA's), from another one on: what one has compiled the others find in Triton's cache on disk.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from mdn.efficiency.cells import Plan
from mdn.pattern import parse
from mdn_kernels.common.tuning import compile_side_by_side, share_candidates

VOCABULARY = 512
LATER = ("loader", "prefill")  # use the kernels of the others, and take long


def compile_all(plan: Path, deadline: float) -> None:
    """Starts the processes, on a machine with an NVIDIA GPU, and waits for them, at most until `deadline`, as
    time.time() tells it."""
    if shutil.which("nvidia-smi") is None:
        return
    compile_side_by_side(["-m", "mdn.efficiency", "warm", str(plan)], deadline)


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
