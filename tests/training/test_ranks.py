"""Several ranks on the CPU (Gloo), started as a user starts them: the same training as one."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from mdn.tracking.record import Record

pytestmark = pytest.mark.slow

ONE = {"micro_batch": 2, "checkpoint_every": 3}
TWO = ONE | {"devices": 2}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# Inductor would round otherwise, and take its time.
COMPILED = [
    sys.executable,
    "-c",
    """
import functools, runpy, sys, torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
""",
]
COMPILED_FSDP = {"compile": True, "strategy": "fsdp", "activation_checkpointing": True}


@pytest.fixture(scope="module")
def cell(root, tmp_path_factory, count_tokens):
    """cell(name, machine, starter) is the command that trains a small MDN into runs/<name>."""
    path = tmp_path_factory.mktemp("ranks")
    count_tokens(path / "tokens" / "smoke")

    def command(name, machine, starter=(sys.executable,), **training):
        config = OmegaConf.load(root / "params.yaml")
        smoke, config.runs.smoke = config.scales.smoke, {"mdn": "mdn"}
        smoke.d_model = 16
        smoke.training = {
            "tokens": 8 * 64,
            "warmup_tokens": 64,
            "batch_tokens": 64,
            "context": 16,
            "lr": 1e-2,
            "validate_every": 4,
            "validation_tokens": 64,
        } | training
        smoke.machine = machine
        config.tracking.uri = None
        params = path / f"{name}.yaml"
        OmegaConf.save(config, params)
        words = [*starter, str(root / "pipeline" / "train_model.py"), "--scale", "smoke", "--model", "mdn"]
        words += ["--params", str(params), "--runs", str(path / name), "--tokens", str(path / "tokens")]
        return words, Record(path / name / "smoke" / "mdn")

    return command


def finish(words, record):
    done = subprocess.run(words, cwd=record.folder.parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return record, done.stdout + done.stderr


@pytest.fixture(scope="module")
def alone(cell):
    return finish(*cell("alone", ONE))[0]


def same(one, two):
    """Loss curves to 1e-5 and weights to what Adam makes of that."""
    assert [line["step"] for line in one.log()] == [line["step"] for line in two.log()]
    for a, b in zip(one.log(), two.log(), strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"train/tokens_per_second", "train/data_wait"}:
            assert b[key] == pytest.approx(a[key], rel=1e-3 if key == "train/grad_norm" else 1e-5)
    first, second = load_file(one.weights), load_file(two.weights)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.allclose(first[name], second[name], atol=1e-3), name


@pytest.mark.parametrize(
    ("name", "machine", "starter"),
    [
        ("local", TWO, [sys.executable]),
        ("torchrun", TWO | {"launcher": "torchrun"}, TORCHRUN),
        ("fsdp", TWO | {"strategy": "fsdp"}, [sys.executable]),
        ("zero2", TWO | {"strategy": "zero2"}, [sys.executable]),
        ("recompute", TWO | {"strategy": "fsdp", "activation_checkpointing": True}, [sys.executable]),
        ("compiled", TWO | {"compile": True}, COMPILED),
        ("compiled fsdp", TWO | COMPILED_FSDP, COMPILED),
        ("one rank", ONE | {"strategy": "fsdp"}, [sys.executable]),
    ],
)
def test_ranks_train_what_one_process_does(cell, alone, name, machine, starter):
    words, record = cell(name, machine, starter)
    finish(words, record)
    same(alone, record)
    assert len(list(record.checkpoints.glob("*.ckpt"))) == 2
    _, printed = finish(words, record)
    assert printed.count("adopted") == 1


POISON = """
import os, runpy, sys
from mdn.training import lit
original = lit.LitLanguageModel.training_step
def step(self, batch, index):
    loss = original(self, batch, index)
    return loss * float("nan") if self.global_step == 3 and os.environ.get("RANK") == "1" else loss
lit.LitLanguageModel.training_step = step
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(cell):
    records = []
    for strategy in ("ddp", "fsdp"):
        starter = [sys.executable, "-c", POISON]
        record, _ = finish(*cell(f"poisoned {strategy}", TWO | {"strategy": strategy}, starter))
        assert record.metrics["skipped_steps"] == 1
        assert all(torch.isfinite(t).all() for t in load_file(record.weights).values())
        records.append([line["train/loss"] for line in record.log() if "train/loss" in line])
    ddp, fsdp = records
    assert ddp == pytest.approx(fsdp, rel=1e-5)


