"""Times the versions of the momentum delta rule, with operators of one state beside them, in one process.

    python -m mdn_kernels.bench [--out FOLDER] [--quick] [--heads 1.3B]

On a card it begins with a first training call in a new process, on an empty kernel cache and again on what
that one compiled. To the end of each head size belongs one sequence of 2 to 128 thousand tokens, as CUDA
graphs: the host's work, which does not grow with the length, is no part of that.

Nothing is timed that is wrong on the machine at hand: each contender's outputs and gradients are compared
with the float64 recurrence first, and one that differs is refused, with exit status 1. Then the contenders
take turns (A B A B …) at each shape. On a card a call is timed by CUDA events, with other calls queued behind
it as in training. FLA (flash-linear-attention) takes part where it can; ratios are to its gated delta rule.

B batch · T tokens · H heads · K key channels · V value channels
"""

import argparse
import csv
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor

import mdn_kernels
from mdn_kernels.comba import comba
from mdn_kernels.common.tuning import compile_side_by_side, share_candidates, tune_quickly
from mdn_kernels.gated_delta_rule import gated_delta_rule
from mdn_kernels.momentum_delta_rule import OP, momentum_delta_rule
from mdn_kernels.registry import DECODING, choose, get, versions
from mdn_kernels.testing import evaluate, make_inputs, relative_error, tensor_arguments, to_float64

BASELINE = "fla.gated_delta_rule"
# Largest relative error of any output or gradient.
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-3}
TOKENS_CHECKED = 300  # four chunks and a part of one
COMPILE = "import sys; from mdn_kernels import bench; bench.compile_share"
TURN_SECONDS = 0.1  # of calls in a turn; at least one call


@dataclass(frozen=True)
class Shape:
    heads: str
    B: int
    T: int
    H: int
    K: int
    V: int


# The paper's training shapes: 16384 tokens, heads of its 1.3B and 400M models.
CUDA_SHAPES = [
    Shape(heads, B, T, H, K, V)
    for heads, H, K, V in (("1.3B", 6, 256, 512), ("400M", 6, 128, 256))
    for B, T in ((4, 4096), (8, 2048), (2, 8192), (1, 16384))
]
CPU_SHAPES = [Shape("small", 1, 256, 2, 32, 64)]
LENGTHS = [2048 * 2**i for i in range(7)]


@dataclass(frozen=True)
class Contender:
    """A version of `op`, a public function of this package; `op`'s version "recurrent" is the oracle."""

    name: str
    op: Callable
    version: str | None  # None: the one that is chosen
    gates: Sequence[str] = ("typical",)  # that it has to be right for

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.op(*tensors, version=self.version)[0]


def own_contenders(device: str, dtype: torch.dtype, shape: Shape) -> list[Contender]:
    """The versions that can be chosen for training at such a shape, oldest first."""
    gates = ("typical", "log_mu=-20", "wide")
    return [
        Contender(v.name, momentum_delta_rule, v.name, gates)
        for v in versions(OP)
        if v.automatic and v.name != DECODING and v.misfit(device, dtype, shape.K, shape.V, shape.T) is None
    ]


def single_state_contenders(device: str, dtype: torch.dtype, shape: Shape) -> list[Contender]:
    """The Triton versions of the gated delta rule and Comba, where they run."""
    return [
        Contender(f"triton.{op.__name__}", op, "triton")
        for op in (gated_delta_rule, comba)
        if get(op.__name__, "triton").misfit(device, dtype, shape.K, shape.V) is None
    ]


def fla_contenders() -> list[Contender]:
    """FLA's gated delta rule and Comba. ImportError where version `fla` is not to be had."""
    contenders = [
        Contender(BASELINE, gated_delta_rule, "fla"),
        Contender("fla.comba", comba, "fla"),
    ]
    for contender in contenders:
        get(contender.op.__name__, "fla").load()
    return contenders


