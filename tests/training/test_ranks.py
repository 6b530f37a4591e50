"""Two ranks on the CPU (gloo), started as a user starts them: the same training as one."""

import json
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def test_two_ranks_train_what_one_does(root, tmp_path, count_tokens):
    count_tokens(tmp_path / "tokens" / "smoke")
    config = OmegaConf.load(root / "params.yaml")
    smoke = config.scales.smoke
    smoke.d_model = 16
    smoke.training = {
        "tokens": 8 * 64,
        "warmup_tokens": 64,
        "batch_tokens": 64,
        "context": 16,
        "lr": 1e-2,
        "validate_every": 4,
        "validation_tokens": 64,
    }
    config.tracking.uri = None
    logs, weights = [], []
    for devices in (1, 2):
        smoke.machine = {"micro_batch": 2, "devices": devices, "checkpoint_every": 3}
        OmegaConf.save(config, tmp_path / f"{devices}.yaml")
        folders = ["--runs", str(tmp_path / f"runs{devices}"), "--tokens", str(tmp_path / "tokens")]
        command = [sys.executable, str(root / "pipeline" / "train_model.py"), "--scale", "smoke"]
        command += ["--model", "mdn", "--params", str(tmp_path / f"{devices}.yaml"), *folders]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        record = tmp_path / f"runs{devices}" / "smoke" / "mdn"
        logs.append([json.loads(line) for line in (record / "log.jsonl").read_text().splitlines()])
        weights.append(load_file(record / "model.safetensors"))
        assert len(list((record / "checkpoints").glob("*.ckpt"))) == 2
    one, two = logs
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for a, b in zip(one, two, strict=True):
        for key in ("train/loss", "train/lr", "train/grad_norm", "validation/loss"):
            assert (key in a) == (key in b)
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-3)
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-3), name
