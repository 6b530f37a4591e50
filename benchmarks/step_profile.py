"""Where the time of a training step goes on a GPU: its kernels, the longest first.

    PYTHONPATH=src:kernels python benchmarks/step_profile.py --scale 1b3 --models mdn gdn:fla --shape 4x4096

What the step takes beyond the sum of its kernels the GPU waited for the host. FLA's kernels tune themselves
on their first call, for minutes; after `python -m mdn.efficiency run --warm` on the same machine they are
compiled.
"""

import argparse
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mdn.config import load
from mdn.efficiency import cells
from mdn.efficiency.measure import Train
from mdn_kernels.common.tuning import tune_quickly

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="1b3")
    parser.add_argument("--models", nargs="+", default=["mdn", "gdn:fla"], help="model or model:kernel")
    parser.add_argument("--shape", default="4x4096", help="sequences × tokens; default: %(default)s")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--rows", type=int, default=50, help="kernels to show; default: %(default)s")
    options = parser.parse_args()
    B, T = map(int, options.shape.split("x"))
    tune_quickly()
    for run in cells.plan(load(options.params), options.scale, options.models, ["train"]).runs:
        report(Train(run, torch.device("cuda")), B, T, options.rows)


def report(train: Train, B: int, T: int, rows: int) -> None:
    """Prints milliseconds and launches a step of each kernel."""
    seconds = min(sample["seconds"] for sample in train.samples(B, T, STEPS))
    ids_BT, labels_BT = train.ids(B, T), train.ids(B, T)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            train.step(ids_BT, labels_BT)
        torch.cuda.synchronize()
    found = [row for row in seen.key_averages() if row.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in found)
    print(f"{train.run.name} at {B}x{T}: {seconds * 1e3:.1f} ms a step")
    print(f"{'ms':>9} {'launches':>9}  kernel")
    print(f"{total / 1e3 / STEPS:9.2f} {sum(row.count for row in found) // STEPS:9}  all")
    for row in found[:rows]:
        print(
            f"{row.self_device_time_total / 1e3 / STEPS:9.2f} {row.count // STEPS:9}  {row.key[:90]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
