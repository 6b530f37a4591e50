"""Kernels that tune themselves, each in a process of its own: it changes Triton."""

import os
import subprocess
import sys
import time

import pytest

from mdn_kernels.common.tuning import compile_side_by_side

TUNED = """
import torch, triton, triton.language as tl
from mdn_kernels.common.tuning import take_first_candidates
from triton.runtime.errors import OutOfResources

ran = []

def candidate(b):
    def hook(arguments):
        ran.append(b)
        if b == 1:
            raise OutOfResources(300, 200, "shared memory")
    return triton.Config({"B": b}, pre_hook=hook)

@triton.autotune([candidate(b) for b in (1, 2, 3)], key=["n"], cache_results=True)
@triton.jit
def kernel(x, n, B: tl.constexpr):
    tl.store(x, B)

take_first_candidates()
for n in (7, 7, 8):
    x = torch.zeros(1, dtype=torch.int32)
    kernel[(1,)](x, n)
    print(x.item(), ran)
    ran.clear()
"""


def test_in_doctor_a_tuned_kernel_takes_the_first_candidate_that_runs(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "tuned.py").write_text(TUNED)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, tmp_path / "tuned.py"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["2 [1, 2, 2]", "2 [2]", "2 [1, 2, 2]"], done.stderr


def test_processes_begin_with_different_candidates_of_a_tuned_kernel():
    pytest.importorskip("triton")
    code = """
import triton
from mdn_kernels.common.tuning import share_candidates, tune_quickly
from mdn_kernels.momentum_delta_rule.v3_kernels import prepare
tuned = triton.autotune([triton.Config({"B": b}) for b in range(4)], key=[])(prepare)
tune_quickly()
share_candidates(0.5)
calls = []
times = tuned.do_bench(lambda: calls.append(1), (0.5, 0.2))
print([c.kwargs["B"] for c in tuned.prune_configs({})], times, calls)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[2, 3, 0, 1] [0.0, 0.0] [1]", done.stderr


def test_one_process_a_core_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    code = "import os, sys; open('-'.join(sys.argv[1:]), 'w').write(os.environ['FLA_CACHE_RESULTS'])"
    monkeypatch.chdir(tmp_path)
    compile_side_by_side(["-c", code])
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"0-3": "0", "1-3": "0", "2-3": "0"}


def test_what_is_not_compiled_at_the_deadline_is_left(capfd):
    started = time.time()
    compile_side_by_side(["-c", "import time; time.sleep(60)"], started + 1)
    assert time.time() < started + 30
    assert capfd.readouterr().out == "not all kernels are compiled yet\n"
