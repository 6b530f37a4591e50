"""Parameters, FLOPs and state bytes by formula against the models themselves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mdn.config import load
from mdn.mixers import MIXERS
from mdn.models import LanguageModel, cost

PARAMS = load(Path(__file__).parents[2] / "params.yaml")
CELLS = [
    (scale, name)
    for scale in PARAMS.scales
    for name, model in PARAMS.models.items()
    if (model.base or name) in PARAMS.shapes[scale]
]


@pytest.fixture
def on_meta(monkeypatch):
    """Builds a model without memory; without its layers' own initialisation either, which takes the time."""
    for kind in (nn.Linear, nn.Embedding, nn.RMSNorm):
        monkeypatch.setattr(kind, "reset_parameters", lambda self: None)

    def build(run) -> LanguageModel:
        with torch.device("meta"):
            return LanguageModel(run)

    return build


@pytest.mark.parametrize(("scale", "name"), CELLS)
def test_every_cell_has_the_parameters_and_flops_of_the_formula(scale, name, on_meta):
    run = PARAMS.run(scale, name)
    model = on_meta(run)
    parts = cost.parameters(run)
    counted = {
        "embedding": model.embedding.weight.numel(),
        "head": model.head.weight.numel(),
        "mixers": sum(p.numel() for n in range(len(model.blocks)) for p in model.mixer(n).parameters()),
        "mlp": sum(p.numel() for n, p in model.named_parameters() if ".mlp." in n),
        "total": sum(p.numel() for p in model.parameters()),
    }
    assert {part: parts[part] for part in counted} == counted
    assert sum(parts.values()) == 2 * parts["total"]

    weights = sum(p.numel() for n, p in model.named_parameters() if p.dim() >= 2 and n != "embedding.weight")
    K, V, H, D, T = run.shape.head_k, run.shape.head_v, run.shape.heads, run.d_model, 1000
    mixing = {"attention": D * (T + 1), "mamba2": 2 * H * K * V, "mdn": 4 * H * K * V}
    products = sum(mixing.get(mixer, 3 * H * K * V) for mixer in model.mixers)
    assert cost.flops_per_token(run, T, training=False) == 2 * (weights + products)
    assert cost.flops_per_token(run, T) == 6 * (weights + products)


@pytest.mark.parametrize("name", [n for s, n in CELLS if s == "1b3"])
def test_the_1b3_models_have_13_billion_parameters(name):
    parts = cost.parameters(PARAMS.run("1b3", name))
    assert 1.3e9 < parts["total"] - parts["embedding"] < 1.4e9


@pytest.mark.parametrize("name", [n for s, n in CELLS if s == "400m"])
def test_the_400m_models_have_400_million_parameters(name):
    assert 385e6 < cost.parameters(PARAMS.run("400m", name))["total"] < 440e6


def test_the_flops_of_a_transformer_are_those_torch_counts():
    run, T = PARAMS.run("smoke", "transformer"), 64
    model = LanguageModel(run, vocabulary=100)
    # only this backend's products are counted, and they fill the square of scores, above the diagonal too
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, T, dtype=torch.long))
    above_diagonal = run.shape.layers * 2 * run.d_model * (T - 1)
    ours = cost.flops_per_token(run, T, training=False, vocabulary=100)
    assert counter.get_total_flops() == T * (ours + above_diagonal)


@torch.no_grad()
@pytest.mark.parametrize("name", [n for n in PARAMS.models if PARAMS.models[n].base is None])
def test_state_bytes_are_those_of_the_state(name):
    run, T = PARAMS.run("smoke", name), 9
    model = LanguageModel(run, vocabulary=10)
    _, states = model.hidden(torch.zeros(1, T, dtype=torch.long), model.init_states(1))
    held = sum(x.numel() * x.element_size() for state in states for x in state.values())
    assert cost.state_bytes(run, T, activation_bytes=4) == held


@pytest.mark.parametrize(
    ("name", "options"),
    [("mdn", {"alpha_bound": False, "beta_bound": False}), ("comba", {"output_correction": False})],
)
def test_options_that_take_parameters_away_are_counted(name, options, on_meta):
    run = PARAMS.run("smoke", name)
    run = replace(run, options={name: run.options[name] | options})
    assert cost.parameters(run)["total"] == sum(p.numel() for p in on_meta(run).parameters())


def test_every_mixer_has_a_formula():
    assert set(cost.STATE_PRODUCTS) | {"attention"} == set(MIXERS)
