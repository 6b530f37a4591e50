"""Random shapes and gates: every output and gradient is finite, whatever comes."""

from random import Random

import pytest
import torch

from mdn_kernels.momentum_delta_rule import OP, momentum_delta_rule
from mdn_kernels.registry import get
from mdn_kernels.testing import GATES, evaluate, make_inputs

SHAPES = 500


@pytest.mark.parametrize(
    ("version", "device", "dtype"),
    [
        pytest.param("v2_segsum", "cpu", torch.float32, marks=pytest.mark.slow),
        pytest.param("v3_triton", "cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("v4_hopper", "cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_everything_is_finite_over_500_random_shapes_and_gates(version, device, dtype):
    draw = Random(0)
    keys, values = ((5, 16, 32), (3, 16, 40)) if device == "cpu" else ((64, 128, 256), (64, 128, 512))
    if misfit := get(OP, version).misfit(device, dtype, keys[0], values[0]):
        pytest.skip(misfit)
    for number in range(SHAPES):
        gates = draw.choice(sorted(GATES))
        inputs = make_inputs(
            momentum_delta_rule,
            B=draw.randint(1, 3),
            T=draw.randint(2, 200),
            H=draw.randint(1, 3),
            K=draw.choice(keys),
            V=draw.choice(values),
            gates=gates,
            state=draw.random() < 0.5,
            dtype=dtype,
            device=device,
            seed=number,
        )
        for name, x in evaluate(momentum_delta_rule, version, inputs).items():
            assert x.isfinite().all(), (
                f"{name} at {list(inputs['v'].shape)}, K {inputs['q'].shape[-1]}, {gates}"
            )
