"""Renders the whole report from a hundred synthetic run folders, twice: time, memory, size of the page, and
whether the bytes are the same.

    python benchmarks/render.py [--runs 100] [--steps 2000]
"""

import argparse
import hashlib
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from mdn.config import Params, Shape, load
from mdn.pattern import parse

ROOT = Path(__file__).parent.parent
TASKS = [
    ("lambada_openai", "acc"),
    ("hellaswag", "acc_norm"),
    ("arc_easy", "acc"),
    ("arc_challenge", "acc_norm"),
]
TASKS += [("piqa", "acc"), ("winogrande", "acc"), ("boolq", "acc"), ("sciq", "acc")]


def everywhere(params: Params, wanted: int) -> Params:
    """params.yaml with every model at every scale, and more variants of MDN until there are `wanted` runs."""
    models = dict(params.models)
    while len(models) * len(params.scales) < wanted:
        name = f"mdn-variant-{len(models)}"
        models[name] = replace(models["mdn"], title=f"MDN {len(models)}", base="mdn")

    def shape(scale: str, name: str) -> Shape:
        """Its own, or one that fits any pattern; Mamba2's heads make up its width."""
        model, shapes = models[name], params.shapes[scale]
        if own := shapes.get(model.base or name):
            return own
        wide = parse(model.pattern)[0] == "mamba2"
        return replace(shapes["mamba2"], layers=8) if wide else Shape(8, 4, 64, 64)

    shapes = {scale: {name: shape(scale, name) for name in models} for scale in params.scales}
    cells = {scale: {name: models[name].base or name for name in models} for scale in params.scales}
    return replace(params, models=models, shapes=shapes, runs=cells)


def write(folder: Path, params: Params, scale: str, name: str, steps: int) -> None:
    """What a finished training and its evaluations leave, without the weights."""
    config, chance = params.run(scale, name), random.Random(f"{scale}/{name}")
    folder.mkdir(parents=True)
    config.to_yaml(folder / "config.yaml")
    lines = []
    for step in range(1, steps + 1):
        loss = 3 + 8 * math.exp(-6 * step / steps) + chance.gauss(0, 0.1)
        lines.append({"step": step, "train/loss": loss, "train/lr": 3e-4, "train/grad_norm": chance.random()})
        if step % (steps // 20) == 0:
            lines.append({"step": step, "validation/loss": loss})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = {"fingerprint": config.fingerprint(), "code": "c" * 12, "data": "d" * 12, "commit": "0" * 12}
    manifest |= {"kernels": {"momentum_delta_rule": "v2_segsum"}, "versions": {"torch": "2.13.0"}}
    rows = [
        {"task": task, "metric": metric, "value": chance.random(), "stderr": 0.01, "n": 1000, "limit": None}
        for task, metric in TASKS
    ]
    rows.append(rows[0] | {"metric": "perplexity", "value": 40 + chance.random()})
    (folder / "evaluation").mkdir()
    for file, content in {
        "manifest.json": manifest,
        "metrics.json": {"validation_loss": 3.0},
        "evaluation/lm.json": {"fingerprint": manifest["fingerprint"], "results": rows[:1] + rows[-1:]},
        "evaluation/commonsense.json": {"fingerprint": manifest["fingerprint"], "results": rows[1:-1]},
    }.items():
        (folder / file).write_text(json.dumps(content))


def rendered(params: Params, runs: Path, out: Path) -> list[float]:
    """Seconds, seconds of CPU and peak MiB of rendering in a process of its own, imports included."""
    child = os.fork()
    if child == 0:
        started = time.perf_counter()
        from mdn.reports.render import render

        render(params, runs, out)
        used = resource.getrusage(resource.RUSAGE_SELF)
        took = time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
        (out / "took").write_text(json.dumps(took))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("rendering failed")
    took = json.loads((out / "took").read_text())
    (out / "took").unlink()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument(
        "--steps", type=int, default=2000, help="optimizer steps of each, one line of log a step"
    )
    options = parser.parse_args()
    params, digests = everywhere(load(ROOT / "params.yaml"), options.runs), []
    with tempfile.TemporaryDirectory() as folder:
        names = [(scale, name) for scale in params.scales for name in params.models][: options.runs]
        for scale, name in names:
            write(Path(folder, "runs", scale, name), params, scale, name, options.steps)
        for n in (1, 2):
            out = Path(folder, f"out-{n}")
            seconds, cpu, peak = rendered(params, Path(folder, "runs"), out)
            files = sorted(path for path in out.rglob("*") if path.is_file())
            digests.append(
                [(path.relative_to(out), hashlib.sha256(path.read_bytes()).digest()) for path in files]
            )
            size = (out / "index.html").stat().st_size / 2**20
            print(f"{len(names)} runs: {seconds:.1f} s ({cpu:.1f} s of CPU), {peak:.0f} MiB, ", end="")
            print(f"index.html {size:.1f} MiB, {len(files)} files")
    print("the same bytes twice" if digests[0] == digests[1] else "DIFFERENT bytes")


if __name__ == "__main__":
    main()
