"""The memory that `mdn plan` expects, against what autograd keeps and what an H200 measured."""

import csv
import sys
from dataclasses import replace

import pytest
import torch

from mdn.config import Machine
from mdn.models import LanguageModel, memory
from mdn.models.memory import fitting, kept_bytes, saved_bytes, training_bytes, workspace_bytes

OPERATORS = {
    "mdn": "momentum_delta_rule",
    "gdn": "gated_delta_rule",
    "comba": "comba",
    "kda": "kda",
    "mamba2": "ssd",
}
GIB = 2**30


class Bare(torch.autograd.Function):
    """An operator that keeps its inputs and nothing else."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return inputs[2].clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None, grad, *[None] * (len(ctx.saved_tensors) - 3)


@pytest.mark.parametrize("name", ["transformer", "mamba2", "gdn", "comba", "kda", "mdn"])
def test_a_block_keeps_what_autograd_keeps(params, monkeypatch, name):
    run = params.run("400m", name)
    run = replace(run, shape=replace(run.shape, layers=1))
    T, D = 37, run.d_model
    block = LanguageModel(run, vocabulary=8).blocks[0]
    if name in OPERATORS:

        def bare(*inputs, **_):
            return Bare.apply(*inputs), None

        monkeypatch.setattr(sys.modules[f"mdn.mixers.{name}"], OPERATORS[name], bare)
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if (
            storage.data_ptr() not in parameters and T in tensor.shape
        ):  # not bfloat16 copies of weights either
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, lest its address be used again
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        block(torch.randn(1, T, D, requires_grad=True), None, None)
    mixer = "attention" if name == "transformer" else name
    measured = sum(size for size, _ in kept.values()) / T
    assert kept_bytes(run, mixer) - saved_bytes(run, mixer) == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("mdn", "v4_hopper"), ("gdn", "triton.gated_delta_rule"), ("gdn", "fla.gated_delta_rule")],
)
def test_an_operator_takes_what_an_h200_measured(params, root, name, kernel):
    rows = csv.DictReader((root / "benchmarks" / "results" / "h200.csv").open())
    row = next(r for r in rows if (r["name"], r["heads"], r["B"], r["T"]) == (kernel, "1.3B", "4", "4096"))
    run, tokens = params.run("1b3", name), 4 * 4096
    assert saved_bytes(run, name) * tokens / 2**20 == pytest.approx(float(row["saved_mib"]), rel=0.15)
    peak = (saved_bytes(run, name) * tokens + workspace_bytes(run, name, 4)) / 2**20
    assert peak == pytest.approx(float(row["peak_mib"]), rel=0.2)
    assert peak >= 0.95 * float(row["peak_mib"])  # rather too much


def test_spans_are_those_of_the_operator():
    chunked = pytest.importorskip("mdn_kernels.momentum_delta_rule.chunked")
    assert (memory.SPAN_ELEMENTS, memory.SPAN_TOKENS) == (chunked.SPAN_ELEMENTS, chunked.SPAN_TOKENS)


def test_parts_are_float32_weights_gradients_and_two_moments(params):
    run = params.run("1b3", "mdn")
    parts = training_bytes(run, Machine(1))
    P = sum(p.numel() for p in _meta(run).parameters())
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (4 * P, 4 * P, 8 * P)
    sharded = training_bytes(run, Machine(1, devices=8, nodes=4, strategy="fsdp"))
    assert sharded["optimizer"] == 8 * P // 32
    assert sharded["activations"] == parts["activations"]


def _meta(run):
    with torch.device("meta"):
        return LanguageModel(run)


def test_the_nearest_change_that_fits(params):
    run = params.run("1b3", "mdn")
    machine = Machine(8, devices=8)
    assert fitting(run, machine, 500 * GIB) == machine
    assert fitting(run, machine, 79 * GIB) == replace(machine, micro_batch=2)
    again = fitting(run, machine, 34 * GIB)
    assert again is not None
    assert (again.strategy, again.activation_checkpointing) == ("ddp", True)
    assert training_bytes(run, again)["total"] <= 34 * GIB
    for available, strategy in ((20, "zero2"), (12, "fsdp")):
        small = fitting(run, machine, available * GIB)
        assert small is not None
        assert small.strategy == strategy
    assert fitting(run, Machine(1), 20 * GIB) is None
