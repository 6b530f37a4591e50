"""Tests of Triton kernels: compiled on a card, or interpreted on the CPU. Triton has to know that it
interprets when it is imported, so there they run in a process of their own, which a test of the same file
starts.
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted_only = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
starts_interpreter = pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
everywhere = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, id="interpreted", marks=interpreted_only),
        pytest.param("cuda", torch.float32, id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
    ],
)


def interpret(file: str, *selection: str, passed: str = "passed") -> None:
    """Runs the tests of a file, or those of pytest's `selection`, with interpreted kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", file, *selection, "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert passed in done.stdout
