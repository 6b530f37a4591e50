"""The benchmark on a machine without a GPU: what it writes, and that it refuses to time a wrong version."""

import csv
import json
import sys
from types import ModuleType

import pytest
import torch

from mdn_kernels import bench, registry
from mdn_kernels.momentum_delta_rule import OP, v2_segsum
from mdn_kernels.registry import KernelVersion


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "CPU_SHAPES", [bench.Shape("small", 1, 65, 1, 8, 8)])
    monkeypatch.setattr(bench, "TOKENS_CHECKED", 66)
    monkeypatch.setattr(bench, "TURN_SECONDS", 1e-3)


def run(folder, *options):
    status = bench.main(["--quick", "--out", str(folder), *options])
    return status, json.loads((folder / "bench.json").read_text())


def test_writes_times_memory_errors_and_environment(tmp_path, capsys):
    status, record = run(tmp_path)
    assert status == 0
    assert [row["name"] for row in record["results"]] == ["v2_segsum"]
    (row,) = record["results"]
    assert 0 < row["forward_ms_p20"] <= row["forward_ms_p50"] <= row["forward_ms_p80"]
    assert row["forward_backward_ms_p50"] > 0
    assert row["peak_mib"] is None
    assert row["forward_ratio"] is None
    assert record["torch"] == torch.__version__
    (errors,) = record["errors"]
    assert errors["right"]
    assert 0 < errors["dlog_mu"] < 1e-4
    with (tmp_path / "bench.csv").open() as file:
        assert [line["name"] for line in csv.DictReader(file)] == ["v2_segsum"]
    printed = capsys.readouterr().out
    assert "FLA skipped" in printed
    assert "v2_segsum (small heads) right" in printed


def test_one_head_size_of_several(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CPU_SHAPES", [bench.Shape(heads, 1, 65, 1, 8, 8) for heads in ("a", "b")])
    _, record = run(tmp_path, "--heads", "b")
    assert {row["heads"] for row in record["results"] + record["errors"]} == {"b"}


def test_what_was_checked_is_kept_when_the_timing_is_cut(tmp_path, monkeypatch):
    def cut(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "time_shape", cut)
    monkeypatch.setenv("MDN_COMMIT", "0123abc")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["commit"] == "0123abc"
    assert [row["right"] for row in record["errors"]] == [True]


def no_beta_gradient(q, k, v, log_alpha, beta, *others, **keywords):
    return v2_segsum.forward(q, k, v, log_alpha, beta.detach(), *others, **keywords)


def not_finite(*tensors, **keywords):
    o, states = v2_segsum.forward(*tensors, **keywords)
    return o * torch.inf, states


def failing(*tensors, **keywords):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize("forward", [no_beta_gradient, not_finite, failing])
def test_a_wrong_version_is_refused_and_not_timed(tmp_path, monkeypatch, capsys, forward):
    module = ModuleType("wrong_version")
    module.forward = forward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry._versions, OP, dict(registry._versions[OP]))
    registry.register(KernelVersion(OP, "wrong", module.__name__, ("cpu",), (torch.float32,)))
    status, record = run(tmp_path)
    assert status == 1
    assert [row["name"] for row in record["results"]] == ["v2_segsum"]
    assert {"no_beta_gradient": "REFUSED", "not_finite": "REFUSED", "failing": "no such instruction"}[
        forward.__name__
    ] in capsys.readouterr().out


def test_saved_memory_counts_each_storage_once_with_the_inputs():
    x = torch.zeros(2**18, requires_grad=True)  # 1 MiB
    found = bench.memory(lambda: x.sin() * x.view(2, -1).exp().flatten(), lambda o: None, "cpu")
    assert found["saved_mib"] == 3.0  # x, sin x and exp x
