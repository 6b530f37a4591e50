"""What a model costs, from its configuration alone: parameters, FLOPs a token, bytes of a decoding state.

D model width · H heads · K key channels · V value channels · W convolution width
"""

from collections import Counter
from typing import NamedTuple

import torch

from mdn.config import RunConfig
from mdn.models.block import mlp_width
from mdn.models.lm import GPT2_VOCABULARY
from mdn.pattern import expand
from mdn.rules import RULES

# Products with the state a token, of 2 K V FLOPs a head each: read, write, output; for MDN also β_t M_t.
STATE_PRODUCTS = {"mamba2": 2, "gdn": 3, "comba": 3, "kda": 3, "mdn": 4}


# Dense bf16, no sparsity; the first name that is part of the device's counts.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


class Size(NamedTuple):
    """Parameters of a mixer: in matrices and convolutions, of 2 FLOPs a token each, and in vectors."""

    matrices: int
    vectors: int


def parameters(run: RunConfig, vocabulary: int = GPT2_VOCABULARY) -> dict[str, int]:
    """Parameters by part (embedding, head, mixers, mlp, norms) and in total."""
    mixers = expand(run.pattern, run.shape.layers)
    D, layers = run.d_model, len(mixers)
    parts = {
        "embedding": vocabulary * D,
        "head": vocabulary * D,
        "mixers": sum(sum(_size(run, name)) for name in mixers),
        "mlp": layers * 3 * D * mlp_width(D) if run.mlp else 0,
        "norms": (layers * (2 if run.mlp else 1) + 1) * D,
    }
    return parts | {"total": sum(parts.values())}


def flops_per_token(
    run: RunConfig, context: int, training: bool = True, vocabulary: int = GPT2_VOCABULARY
) -> int:
    """FLOPs of the model, whatever kernel computes it, a token of a sequence of `context` tokens on average.

    A multiply-add counts 2, and only those in products with weights, states, keys and values count: not
    decays, norms and activations, and not what a chunked kernel does on top of the recurrence. Training is
    three times the forward pass.
    """
    mixers = Counter(expand(run.pattern, run.shape.layers))
    D, shape = run.d_model, run.shape
    forward = 2 * vocabulary * D + (2 * shape.layers * 3 * D * mlp_width(D) if run.mlp else 0)
    for name, layers in mixers.items():
        if name == "attention":
            mixing = 2 * D * (context + 1)  # scores and values, of (context + 1) / 2 tokens on average
        else:
            mixing = 2 * STATE_PRODUCTS[name] * shape.heads * shape.head_k * shape.head_v
        forward += layers * (2 * _size(run, name).matrices + mixing)
    return 3 * forward if training else forward


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its maker's data sheet; None: unknown, and no utilisation is logged."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def state_bytes(run: RunConfig, context: int, activation_bytes: int = 2) -> int:
    """Bytes that decoding one sequence carries after `context` tokens: float32 matrices, and, as activations,
    keys and values or the inputs of short convolutions."""
    total = 0
    for name in expand(run.pattern, run.shape.layers):
        elements = RULES[name].state_size(run.d_model, run.shape, context)
        if name == "attention":
            total += elements * activation_bytes
        else:
            reach = run.mixer_options(name).convolution - 1
            total += elements * 4 + reach * _convolved(run, name) * activation_bytes
    return total


def _convolved(run: RunConfig, name: str) -> int:
    """Channels of a mixer's short convolution."""
    H, K, V = run.shape.heads, run.shape.head_k, run.shape.head_v
    return H * V + 2 * K if name == "mamba2" else H * (2 * K + V)


def _size(run: RunConfig, name: str) -> Size:
    D, H, K, V = run.d_model, run.shape.heads, run.shape.head_k, run.shape.head_v
    if name == "attention":
        return Size(4 * D * D, 0)
    options, channels = run.mixer_options(name), _convolved(run, name)
    convolution = channels * options.convolution
    if name == "mamba2":
        inner = H * V
        # in: z, x B C, dt; out. Convolution bias, A_log, dt_bias, D, norm.
        return Size(D * (inner + channels + H) + convolution + inner * D, channels + 3 * H + inner)
    shared = D * channels + convolution + H * V * D  # q k v, convolution, output
    match name:
        case "gdn":
            return Size(shared + D * H * V + 2 * D * H, V + (2 + options.gate_bounds) * H)
        case "comba":
            return Size(shared + D * H * V + 2 * D * H, V + (3 + options.output_correction) * H)
        case "kda":
            bottlenecks = 2 * D * V + V * (H * K + H * V)
            return Size(shared + bottlenecks + D * H, V + H + H * K + H * V)
        case "mdn":
            vectors = 4 + (options.alpha_bound or options.beta_bound) + options.output_correction
            return Size(shared + D * H * V + 4 * D * H, V + vectors * H)
    raise ValueError(f"mixer {name!r} has no parameter formula; add it to mdn.models.cost")
