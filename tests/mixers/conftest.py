"""Small mixers of odd sizes with weights large enough that every gate moves."""

from dataclasses import asdict, replace

import pytest
import torch

from mdn.config import RunConfig
from mdn.mixers import Mixer
from mdn.models import LanguageModel
from mdn.options import Options

from .small import D_MODEL, VARIANTS, shape


@pytest.fixture
def make_mixer(params):
    """make_mixer(name, kernel="auto", seed=0, **options) -> a mixer of `VARIANTS`."""

    def make(variant: str, kernel: str = "auto", seed: int = 0, **options) -> Mixer:
        name = variant.removesuffix("-bounds")
        if variant.endswith("-bounds"):
            options["gate_bounds"] = True
        defaults = asdict(getattr(Options(), name))
        run: RunConfig = replace(
            params.run("smoke", "mdn"),
            d_model=D_MODEL,
            pattern=name,
            kernel=kernel,
            shape=shape(name),
            options={name: defaults | options},
        )
        torch.manual_seed(seed)
        mixer = LanguageModel(run, vocabulary=7).mixer(0)
        with torch.no_grad():
            for parameter in mixer.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(10)
        return mixer

    return make


@pytest.fixture(params=VARIANTS)
def mixer(request, make_mixer) -> Mixer:
    return make_mixer(request.param)
