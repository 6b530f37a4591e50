"""Seeded inputs over named gate ranges, and comparison of any operator's version with a float64 oracle.

Works for every public function of this package: its tensor arguments, and the names of its gates, are read
from its signature.

    inputs = make_inputs(gated_delta_rule, T=65, gates="typical", state=True)
    assert_matches_oracle(gated_delta_rule, "chunk", inputs)

B batch · T tokens · H heads · K key channels · V value channels · N sequences
"""

import inspect
from collections.abc import Callable, Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

# Ranges that gates are drawn from, uniformly; one number: a constant. What a row leaves out is TYPICAL.
TYPICAL: dict[str, float | tuple[float, float]] = {
    "log_alpha": (-0.1, -0.001),
    "beta": (0.0, 0.5),
    "log_mu": (-1.0, -0.01),
    "eta": (0.5, 1.5),
}
GATES: dict[str, dict[str, float | tuple[float, float]]] = {
    "typical": {},
    "alpha_faster_than_mu": {"log_alpha": (-2.0, -1.0)},
    "log_mu=-0.05": {"log_mu": -0.05},
    "log_mu=-0.5": {"log_alpha": -0.01, "log_mu": -0.5},
    "log_mu=-2": {"log_alpha": -0.05, "log_mu": -2.0},
    "log_mu=-20": {"log_mu": -20.0},
    "log_mu=-inf": {"log_mu": -inf},
    "beta=0": {"beta": 0.0},
    "alpha=1": {"log_alpha": 0.0},
    "alpha=exp(-8)": {"log_alpha": -8.0},
    "alpha=0": {"log_alpha": -inf},
    "wide": {"log_alpha": (-8.0, 0.0), "log_mu": (-20.0, 0.0), "beta": (0.0, 1.0)},
    # What the two rows of the paper's Table 6 that ended in NaN allow: momentum that decays without a bound;
    # memory that decays by its own gate alone, which is slowly, under momentum near its bound.
    "no mu bound": {"log_mu": (-8.0, 0.0)},
    "alpha_max=1": {"log_mu": (-2.0, -1.0)},
}

# Largest relative errors in float32: outputs and final states, gradients of vectors and states, of gates.
TOLERANCE = {"forward": 1e-5, "vectors": 1e-4, "gates": 1e-3}
VECTORS = ("q", "k", "p", "v")

Inputs = dict[str, Tensor | tuple[Tensor, ...]]


