"""Who starts the ranks, and what is refused before anything waits for a rank that never comes."""

import subprocess
import sys

import pytest

from mdn.config import ConfigError, Machine
from mdn.training import launch

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711042",
    "SLURM_NTASKS": "16",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("machine", "environment", "outside"),
    [
        (Machine(1), {}, False),
        (Machine(1, devices=2), {}, True),
        (Machine(1, devices=2), TORCHRUN, False),
        (Machine(1, launcher="torchrun"), {}, True),
        (Machine(1, devices=2, launcher="torchrun"), TORCHRUN, False),
        (Machine(1, launcher="slurm"), {}, True),
        (
            Machine(1, launcher="slurm"),
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"},
            True,
        ),  # no srun in the script
        (Machine(1, launcher="slurm"), SLURM, False),
    ],
)
def test_a_process_knows_whether_it_is_a_rank(machine, environment, outside):
    assert launch.outside(machine, environment) == outside


def test_slurms_environment_becomes_torchruns():
    environment = dict(SLURM)
    launch.enter(Machine(1, devices=8, nodes=2, launcher="slurm"), environment)
    assert (
        environment.items()
        >= {
            "RANK": "11",
            "WORLD_SIZE": "16",
            "LOCAL_RANK": "3",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "gpu03",
            "MASTER_PORT": "21042",
        }.items()
    )
    given = SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    launch.enter(Machine(1, devices=8, nodes=2, launcher="slurm"), given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "1234")


@pytest.mark.parametrize(
    ("machine", "environment", "message"),
    [
        (
            Machine(1, devices=4, nodes=4, launcher="slurm"),
            SLURM,
            "4 devices × 4 nodes, but srun started 16 on 2",
        ),
        (Machine(1, devices=4, nodes=2, launcher="slurm"), SLURM, "--nodes=2 --ntasks-per-node=4"),
        (Machine(1, devices=4, launcher="torchrun"), TORCHRUN, "but 2 ranks were started"),
        (Machine(1), TORCHRUN, "--nproc-per-node 1"),
    ],
)
def test_other_numbers_than_the_machines_are_refused(machine, environment, message):
    with pytest.raises(ConfigError, match=message):
        launch.enter(machine, dict(environment))


@pytest.mark.parametrize(
    ("launcher", "remedy"), [("torchrun", "use torchrun --nnodes 2"), ("slurm", "mdn submit")]
)
def test_what_someone_else_has_to_start_says_so(launcher, remedy):
    with pytest.raises(ConfigError, match=remedy):
        launch.start(Machine(1, nodes=2, launcher=launcher), launch.StopRequest())


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("n[03,07-09],m1", "n03"),
        ("a,b", "a"),
        ("c[5]-ib", "c5-ib"),
        ("x1,y[1-2]", "x1"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert launch.first_host(nodes) == first


def test_one_rank_answers_for_itself():
    assert launch.share(lambda: 3) == 3
    launch.wait()


STARTING = """
import os, signal, subprocess, sys, time
from mdn.config import Machine
from mdn.training import launch
stop, popen = launch.StopRequest(), subprocess.Popen
if "RANK" in os.environ:
    time.sleep(0.3)  # imports
stop.listen()
if "RANK" in os.environ:
    launch.enter(Machine(1, devices=2))
    sys.exit(launch.REQUEUE if stop.made else 0)
def spawn(*command, **options):
    rank = popen(*command, **options)
    if sys.argv[1] == "between two ranks":
        signal.raise_signal(signal.SIGTERM)
    return rank
subprocess.Popen = spawn
if sys.argv[1] == "before the first rank":
    signal.raise_signal(signal.SIGTERM)
sys.exit(launch.start(Machine(1, devices=2), stop))
"""


@pytest.mark.parametrize(
    ("when", "status"), [("before the first rank", 75), ("between two ranks", 75), ("never", 0)]
)
def test_a_signal_while_ranks_start_reaches_them(when, status):
    done = subprocess.run([sys.executable, "-c", STARTING, when], timeout=100)
    assert done.returncode == status
