"""Files that a kill, a full disk or a loss of power leaves whole, and locks that end with their process."""

import fcntl
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to, which becomes `path` when all is well and on the disk; else nothing of it
    is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        settle(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def settle(temporary: Path, path: Path) -> None:
    """Gives a file its name once the disk has it: after a loss of power its size alone would say nothing."""
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Busy(OSError):
    """Another process holds a lock."""


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock on the file `path`, which says whose it is. The file is made and stays: what counts is
    the kernel's lock on it, which ends with its process, however that ends. A file system that has no locks,
    as some NFS, costs a warning.

    Raises:
        Busy: names who has it, unless `wait`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise Busy(
                f"{path.parent}: in use by {file.read().strip() or 'another process'}; "
                "wait until it ends or end it there, then start again"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{path}: no lock to be had here ({error.strerror}); see that only one process writes there",
                stacklevel=3,
            )
        file.truncate(0)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(f"process {os.getpid()} on {platform.node()} since {now}\n")
        file.flush()
        yield
