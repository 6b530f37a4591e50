"""Checkpoints on disk: atomic, checked, the last K kept."""

import errno
import os

import pytest

from mdn.training import checkpoint


def write(text: str):
    return lambda path: path.write_text(text)


def test_the_last_k_are_kept_and_the_newest_is_found(tmp_path):
    for step in (5, 10, 100, 20):
        checkpoint.save(tmp_path, step, write(f"at {step}"), keep=2)
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["step-00000020.ckpt", "step-00000100.ckpt"]
    assert len(list(tmp_path.iterdir())) == 4
    step, path = checkpoint.newest(tmp_path)
    assert (step, path.read_text()) == (100, "at 100")


@pytest.mark.parametrize("damage", ["truncated", "changed", "no checksum"])
def test_a_damaged_one_is_passed_over_with_a_warning(tmp_path, damage):
    checkpoint.save(tmp_path, 1, write("first"), keep=2)
    last = checkpoint.save(tmp_path, 2, write("second"), keep=2)
    if damage == "truncated":
        last.write_text("sec")
    elif damage == "changed":
        last.write_text("sacond")
    else:
        last.with_suffix(".sha256").unlink()
    with pytest.warns(UserWarning, match="step-00000002"):
        step, path = checkpoint.newest(tmp_path)
    assert (step, path.read_text()) == (1, "first")


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
