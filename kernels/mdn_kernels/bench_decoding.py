"""Times one decoded token of the operators that have a fused step, beside a copy of the same bytes.

    python -m mdn_kernels.bench_decoding [--out FOLDER]

Decoding reads and writes every state once a token, so a copy of the states is the bound. Several sets of
states take turns, so that none is found in the cache; all calls of a turn are one CUDA graph, as when a
model decodes. What is wrong on this card is not timed (exit status 1).

B batch · H heads · K key channels · V value channels
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import mdn_kernels
from mdn_kernels.bench import durations, environment, write_record
from mdn_kernels.comba import comba
from mdn_kernels.gated_delta_rule import gated_delta_rule
from mdn_kernels.momentum_delta_rule import momentum_delta_rule
from mdn_kernels.testing import errors, make_inputs, tensor_arguments

OPERATORS = (momentum_delta_rule, gated_delta_rule, comba)
VERSION = "step_triton"
BATCHES = (1, 4, 16, 64, 256)
HEADS = {"1.3B": (6, 256, 512), "400M": (6, 128, 256)}
UNCACHED = 2**30  # bytes of all sets of states: many times an H200's 50 MB of L2
TOLERANCE = 6e-3  # largest relative error with bf16 inputs


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """The calls as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """The median time of one call."""
    replay = captured(calls)
    durations(replay, "cuda", 3)
    return median(durations(replay, "cuda", 20)) / len(calls)


def token(op: Callable, tensors: Sequence[Tensor], states: tuple[Tensor, ...]) -> None:
    op(
        *tensors,
        initial_state=states if len(states) > 1 else states[0],
        output_final_state=True,
        normalize_qk=True,
        version=VERSION,
    )


def time_batch(op: Callable, B: int, H: int, K: int, V: int) -> dict:
    """One row of results."""
    inputs = make_inputs(op, B=B, T=1, H=H, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    tensors = [x for name in tensor_arguments(op) if isinstance(x := inputs[name], Tensor)]
    count = 2 if op is momentum_delta_rule else 1
    size = count * 4 * B * H * K * V
    sets = [torch.randn(count, B, H, K, V, device="cuda") for _ in range(max(2, ceil(UNCACHED / size)))]
    with mdn_kernels.overwriting_states(), torch.no_grad():
        step_ms = milliseconds([partial(token, op, tensors, x.unbind(0)) for x in sets])
    pairs = zip(sets[::2], sets[1::2], strict=False)
    copy_ms = milliseconds([partial(target.copy_, source) for source, target in pairs])
    return {
        "op": op.__name__,
        "B": B,
        "H": H,
        "K": K,
        "V": V,
        "step_us": round(1e3 * step_ms, 2),
        "copy_us": round(1e3 * copy_ms, 2),
        "step_gb_s": round(2e-6 * size / step_ms, 1),
        "copy_gb_s": round(2e-6 * size / copy_ms, 1),
        "of_copy": round(copy_ms / step_ms, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mdn_kernels.bench_decoding", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench_decoding"), help="of bench.json and .csv"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("a GPU is needed: on the CPU a token is decoded by version recurrent")
        return 1
    record: dict = environment("cuda") | {"errors": [], "results": []}
    wrong = False
    for heads, (H, K, V) in HEADS.items():
        for op in OPERATORS:
            inputs = make_inputs(op, B=3, T=1, H=H, K=K, V=V, state=True, dtype=torch.bfloat16, device="cuda")
            found = errors(op, VERSION, inputs, normalize_qk=True, gradients=False)
            right = max(found.values()) <= TOLERANCE
            wrong |= not right
            record["errors"].append({"op": op.__name__, "heads": heads, "right": right})
            print(f"{op.__name__} {heads} heads {'right' if right else 'REFUSED'}: {found}", flush=True)
            for B in BATCHES if right else ():
                row = time_batch(op, B, H, K, V)
                record["results"].append({"heads": heads, **row})
                print(
                    f"  B={B:<4}{row['step_us']:9.1f} us, copy {row['copy_us']:8.1f} us: "
                    f"{row['step_gb_s']:6.0f} of {row['copy_gb_s']:6.0f} GB/s ({row['of_copy']:.2f})",
                    flush=True,
                )
            write_record(options.out, record)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
