"""What this machine can run: versions, known-bad combinations, and every operator version's gradients against
the float64 recurrence, in seconds. `mdn doctor` prints it; wrong gradients are what a benchmark never shows.
"""

import importlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from mdn_kernels.common.fla import miscompiles
from mdn_kernels.common.tuning import take_first_candidates
from mdn_kernels.registry import DECODING, KernelVersion, versions
from mdn_kernels.testing import errors, make_inputs, tolerance

OPERATORS = ("momentum_delta_rule", "gated_delta_rule", "comba", "kda", "ssd")
# One length with a part of a chunk; typical gates, closed momentum, memory that never decays, full range.
GATES = ("typical", "log_mu=-2", "log_mu=-inf", "alpha=1", "wide")
TOKENS = 70
HALF_PRECISION = 2e-2  # largest relative error with bf16 inputs


@dataclass(frozen=True)
class Finding:
    """ok: None for a remark that is neither right nor wrong."""

    ok: bool | None
    subject: str
    text: str


def examine() -> Iterator[Finding]:
    """Everything worth knowing, one finding at a time, the slow ones last."""
    yield Finding(None, "python", platform.python_version())
    yield Finding(None, "torch", str(torch.__version__))
    triton = _installed("triton")
    yield Finding(None, "triton", triton or "not installed; versions that need it are left out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        yield Finding(None, "GPU", f"{torch.cuda.get_device_name()} (sm_{major}{minor})")
        yield from _known_bad(triton, major)
        if triton:
            take_first_candidates()
    else:
        yield Finding(None, "GPU", "none; operators run on the CPU")
    for name in OPERATORS:
        op = getattr(importlib.import_module(f"mdn_kernels.{name}"), name)
        for one in versions(name):
            yield _parity(op, one, device)


def _known_bad(triton: str | None, major: int) -> Iterator[Finding]:
    if triton is None:
        return
    if major == 9 and miscompiles(triton):
        text = (
            f"Triton {triton} on Hopper has compiled gated backward kernels of flash-linear-attention "
            "wrongly (right outputs, wrong gradients); its baselines need Triton 3.7.1 or later"
        )
        yield Finding(None, "known bad", text)


def _parity(op: Callable, one: KernelVersion, device: str) -> Finding:
    subject = f"{one.op} {one.name}"
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    misfits = {dtype: one.misfit(device, dtype, 64, 64) for dtype in dtypes}
    if None not in misfits.values():
        return Finding(None, subject, "; ".join(map(str, misfits.values())))
    worst, where, wrong = 0.0, "", False
    for dtype in (dtype for dtype, misfit in misfits.items() if misfit is None):
        for gates in GATES:
            try:
                found = _errors(op, one, device, dtype, gates)
            except ImportError as error:
                return Finding(None, subject, f"left out: {error}")
            for result, relative in found.items():
                limit = tolerance(result) if dtype == torch.float32 else HALF_PRECISION
                wrong |= not relative <= limit
                if relative > worst:
                    worst, where = relative, f"{result} at {gates}, {str(dtype).removeprefix('torch.')}"
    text = f"largest relative error {worst:.1e} ({where})"
    if wrong and not one.automatic:
        return Finding(None, subject, f"{text}; never chosen by itself: {one.note}")
    return Finding(not wrong, subject, text)


def _errors(
    op: Callable, one: KernelVersion, device: str, dtype: torch.dtype, gates: str
) -> dict[str, float]:
    channels = ("log_alpha",) if one.op == "kda" else ()
    inputs = make_inputs(
        op,
        B=1,
        T=1 if one.decodes else TOKENS // 4 if one.name == DECODING else TOKENS,
        H=1,
        K=64 if device == "cuda" else 16,
        V=64 if device == "cuda" else 16,
        gates=gates,
        state=True,
        per_channel=channels,
        dtype=dtype,
        device=device,
    )
    # Normalised inside, as the models have it: on a GPU that is a kernel of its own.
    return errors(op, one.name, inputs, normalize_qk=True, gradients=not one.decodes)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
