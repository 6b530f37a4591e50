"""How exact the versions of the momentum delta rule are: against float64, over ranges of gates.

python -m mdn_kernels.accuracy [VERSION ...]     prints the record as JSON
"""

import json
import platform
import sys
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch

from mdn_kernels.bench import CPU_SHAPES, CUDA_SHAPES, Contender, environment, time_shape
from mdn_kernels.momentum_delta_rule import OP, momentum_delta_rule
from mdn_kernels.registry import DECODING, get, versions
from mdn_kernels.testing import GATES, TYPICAL, evaluate, make_inputs, relative_error, to_float64

TOKENS, HEADS, KEY, VALUE = 256, 2, 16, 16  # four chunks
LETTERS = {"log_alpha": "log α", "beta": "β", "log_mu": "log μ", "eta": "η"}


def measure(names: Sequence[str], device: str = "cpu") -> dict[str, Any]:
    """The largest relative error of outputs and final states, and of gradients, in float32, for every range
    of `testing.GATES` and each version; None where it is not finite. Strict JSON.

    Raises:
        ValueError: for a version that does not exist or does not run on the device.
    """
    for name in names:
        misfit = get(OP, name).misfit(device, torch.float32, KEY, VALUE)
        if misfit:
            raise ValueError(f"{OP} {name} {misfit}")
    rows = []
    for gates in GATES:
        inputs = make_inputs(
            momentum_delta_rule, B=1, T=TOKENS, H=HEADS, K=KEY, V=VALUE, gates=gates, device=device
        )
        expected = evaluate(momentum_delta_rule, DECODING, to_float64(inputs))
        for name in names:
            found = evaluate(momentum_delta_rule, name, inputs)
            errors = {key: relative_error(found[key], x) for key, x in expected.items()}
            outputs = max(error for key, error in errors.items() if not key.startswith("d"))
            gradients = max(error for key, error in errors.items() if key.startswith("d"))
            rows.append(
                {
                    "gates": gates,
                    "ranges": ranges(gates),
                    "version": name,
                    "outputs": outputs if isfinite(outputs) else None,
                    "gradients": gradients if isfinite(gradients) else None,
                }
            )
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__.split("+")[0],
        "dtype": "float32",
        "shape": {"T": TOKENS, "H": HEADS, "K": KEY, "V": VALUE},
        "versions": [
            {"name": v.name, "note": v.note, "devices": list(v.devices), "automatic": v.automatic}
            for v in versions(OP)
        ],
        "rows": rows,
    }


def timing(names: Sequence[str], device: str = "cpu") -> dict[str, Any]:
    """Time and memory of versions in turns, right ones and wrong ones, at one shape: a record like that of
    `mdn_kernels.bench`, which is the one to use for figures to keep."""
    dtype, shape = (torch.bfloat16, CUDA_SHAPES[0]) if device == "cuda" else (torch.float32, CPU_SHAPES[0])
    contenders = [Contender(name, momentum_delta_rule, name) for name in names]
    return environment(device) | {"results": time_shape(contenders, shape, dtype, device, turns=2)}


def ranges(gates: str) -> str:
    """What a range sets, in the paper's letters: "log α = 0, log μ ∈ (−2, −1)"."""

    def number(x: float) -> str:
        return f"{x:g}".replace("-", "−").replace("inf", "∞")

    told = []
    for name, span in (GATES[gates] or TYPICAL).items():
        if isinstance(span, tuple):
            told.append(f"{LETTERS[name]} ∈ ({number(span[0])}, {number(span[1])})")
        else:
            told.append(f"{LETTERS[name]} = {number(span)}")
    return ", ".join(told)


def runnable(device: str = "cpu") -> list[str]:
    """The versions that run on a device in float32, oldest first."""
    return [v.name for v in versions(OP) if v.misfit(device, torch.float32, KEY, VALUE) is None]


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(json.dumps(measure(sys.argv[1:] or runnable(device), device), indent=1, ensure_ascii=False))
