"""How the ranks of a training come to be and find each other: one rank a device, by params.yaml's `launcher`.

local     one machine; the command starts its ranks itself
torchrun  the user starts the same command with torchrun, on every node
slurm     srun starts it; `mdn submit` writes the job

All three end in torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT),
the only one that the rest of the training knows.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar, cast

from mdn.config import ConfigError, Machine

REQUEUE = 75  # exit status (EX_TEMPFAIL) of a training that was told to stop and saved its step
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: SLURM's warning before a time limit, see `mdn submit`
GRACE = 30  # seconds that the other local ranks have when one has failed

Answer = TypeVar("Answer")


class Stopped(SystemExit):
    """The training was told to stop and has saved its step."""

    def __init__(self) -> None:
        super().__init__(REQUEUE)


class StopRequest:
    """Whether this process was told to stop. The training looks at it after every step."""

    def __init__(self) -> None:
        self.made = False

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True


def unwind() -> None:
    """From here on SIGTERM ends this process as an interrupt does: through what ends those it has started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def outside(machine: Machine, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is none of the ranks but what has to start them."""
    if machine.launcher == "slurm":
        return "SLURM_STEP_ID" not in environment
    alone = machine.devices == 1 and machine.strategy == "ddp"
    return "RANK" not in environment and (machine.launcher == "torchrun" or not alone)


def enter(machine: Machine, environment: MutableMapping[str, str] = os.environ) -> None:
    """Checks devices × nodes against what was started and completes torchrun's environment. From here on the
    signals arrive that `start` has kept back.

    Raises:
        ConfigError: names both numbers and the remedy, where a wrong number of ranks would wait for ever.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    devices, nodes = machine.devices, machine.nodes
    if machine.launcher == "slurm":
        tasks, hosts = int(environment["SLURM_NTASKS"]), int(environment["SLURM_NNODES"])
        if (tasks, hosts) != (devices * nodes, nodes):
            raise ConfigError(
                f"machine: {devices} devices × {nodes} nodes, but srun started {tasks} on {hosts} nodes; "
                f"use --nodes={nodes} --ntasks-per-node={devices}, or correct devices and nodes"
            )
        environment.update(
            RANK=environment["SLURM_PROCID"],
            WORLD_SIZE=str(tasks),
            LOCAL_RANK=environment["SLURM_LOCALID"],
            GROUP_RANK=environment["SLURM_NODEID"],
        )
        environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
        # Below the ports that Linux hands out; jobs on one node differ in their last digits.
        environment.setdefault("MASTER_PORT", str(20000 + int(environment["SLURM_JOB_ID"]) % 10000))
    elif "RANK" in environment:
        started = int(environment["WORLD_SIZE"])
        if started != devices * nodes:
            raise ConfigError(
                f"machine: {devices} devices × {nodes} nodes, but {started} ranks were started; "
                f"use torchrun --nnodes {nodes} --nproc-per-node {devices}, or correct devices and nodes"
            )


def first_host(nodelist: str) -> str:
    """The first host of SLURM's short form: n[03-07,9],m1 -> n03."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodelist)
    assert found is not None
    return "".join(part or "" for part in found.groups())


def start(machine: Machine, stop: StopRequest) -> int:
    """Starts this very command once a device, passes signals on, and returns the exit status. stop: what came
    before, which starts nothing.

    Raises:
        ConfigError: if it is not for us to start it, or the machine has fewer GPUs.
    """
    if machine.launcher == "torchrun":
        raise ConfigError(
            "machine.launcher: torchrun, but it did not start this; use torchrun "
            f"--nnodes {machine.nodes} --nproc-per-node {machine.devices} {shlex.join(sys.argv)}"
        )
    if machine.launcher == "slurm":
        raise ConfigError("machine.launcher: slurm, but srun did not start this; use `mdn submit`")
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < machine.devices:
        raise ConfigError(
            f"machine.devices: {machine.devices}, but this machine has {torch.cuda.device_count()} GPUs; "
            f"use {torch.cuda.device_count()}"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(machine.devices), "GROUP_RANK": "0"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks: list[subprocess.Popen] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    # Kept back until all ranks are there, and by each of them, which inherits that, until it can listen.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if stop.made:
        return REQUEUE
    for number in SIGNALS:
        signal.signal(number, forward)
    try:
        for n in range(machine.devices):
            own = {"RANK": str(n), "LOCAL_RANK": str(n)}
            ranks.append(subprocess.Popen(sys.orig_argv, env=os.environ | shared | own))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return _wait(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def _wait(ranks: list[subprocess.Popen]) -> int:
    """The status of the first rank that failed, or of all; the others then have GRACE seconds to end."""
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        failed = any(rank.returncode not in (None, 0, REQUEUE) for rank in ranks)
        if failed:
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.1)
    codes = [rank.poll() for rank in ranks]
    return next((code for code in codes if code not in (None, 0, REQUEUE)), codes[0] or 0)


@contextmanager
def group() -> Iterator[None]:
    """The process group of the ranks that were started: NCCL on GPUs, Gloo on CPUs. A training that nobody
    started as a rank has none."""
    if "RANK" not in os.environ:
        yield
        return
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def grouped() -> bool:
    """Whether this process is in a group of ranks, maybe of one."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def leads() -> bool:
    """Whether this is the rank that writes the record."""
    return rank() == 0


def share(answer: Callable[[], Answer]) -> Answer:
    """What the leader answers, on every rank; all wait for it. If it raises instead, that ends the others,
    which have nothing to add, with status 1."""
    import torch

    if not grouped():
        return answer()
    box: list[Any] = [None, False]
    try:
        if leads():
            box = [answer(), True]
    finally:
        torch.distributed.broadcast_object_list(box)
    if not box[1]:
        raise SystemExit(1)
    return cast(Answer, box[0])


def wait() -> None:
    """Until every rank is here."""
    share(lambda: None)
