"""A SLURM of two nodes on this machine, from Debian's packages, for as long as a test runs."""

import getpass
import os
import socket
import subprocess
import time
from pathlib import Path

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=2000
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """Daemons with all their files in `folder`; `environment` is what a client needs."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []
        ports = _free_ports(3)
        (folder / "state").mkdir()
        (folder / "munge").mkdir(mode=0o700)
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o600)
        host = socket.gethostname().split(".")[0]
        conf = folder / "slurm.conf"
        conf.write_text(
            CONFIGURATION.format(
                host=host,
                port=ports[0],
                first=ports[1],
                last=ports[1] + 1,
                user=getpass.getuser(),
                folder=folder,
            )
        )
        self.environment = os.environ | {"SLURM_CONF": str(conf), "MASTER_ADDR": "127.0.0.1"}
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
        munge += [f"--key-file={folder}/munge/key", f"--log-file={folder}/munge/log"]
        munge += [f"--pid-file={folder}/munge/pid", f"--seed-file={folder}/munge/seed"]
        self._start(munge)
        self.wait(lambda: (folder / "munge.socket").exists(), 20, "munged")
        self._start(["slurmctld", "-D", "-f", str(conf)])
        for node in ("n1", "n2"):
            (folder / f"spool-{node}").mkdir()
            self._start(["slurmd", "-D", "-f", str(conf), "-N", node])
        self.wait(lambda: self("sinfo", "-hN", "-o%T", check=False).split().count("idle") >= 4, 60, "nodes")

    def _start(self, command: list[str]) -> None:
        log = (self.folder / f"{command[0]}.out").open("a")
        self.daemons.append(
            subprocess.Popen(command, env=getattr(self, "environment", None), stdout=log, stderr=log)
        )

    def __call__(self, *command: str, check: bool = True, text: str | None = None, cwd=None) -> str:
        done = subprocess.run(
            command, env=self.environment, input=text, cwd=cwd, capture_output=True, text=True, timeout=180
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED …"""
        words = self("scontrol", "show", "job", "-o", job).split()
        return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))

    def wait(self, reached, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"{what}: not in {seconds} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)

    def stop(self) -> None:
        self("scancel", "--me", check=False)
        time.sleep(1)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _free_ports(count: int) -> list[int]:
    """The first of `count` free ports in a row, and those after it."""
    for first in range(17000 + os.getpid() % 500 * 4, 30000, 4):
        try:
            sockets = [socket.create_server(("127.0.0.1", first + n)) for n in range(count)]
        except OSError:
            continue
        for one in sockets:
            one.close()
        return [first + n for n in range(count)]
    raise OSError("no free ports")