def tensor_arguments(op: Callable) -> list[str]:
    """Names of an operator's tensor arguments: those before the keyword-only ones."""
    parameters = inspect.signature(op).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def make_inputs(
    op: Callable,
    *,
    B: int = 2,
    T: int = 64,
    H: int = 2,
    K: int = 16,
    V: int = 24,
    gates: str = "typical",
    state: bool = False,
    sequences: int | None = None,
    per_channel: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Inputs:
    """The operator's arguments by name: keys and queries of norm 1, normal values, gates from GATES[gates].

    Args:
        state: with "initial_state" (a tuple if the operator has more than one state).
        sequences: number of packed sequences, for the initial state; None: B.
        per_channel: gates that have a value for each key channel, [B, T, H, K].
        dtype: of q, k, v (and p); gates and states are float32, or float64 if dtype is.
    """
    generator = torch.Generator().manual_seed(seed)
    ranges = TYPICAL | GATES[gates]
    inner = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(name: str) -> Tensor:
        if name in VECTORS:
            x = torch.randn(B, T, H, V if name == "v" else K, generator=generator)
            return (x if name == "v" else F.normalize(x, dim=-1)).to(device, dtype)
        shape = (B, T, H, K) if name in per_channel else (B, T, H)
        span = ranges[name]
        if not isinstance(span, tuple):
            return torch.full(shape, span, dtype=inner, device=device)
        low, high = span
        return (low + (high - low) * torch.rand(shape, generator=generator)).to(device, inner)

    inputs: Inputs = {name: draw(name) for name in tensor_arguments(op)}
    if state:
        count = 2 if "log_mu" in inputs else 1
        shape = (count, B if sequences is None else sequences, H, K, V)
        states = torch.randn(shape, generator=generator).to(device, inner).unbind(0)
        inputs["initial_state"] = tuple(states) if count > 1 else states[0]
    return inputs


def evaluate(
    op: Callable,
    version: str | None,
    inputs: Inputs,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    normalize_qk: bool = False,
    gradients: bool = True,
    seed: int = 1,
) -> dict[str, Tensor]:
    """What a version returns and its gradients, by name: o, S0, S1 (final states), dq, dlog_alpha, ..., dS0.

    Gradients are of a fixed random linear form of the output and the final states; they are left out without
    `gradients`. An input that has no gradient at all gives zeros.
    """
    given = inputs.get("initial_state", ())
    states = given if isinstance(given, tuple) else (given,)
    values = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and name != "initial_state"}
    values |= {f"S{i}": x for i, x in enumerate(states)}
    leaves = {name: x.detach().requires_grad_(gradients) for name, x in values.items()}
    initial = tuple(leaves[f"S{i}"] for i in range(len(states)))
    o, final = op(
        *(leaves[name] for name in tensor_arguments(op)),
        scale=scale,
        initial_state=(initial if isinstance(given, tuple) else initial[0]) if initial else None,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        normalize_qk=normalize_qk,
        version=version,
    )
    finals = final if isinstance(final, tuple) else (final,)
    results = {"o": o} | {f"S{i}": x for i, x in enumerate(finals)}
    if gradients:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in results.values()]
        found = torch.autograd.grad(
            list(results.values()), list(leaves.values()), weights, allow_unused=True, materialize_grads=True
        )
        results |= {f"d{name}": g for name, g in zip(leaves, found, strict=True)}
    return {name: x.detach() for name, x in results.items()}


def to_float64(inputs: Inputs) -> Inputs:
    """The same values in float64."""
    return {
        name: tuple(x.double() for x in value) if isinstance(value, tuple) else value.double()
        for name, value in inputs.items()
    }


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got − expected| / |expected| in float64 (0 if both are 0); infinite if `got` is not finite."""
    got, expected = got.double(), expected.double()
    if not got.isfinite().all():
        return inf
    difference = (got - expected).norm().item()
    if difference == 0:
        return 0.0
    return difference / max(expected.norm().item(), torch.finfo(torch.float64).tiny)


def errors(
    op: Callable,
    version: str,
    inputs: Inputs,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    normalize_qk: bool = False,
    gradients: bool = True,
) -> dict[str, float]:
    """Relative error of everything that `evaluate` names, against the operator's float64 step recurrence."""
    found, expected = (
        evaluate(
            op,
            name,
            values,
            scale=scale,
            cu_seqlens=cu_seqlens,
            normalize_qk=normalize_qk,
            gradients=gradients,
        )
        for name, values in ((version, inputs), ("recurrent", to_float64(inputs)))
    )
    return {name: relative_error(found[name], expected[name]) for name in expected}


def tolerance(name: str, scale: float = 1.0) -> float:
    """The largest relative error allowed for a result of `evaluate`, times `scale`."""
    if not name.startswith("d"):
        return TOLERANCE["forward"] * scale
    return TOLERANCE["vectors" if name[1:] in VECTORS or name.startswith("dS") else "gates"] * scale


def assert_matches_oracle(
    op: Callable,
    version: str,
    inputs: Inputs,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    normalize_qk: bool = False,
    gradients: bool = True,
    loosen: float = 1.0,
) -> None:
    """Raises AssertionError, which lists every result beyond `tolerance(name, loosen)`."""
    found = errors(
        op,
        version,
        inputs,
        scale=scale,
        cu_seqlens=cu_seqlens,
        normalize_qk=normalize_qk,
        gradients=gradients,
    )
    wrong = {
        name: f"{e:.1e} > {tolerance(name, loosen):.0e}"
        for name, e in found.items()
        if e > tolerance(name, loosen)
    }
    assert not wrong, f"{version} differs from the float64 recurrence: {wrong}"
