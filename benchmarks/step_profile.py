"""Where the time of a training step goes on a GPU: kernels of a few steps by name, models side by side.

    PYTHONPATH=src:kernels python benchmarks/step_profile.py --scale 1b3 --models mdn gdn:fla --shape 4x4096

Milliseconds and launches a step by kernel, the largest differences first, then their sums, next to which the
step's own time says how long the GPU waited for the host. --out FOLDER: also a trace a model, for
chrome://tracing.
"""

import argparse
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mdn.config import load
from mdn.efficiency import cells
from mdn.efficiency.measure import Train
from mdn.efficiency.warm import tune_quickly

STEPS = 3
WIDTH = 78


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="1b3")
    parser.add_argument("--models", nargs="+", default=["mdn", "gdn:fla"])
    parser.add_argument("--shape", default="4x4096", help="sequences × tokens; default: %(default)s")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    B, T = map(int, options.shape.split("x"))
    tune_quickly()
    runs = cells.plan(load(options.params), options.scale, options.models, ["train"]).runs
    found = {run.name: kernels(Train(run, torch.device("cuda")), B, T, options.out) for run in runs}
    times = {name: sum(ms for ms, _ in rows.values()) for name, rows in found.items()}
    names = sorted({kernel for rows in found.values() for kernel in rows})
    columns = {name: [found[name].get(kernel, (0.0, 0.0)) for kernel in names] for name in found}
    spread = [
        max(row) - min(row) for row in zip(*[[ms for ms, _ in c] for c in columns.values()], strict=True)
    ]
    order = sorted(range(len(names)), key=lambda i: -spread[i])[: options.rows]
    head = "".join(f"{name:>11} ms  calls" for name in found)
    print(f"{'kernel':{WIDTH}}{head}")
    for i in order:
        figures = "".join(f"{columns[name][i][0]:14.3f}{columns[name][i][1]:7.0f}" for name in found)
        print(f"{names[i][:WIDTH]:{WIDTH}}{figures}")
    total = "".join(f"{times[name]:14.3f}{sum(n for _, n in found[name].values()):7.0f}" for name in found)
    print(f"{'all kernels':{WIDTH}}{total}")


def kernels(train: Train, B: int, T: int, out: Path | None) -> dict[str, tuple[float, float]]:
    """Milliseconds and launches a step of each kernel."""
    for sample in train.samples(B, T, STEPS):
        print(f"{train.run.name}: {sample['seconds'] * 1e3:.1f} ms a step", flush=True)
    ids_BT, labels_BT = train.ids(B, T), train.ids(B, T)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            train.step(ids_BT, labels_BT)
        torch.cuda.synchronize()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(out / f"{train.run.name}.json.gz"))
    rows = [row for row in seen.key_averages() if row.device_type == torch.autograd.DeviceType.CUDA]
    return {row.key: (row.self_device_time_total / 1e3 / STEPS, row.count / STEPS) for row in rows}


if __name__ == "__main__":
    main()
