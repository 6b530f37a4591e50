"""Shared pieces: the repository's root, a tiny run, and token shards made of nothing but numbers."""

import os

# Before any import of them: no test may look for a hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mdn.config import RunConfig, Shape, Training, load

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _first_candidates(request: pytest.FixtureRequest) -> None:
    """Tests on a GPU ask FLA's kernels what they compute, not which candidate is the fastest."""
    if request.node.get_closest_marker("gpu"):
        from mdn_kernels.common.tuning import take_first_candidates

        take_first_candidates()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Tensors from `torch.empty` are NaN, so that what a kernel leaves unwritten shows."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def params():
    return load(ROOT / "params.yaml")


@pytest.fixture
def tiny_run(params) -> RunConfig:
    """An MDN of one layer that trains in a second: 12 steps of 4 sequences of 16 tokens."""
    return replace(
        params.run("smoke", "mdn"),
        d_model=16,
        shape=Shape(layers=1, heads=1, head_k=16, head_v=16),
        training=Training(
            tokens=12 * 64,
            warmup_tokens=2 * 64,
            batch_tokens=64,
            context=16,
            lr=1e-2,
            validate_every=4,
            validation_tokens=64,
        ),
        lr=1e-2,
    )