def largest_errors(contender: Contender, shape: Shape, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Relative error of each output and gradient, the largest over the contender's gates."""
    largest: dict[str, float] = {}
    for gates in contender.gates:
        inputs = make_inputs(
            contender.op,
            T=TOKENS_CHECKED,
            H=shape.H,
            K=shape.K,
            V=shape.V,
            gates=gates,
            dtype=dtype,
            device=device,
        )
        found = evaluate(contender.op, contender.version, inputs)
        expected = evaluate(contender.op, DECODING, to_float64(inputs))
        for name, x in expected.items():
            largest[name] = max(largest.get(name, 0.0), relative_error(found[name], x))
    return largest


def durations(call: Callable[[], object], device: str, calls: int) -> list[float]:
    """Milliseconds of each of a number of calls in a row."""
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(calls):
            call()
            marks.append(time.perf_counter())
        return [1e3 * (stop - start) for start, stop in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in pairwise(events)]


def take_turns(calls: dict[str, Callable[[], object]], device: str, turns: int) -> dict[str, list[float]]:
    """p20, p50 and p80 of each call's duration in milliseconds."""
    count = {}
    for name, call in calls.items():
        durations(call, device, 2)  # compiles and tunes
        count[name] = max(1, int(1e3 * TURN_SECONDS / median(durations(call, device, 3))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            found[name] += durations(call, device, count[name])
    return {name: [quantiles(x, n=10, method="inclusive")[i] for i in (1, 4, 7)] for name, x in found.items()}


def memory(call: Callable[[], Tensor], backward: Callable[[Tensor], object], device: str) -> dict:
    """MiB kept for the backward, inputs included, and the peak above what is there before the call."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    peak = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward(call())
        peak = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return {"saved_mib": round(sum(storages.values()) / 2**20, 1), "peak_mib": peak}


def workload(
    contender: Contender, shape: Shape, dtype: torch.dtype, device: str
) -> tuple[Callable[[], Tensor], Callable[[Tensor], object]]:
    """A call at a shape, and the backward of its result."""
    drawn = min(shape.T, 1024)  # tokens; drawing them all takes longer than timing
    op, H, K, V = contender.op, shape.H, shape.K, shape.V
    inputs = make_inputs(op, B=1, T=drawn, H=H, K=K, V=V, dtype=dtype, device=device)
    leaves = []
    for name in tensor_arguments(op):
        x = inputs[name]
        assert isinstance(x, Tensor)
        sequence = torch.cat([x] * ceil(shape.T / drawn), 1)[:, : shape.T]
        leaves.append(torch.cat([sequence] * shape.B).requires_grad_())
    do = torch.randn_like(leaves[2])
    return lambda: contender.forward(leaves), lambda o: torch.autograd.grad(o, leaves, do, allow_unused=True)


def train(call: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> None:
    backward(call())


def time_shape(
    contenders: list[Contender], shape: Shape, dtype: torch.dtype, device: str, turns: int
) -> list:
    """One row of results for each contender."""
    forward: dict[str, Callable[[], object]] = {}
    training: dict[str, Callable[[], object]] = {}
    kept = {}
    for contender in contenders:
        call, backward = workload(contender, shape, dtype, device)
        forward[contender.name] = torch.no_grad()(call)
        training[contender.name] = partial(train, call, backward)
        train(call, backward)
        kept[contender.name] = memory(call, backward, device)
    forward_ms, training_ms = (take_turns(calls, device, turns) for calls in (forward, training))

    def ratio(times: dict[str, list[float]], name: str) -> float | None:
        return round(times[name][1] / times[BASELINE][1], 3) if BASELINE in times else None

    return [
        {
            "name": name,
            **asdict(shape),
            "dtype": str(dtype).removeprefix("torch."),
            **{f"forward_ms_p{p}": round(x, 4) for p, x in zip((20, 50, 80), forward_ms[name], strict=True)},
            **{
                f"forward_backward_ms_p{p}": round(x, 4)
                for p, x in zip((20, 50, 80), training_ms[name], strict=True)
            },
            **kept[name],
            "forward_ratio": ratio(forward_ms, name),
            "forward_backward_ratio": ratio(training_ms, name),
        }
        for name in forward
    ]


def compile_share(heads: str, n: int, count: int) -> None:
    """What process n of `count` does, before anything is timed, so that FLA's hundreds of candidates are
    compiled by all cores: a training call of each of its operators at the first shape of these heads."""
    share_candidates(n / count)
    shape = next(shape for shape in CUDA_SHAPES if shape.heads == heads)
    for contender in fla_contenders()[:: 1 if n % 2 else -1]:
        train(*workload(contender, shape, torch.bfloat16, "cuda"))


def first_call() -> float:
    """Seconds of the first training call of this process, compiling included, at the first of the shapes."""
    call, backward = workload(
        Contender("chosen", momentum_delta_rule, None), CUDA_SHAPES[0], torch.bfloat16, "cuda"
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    train(call, backward)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def first_calls() -> dict[str, float]:
    """`first_call` of two new processes: one finds no compiled kernel, the next what that one left."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty_cache_s", "warm_cache_s"):
            done = subprocess.run(
                [sys.executable, "-c", "from mdn_kernels.bench import first_call; print(first_call())"],
                env=os.environ | {"TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            found[name] = round(float(done.stdout.split()[-1]), 2)
    return found


def time_lengths(heads: Shape, dtype: torch.dtype) -> list[dict]:
    """Median ms of a training call of the version that is chosen, for one sequence of each of LENGTHS."""
    rows = []
    for T in LENGTHS:
        chosen = choose(OP, "cuda", dtype, T, heads.K, heads.V).name
        shape = replace(heads, B=1, T=T)
        call, backward = workload(Contender(chosen, momentum_delta_rule, chosen), shape, dtype, "cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles; a graph is not captured on the stream of everything else
            train(call, backward)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train(call, backward)
        ((_, ms, _),) = take_turns({chosen: graph.replay}, "cuda", turns=2).values()
        rows.append({"name": chosen, **asdict(shape), "forward_backward_ms_p50": round(ms, 4)})
        del graph
        torch.cuda.empty_cache()
    return rows


def environment(device: str) -> dict:
    """What the figures depend on."""

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("MDN_COMMIT"),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fla": version("fla-core"),
    }
    if device == "cuda":
        import triton

        found["triton"] = triton.__version__
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return found


def launch_options(names: Sequence[str], dtype: torch.dtype, shape: Shape) -> dict:
    """Tile sizes and launch options of the versions that have such."""
    modules = {name: sys.modules[get(OP, name).module] for name in names}
    return {
        name: module.launches(dtype, shape.K, shape.V)
        for name, module in modules.items()
        if hasattr(module, "launches")
    }


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def write_record(folder: Path, record: dict) -> None:
    """bench.json, and its rows as bench.csv."""
    write(folder / "bench.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    rows = io.StringIO()
    if record["results"]:
        writer = csv.DictWriter(rows, list(record["results"][0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(record["results"])
    write(folder / "bench.csv", rows.getvalue())


HEADING = (
    f"{'':24}{'tokens':9}{'heads':12}{'forward':>9}{'ratio':>7}{'+backward':>10}{'ratio':>7}{'saved':>9}{'peak':>8}"
    " (ms, MiB)"
)


def show(row: dict) -> str:
    def number(x: float | None, form: str) -> str:
        return "-" if x is None else format(x, form)

    return (
        f"{row['name']:<24}{row['B']}x{row['T']:<6} {row['H']}x{row['K']}x{row['V']:<4}"
        f"{row['forward_ms_p50']:>10.3f}{number(row['forward_ratio'], '.2f'):>7}"
        f"{row['forward_backward_ms_p50']:>10.3f}{number(row['forward_backward_ratio'], '.2f'):>7}"
        f"{row['saved_mib']:>9.0f}{number(row['peak_mib'], '.0f'):>8}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mdn_kernels.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="of bench.json and bench.csv")
    parser.add_argument("--quick", action="store_true", help="one shape of each head size, fewer turns")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = CUDA_SHAPES if device == "cuda" else CPU_SHAPES
    sizes = list(dict.fromkeys(shape.heads for shape in shapes))
    parser.add_argument("--heads", choices=sizes, nargs="+", default=sizes, help="of these models only")
    options = parser.parse_args(arguments)
    record: dict = environment(device) | {"launches": {}, "errors": [], "results": []}

    fla: list[Contender] = []
    if device == "cpu":
        print("FLA skipped: its kernels need a GPU")
    else:
        try:
            fla = fla_contenders()
            tune_quickly()
        except ImportError as error:
            print(f"FLA skipped: {error}")

    if device == "cuda":
        record["first_call"] = first_calls()
        print(
            "first call: {empty_cache_s} s, {warm_cache_s} s with compiled kernels".format(
                **record["first_call"]
            )
        )

    refused = False
    for heads in options.heads:
        of_heads = [shape for shape in shapes if shape.heads == heads]
        right = []
        if fla:
            print(f"compiling FLA's candidates ({heads} heads)", flush=True)
            compile_side_by_side(["-c", f"{COMPILE}({heads!r}, *map(int, sys.argv[1:]))"])
        own = own_contenders(device, dtype, of_heads[0])
        for contender in (*own, *single_state_contenders(device, dtype, of_heads[0]), *fla):
            print(f"{contender.name} ({heads} heads): compiling and checking", flush=True)
            try:
                call, backward = workload(contender, of_heads[0], dtype, device)
                train(call, backward)  # what tunes itself does so at a size that is timed
                found = largest_errors(contender, of_heads[0], dtype, device)
            except Exception as error:
                # FLA refuses some Triton versions; one of ours that cannot run is as bad as a wrong one.
                print(f"{contender.name} ({heads} heads) skipped: {type(error).__name__}: {error}")
                refused |= contender not in fla
                continue
            wrong = max(found.values()) > TOLERANCE[dtype]
            refused |= wrong
            if not wrong:
                right.append(contender)
            print(
                f"{contender.name} ({heads} heads) {'REFUSED' if wrong else 'right'}, largest errors:",
                *(f"{x} {e:.1e}" for x, e in found.items()),
                flush=True,
            )
            finite = {x: e if isfinite(e) else None for x, e in found.items()}
            record["errors"].append({"name": contender.name, "heads": heads, "right": not wrong, **finite})
        launched = [c.name for c in right if c in own]
        record["launches"][heads] = launch_options(launched, dtype, of_heads[0])
        write_record(options.out, record)
        print(HEADING, flush=True)
        was, mdn_kernels.CHECK_GATES = mdn_kernels.CHECK_GATES, False
        try:
            for shape in of_heads[:1] if options.quick else of_heads:
                rows = time_shape(right, shape, dtype, device, turns=2 if options.quick else 5)
                record["results"] += rows
                print(*map(show, rows), sep="\n", flush=True)
                write_record(options.out, record)
            if device == "cuda" and not options.quick:
                lengths = time_lengths(of_heads[0], dtype)
                record.setdefault("lengths", []).extend(lengths)
                write_record(options.out, record)
                for row in lengths:
                    per_token = 1e6 * row["forward_backward_ms_p50"] / row["T"]
                    print(
                        f"{row['name']:<24}1x{row['T']:<7}{per_token:>8.1f} ns a token, forward and backward"
                    )
        finally:
            mdn_kernels.CHECK_GATES = was
    write_record(options.out, record)
    return int(refused)


if __name__ == "__main__":
    sys.exit(main())