def test_the_rank_that_fails_says_why_and_not_those_that_it_leaves(cell):
    broken = POISON.replace("import os", "import os, pathlib").replace(
        'return loss * float("nan")', 'return pathlib.Path("gone").read_text()'
    )
    words, record = cell("broken", TWO, [sys.executable, "-c", broken])
    done = subprocess.run(words, cwd=record.folder.parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    failed = json.loads((record.folder / "failed.json").read_text())
    assert failed == {
        "error": "rank 1: FileNotFoundError: [Errno 2] No such file or directory: 'gone'",
        "step": 3,
    }


def test_ranks_started_at_once_open_one_record(cell, alone):
    """A changed configuration is archived once, whoever comes first."""
    words, record = cell("changed", TWO | {"launcher": "torchrun"}, TORCHRUN, lr=1e-3)
    finish(words, record)
    words, record = cell("changed", TWO | {"launcher": "torchrun"}, TORCHRUN)
    finish(words, record)
    same(alone, record)
    archived = list(record.folder.parents[1].glob(".archive/smoke/mdn/*"))
    assert len(archived) == 1
    assert Record(archived[0]).finished


LONG = {"tokens": 40 * 64}


def test_strategy_and_number_of_ranks_may_change_between_a_kill_and_the_resume(cell):
    words, whole = cell("long", ONE, **LONG)
    finish(words, whole)
    fsdp, agent = TWO | {"strategy": "fsdp"}, TWO | {"launcher": "torchrun"}
    python = [sys.executable]
    for machine, starter, number, status in (
        (fsdp, python, signal.SIGTERM, 75),
        (ONE, python, signal.SIGUSR1, 75),
        (agent, TORCHRUN, signal.SIGTERM, 1),  # whatever its ranks say
        (TWO, python, signal.SIGUSR1, 75),
    ):
        words, record = cell("stopped", machine, starter, **LONG)
        before = len(record.log())
        training = subprocess.Popen(
            words, cwd=record.folder.parents[2], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        deadline = time.monotonic() + 300
        while len(record.log()) < before + 4:
            assert time.monotonic() < deadline
            assert training.poll() is None
            time.sleep(0.05)
        training.send_signal(number)
        printed, _ = training.communicate(timeout=200)
        assert training.returncode == status
        saved = max(int(path.stem.split("-")[1]) for path in record.checkpoints.glob("*.ckpt"))
        assert printed.count(f"told to stop; step {saved} is saved, the next start resumes") == 1
        assert not (record.folder / "failed.json").exists()
        assert not record.finished
    words, record = cell("stopped", fsdp, **LONG)
    finish(words, record)
    same(whole, record)


def test_a_second_start_is_refused_until_the_first_is_gone(cell):
    words, record = cell("twice", ONE, **LONG)
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while len(record.log()) < 8:
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)  # it holds its lock and writes nothing more
        os.waitpid(first.pid, os.WUNTRACED)
        before = {path: path.read_bytes() for path in record.folder.rglob("*") if path.is_file()}
        for machine in (ONE, TWO):
            again, _ = cell("twice", machine, **LONG)
            done = subprocess.run(again, capture_output=True, text=True, timeout=200)
            assert done.returncode == 1
            (told,) = (line for line in done.stderr.splitlines() if line.startswith("smoke/mdn: "))
            assert f"{record.folder}: in use by process {first.pid} on {platform.node()} since" in told
            assert "Traceback" not in done.stderr
        after = {path: path.read_bytes() for path in record.folder.rglob("*") if path.is_file()}
        assert after == before
    finally:
        first.kill()
        first.wait()
    finish(*cell("twice", TWO, **LONG))
    assert [line["step"] for line in record.log() if "train/loss" in line] == list(range(1, 41))


def test_a_wrong_number_of_ranks_is_refused_at_once(cell):
    words, record = cell("three", TWO | {"launcher": "torchrun"}, [*TORCHRUN[:-1], "3"])
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "2 devices × 1 nodes, but 3 ranks were started; use torchrun --nnodes 1" in done.stderr
    assert not record.folder.exists()


def test_a_rank_that_dies_ends_the_others(cell):
    words, record = cell("dying", TWO, **LONG)
    training = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while len(record.log()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(training.pid)], capture_output=True, text=True
    )
    os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    assert training.wait(timeout=200) not in (0, 75)
    assert "error" in json.loads((record.folder / "failed.json").read_text())


def test_a_shard_that_vanishes_under_its_map_says_where(cell):
    words, record = cell("vanished", ONE, **LONG)
    shards = Path(words[words.index("--tokens") + 1]) / "smoke"
    training = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while len(record.log()) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sizes = {shard: shard.read_bytes() for shard in shards.glob("train-*.bin")}
    for shard in sizes:
        os.truncate(shard, 0)
    try:
        _, error = training.communicate(timeout=200)
    finally:
        for shard, content in sizes.items():
            shard.write_bytes(content)
    assert training.returncode == -signal.SIGBUS
    assert "Bus error" in error
    assert "shards.py" in error
