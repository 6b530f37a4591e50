"""Checkpoints on disk: atomic, checked, the last K kept."""

import errno
import os
from pathlib import Path

import pytest

from mdn.training import checkpoint


def write(text: str):
    return lambda path: path.write_text(text)


def test_the_last_k_are_kept_and_the_newest_is_found(tmp_path):
    for step in (5, 10, 20, 100):
        checkpoint.save(tmp_path, step, write(f"at {step}"), keep=2)
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["step-00000020.ckpt", "step-00000100.ckpt"]
    assert len(list(tmp_path.iterdir())) == 4
    step, path = checkpoint.newest(tmp_path)
    assert (step, path.read_text()) == (100, "at 100")


@pytest.mark.parametrize("damage", ["truncated", "changed", "no checksum", "unreadable", "checksum of bytes"])
def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path, damage):
    checkpoint.save(tmp_path, 1, write("first"), keep=2)
    last = checkpoint.save(tmp_path, 2, write("second"), keep=2)
    if damage == "truncated":
        last.write_text("sec")
    elif damage == "changed":
        last.write_text("sacond")
    elif damage == "unreadable":
        last.unlink()
        last.mkdir()
    elif damage == "checksum of bytes":
        last.with_suffix(".sha256").write_bytes(b"\xff\x00")
    else:
        last.with_suffix(".sha256").unlink()
    with pytest.warns(UserWarning, match="step-00000002"):
        step, path = checkpoint.newest(tmp_path)
    assert (step, path.read_text()) == (1, "first")


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_does_not_outlive_the_good_ones(tmp_path, keep):
    """The training resumed before it; the next checkpoint must not be dropped as the older of the two."""
    for step in (4, 8):
        checkpoint.save(tmp_path, step, write(f"at {step}"), keep=2)
    (tmp_path / "step-00000008.ckpt").write_text("damaged")
    checkpoint.save(tmp_path, 6, write("at 6"), keep=keep)
    assert checkpoint.newest(tmp_path)[0] == 6
    assert len(list(tmp_path.glob("*.ckpt"))) == keep


def test_nothing_has_its_name_before_the_disk_has_it(tmp_path, monkeypatch):
    done, replace = [], Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.readlink(f"/proc/self/fd/{file}")))
    monkeypatch.setattr(Path, "replace", lambda path, to: (done.append(f"-> {to}"), replace(path, to)))
    path = str(checkpoint.save(tmp_path, 1, write("first"), keep=1))
    stated = path.replace(".ckpt", ".sha256")
    folder = str(tmp_path)
    assert done == [stated + ".tmp", f"-> {stated}", folder, path + ".tmp", f"-> {path}", folder]


def test_a_write_that_is_cut_short_leaves_the_one_before(tmp_path):
    checkpoint.save(tmp_path, 1, write("first"), keep=2)

    def killed(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, killed, keep=2)
    assert checkpoint.newest(tmp_path)[0] == 1


def test_a_full_disk_leaves_no_half_and_says_what_to_do(tmp_path):
    checkpoint.save(tmp_path, 1, write("first"), keep=1)

    def full(path):
        path.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        OSError, match=r"No space left on device, \d.* resumes from step-00000001"
    ) as full_disk:
        checkpoint.save(tmp_path, 2, full, keep=1)
    assert full_disk.value.errno == errno.ENOSPC
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.ckpt", "step-00000001.sha256"]
    with pytest.raises(OSError, match="there is no earlier one"):
        checkpoint.save(tmp_path / "new", 1, full, keep=1)


def test_nothing_there_is_none(tmp_path):
    assert checkpoint.newest(tmp_path / "none") is None
