"""The decoding benchmark: what it does without a GPU, and what it writes with one."""

import json

import pytest
import torch

from mdn_kernels import bench_decoding


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_decoding.main(["--out", str(tmp_path)]) == 1
    assert "a GPU is needed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_writes_a_row_for_each_operator_and_batch(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_decoding, "HEADS", {"small": (2, 32, 64)})
    monkeypatch.setattr(bench_decoding, "BATCHES", (1, 3))
    monkeypatch.setattr(bench_decoding, "UNCACHED", 2**16)
    assert bench_decoding.main(["--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert [(row["op"], row["B"]) for row in rows] == [
        (op.__name__, B) for op in bench_decoding.OPERATORS for B in (1, 3)
    ]
    assert all(row["step_us"] > 0 for row in rows)
