"""Models of a few thousand parameters."""

from dataclasses import replace

import pytest
import torch

from mdn.config import RunConfig, Shape
from mdn.models import LanguageModel

VOCABULARY = 61


@pytest.fixture
def make_run(params):
    """make_run(name, layers=4) -> the smoke run of that name in a width of 32."""

    def make(name: str, layers: int = 4) -> RunConfig:
        run = params.run("smoke", name)
        shape = Shape(layers=layers, heads=2, head_k=16, head_v=16)
        if "mamba2" in run.pattern:
            shape = Shape(layers=layers, heads=4, head_k=8, head_v=16, attention_heads=2)
        return replace(run, d_model=32, shape=shape)

    return make


@pytest.fixture
def make_model(make_run):
    """make_model(name) -> a small model with weights so large that no two tokens are equally likely."""

    def make(name: str, layers: int = 4) -> LanguageModel:
        torch.manual_seed(0)
        model = LanguageModel(make_run(name, layers), VOCABULARY)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(8)
        return model

    return make
