"""Initial values: ranges and moments of the published recipe."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mdn.config import Shape
from mdn.models import LanguageModel


def own(params, name: str, parameter: str, heads: int = 64) -> torch.Tensor:
    """One parameter of all heads and layers of a model with many small heads."""
    shape = Shape(layers=8, heads=heads, head_k=2, head_v=2)
    if name == "mamba2":
        shape = replace(shape, heads=64)
    run = replace(params.run("smoke", name), d_model=64, shape=shape)
    torch.manual_seed(0)
    model = LanguageModel(run, vocabulary=50)
    return torch.cat([model.mixer(n).get_parameter(parameter).detach() for n in range(8)])


def is_uniform(sample: torch.Tensor, low: float, high: float) -> None:
    width, n = high - low, sample.numel()
    assert low - 1e-4 <= sample.min() <= low + 15 * width / n  # a chance of e^-15 to lie above
    assert high - 15 * width / n <= sample.max() <= high + 1e-4
    assert abs(sample.mean() - (low + high) / 2) < 5 * width / math.sqrt(12 * n)
    assert abs(sample.std() / (width / math.sqrt(12)) - 1) < 5 / math.sqrt(n)


@pytest.mark.parametrize(
    ("name", "parameter", "low", "high"),
    [
        ("mdn", "A_log", 0, 16),
        ("mdn", "Mu_log", 0, 16),
        ("mdn", "log_factor", 0, 4),
        ("mdn", "D_log", 0, 1),
        ("mdn-no-momentum", "log_factor", 0, 4),
        ("gdn", "A_log", 0, 16),
        ("comba", "A_log", 0, 16),
        ("kda", "A_log", 1, 16),
        ("kda-gdn-init", "A_log", 0, 16),
        ("mamba2", "A_log", 1, 16),
    ],
)
def test_the_exponential_is_uniform(params, name, parameter, low, high):
    is_uniform(own(params, name, parameter).exp(), low, high)


@pytest.mark.parametrize("name", ["mdn", "gdn", "comba", "kda", "mamba2"])
def test_time_steps_are_log_uniform_between_a_thousandth_and_a_tenth(params, name):
    step = F.softplus(own(params, name, "dt_bias").double())
    is_uniform(step.log(), math.log(1e-3), math.log(0.1))


def test_the_momentum_starts_with_the_time_steps_of_the_state(params):
    assert torch.equal(own(params, "mdn", "mu_bias"), own(params, "mdn", "dt_bias"))


@pytest.mark.parametrize(("name", "parameter"), [("comba", "D"), ("comba", "decay"), ("mamba2", "D")])
def test_corrections_start_at_one(params, name, parameter):
    assert (own(params, name, parameter) == 1).all()


@pytest.mark.parametrize("name", ["transformer", "mamba2", "gdn", "comba", "kda", "mdn"])
def test_matrices_have_deviation_002_and_norms_are_one(params, name):
    run = params.run("smoke", name)
    torch.manual_seed(0)
    for parameter_name, parameter in LanguageModel(run, vocabulary=500).named_parameters():
        if parameter_name.endswith("norm.weight"):
            assert (parameter == 1).all(), parameter_name
        elif parameter_name.endswith(("conv.bias", "gate.1.bias")):
            assert (parameter == 0).all(), parameter_name
        elif name == "mamba2" and parameter_name.endswith("mixer.out.weight"):
            bound = 1 / math.sqrt(parameter.shape[1] * 8)  # Kaiming's uniform bound over the root of 8 layers
            is_uniform(parameter.detach(), -bound, bound)
        elif parameter.dim() >= 2:
            n = parameter.numel()
            assert abs(parameter.mean()) < 5 * 0.02 / math.sqrt(n), parameter_name
            assert abs(parameter.std() / 0.02 - 1) < 5 / math.sqrt(2 * n), parameter_name
