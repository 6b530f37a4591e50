"""An experiment that an MDN learns in a second on one core."""

from dataclasses import replace

import pytest

from mdn.config import Examples, MqarData, MqarScale, MqarTraining, Params, Shape

DATA = MqarData(
    vocabulary=16,
    train=[Examples(8, 1, 60), Examples(12, 2, 20)],
    test=[Examples(16, 2, 10), Examples(24, 3, 6)],
    validation_examples=5,
)
SCALE = MqarScale(
    title="Tiny",
    data="tiny",
    shape=Shape(layers=2, heads=2, head_k=8, head_v=16),
    training=MqarTraining(epochs=2, batch=32, stop_above=0.99),
    widths=[16],
    lrs=[1e-2],
    seeds=[1],
)


@pytest.fixture
def tiny(params: Params) -> Params:
    """params.yaml with one scale, `tiny`, of `mqar`: an epoch is 3 steps."""
    mqar = replace(params.mqar, scales={"tiny": SCALE}, data={"tiny": DATA}, runs={"tiny": {"mdn": "mdn"}})
    return replace(params, mqar=mqar)
