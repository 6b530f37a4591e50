"""Checkpoints that survive a kill at any moment: temporary name, fsync, rename, checksum, the last K kept."""

import hashlib
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from mdn.files import replacing

NAME = re.compile(r"step-(\d+)\.ckpt")


def save(folder: Path, step: int, write: Callable[[Path], None], keep: int) -> Path:
    """Lets `write` fill a temporary file, then gives it its name and drops all but the newest `keep`. Those
    of a later step are dropped too: they are damaged, as the training has resumed from one before.

    The checksum lies beside it, written first: a checkpoint under its final name is always complete.

    Raises:
        OSError: if the disk is full or gone; what there was before is as it was.
    """
    path = folder / f"step-{step:08d}.ckpt"
    try:
        with replacing(path) as temporary:
            write(temporary)
            with replacing(path.with_suffix(".sha256")) as stated:
                stated.write_text(_digest(temporary) + "\n")
    except OSError as error:
        free = shutil.disk_usage(folder).free / 2**30
        raise OSError(
            error.errno,
            f"{path}: {error.strerror}, {free:.1f} GiB are free; make room and start again, "
            f"{'it resumes from ' + last[1].name if (last := newest(folder)) else 'there is no earlier one'}",
        ) from error
    earlier = [old for old in _by_age(folder) if _step(old) <= step]
    for old in set(_by_age(folder)) - set(earlier[-keep:]):
        old.unlink()
        old.with_suffix(".sha256").unlink(missing_ok=True)
    return path


def newest(folder: Path) -> tuple[int, Path] | None:
    """Step and path of the newest checkpoint whose checksum is right; a damaged one, also one that the disk
    does not give back, is passed over with a warning."""
    for path in reversed(_by_age(folder)):
        try:
            if path.with_suffix(".sha256").read_text().strip() == _digest(path):
                return _step(path), path
            why = "its checksum is wrong"
        except (OSError, UnicodeDecodeError) as error:
            why = f"it cannot be checked ({error})"
        warnings.warn(f"{path}: {why}; resuming from the one before", stacklevel=2)
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_age(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*.ckpt") if NAME.fullmatch(p.name)), key=_step)


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])
