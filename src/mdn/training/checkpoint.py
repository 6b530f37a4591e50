"""Checkpoints that survive a kill at any moment: temporary name, fsync, rename, checksum, the last K kept."""

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from mdn.tracking.record import replacing

NAME = re.compile(r"step-(\d+)\.ckpt")


def save(folder: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Lets `write` fill a temporary file, then gives it its name and drops all but the newest `keep`.

    The checksum lies beside it, written first: a checkpoint under its final name is always complete.

    Raises:
        OSError: if the disk is full or gone; what there was before is as it was.
    """
    path = folder / f"step-{step:08d}.ckpt"
    try:
        with replacing(path) as temporary:
            write(temporary)
            with temporary.open("rb+") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            path.with_suffix(".sha256").write_text(digest + "\n")
    except OSError as error:
        free = shutil.disk_usage(folder).free / 2**30
        raise OSError(
            error.errno,
            f"{path}: {error.strerror}, {free:.1f} GiB are free; make room and start again, "
            f"{'it resumes from ' + last[1].name if (last := newest(folder)) else 'there is no earlier one'}",
        ) from error
    for old in _by_age(folder)[:-keep]:
        old.unlink()
        old.with_suffix(".sha256").unlink(missing_ok=True)
    return path


def newest(folder: Path) -> tuple[int, Path] | None:
    """Step and path of the newest checkpoint whose checksum is right; a damaged one is passed over with a
    warning."""
    for path in reversed(_by_age(folder)):
        stated = path.with_suffix(".sha256")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if stated.exists() and stated.read_text().strip() == digest:
            return _step(path), path
        warnings.warn(f"{path}: its checksum is wrong; resuming from the one before", stacklevel=2)
    return None


def _by_age(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*.ckpt") if NAME.fullmatch(p.name)), key=_step)


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])
