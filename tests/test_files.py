"""Files and locks through kills, errors and other processes."""

import errno
import fcntl
import platform
import subprocess
import sys

import pytest

from mdn.files import Busy, locked

HOLDER = """
import sys, time
from pathlib import Path
from mdn.files import locked
with locked(Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_names_its_process_and_ends_with_it_even_by_a_kill(tmp_path):
    path = tmp_path / "mdn" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Busy) as refused, locked(path, wait=False):
            pass
    finally:
        holder.kill()
        holder.communicate()
    said = str(refused.value)
    assert said.startswith(f"{path.parent}: in use by process {holder.pid} on {platform.node()} since 20")
    assert said.endswith("; wait until it ends or end it there, then start again")
    assert "\n" not in said
    with locked(path, wait=False):
        assert str(holder.pid) not in path.read_text()


def test_a_file_system_without_locks_costs_a_warning(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    warned = pytest.warns(UserWarning, match="no lock to be had here .No locks available.")
    with warned, locked(tmp_path / "lock", wait=False):
        assert (tmp_path / "lock").exists()
