"""Digests: equal for what computes the same, different for what does not."""

import hashlib
import json
import sys
from types import ModuleType

import pytest

from mdn.tracking import manifest

SOURCE = '''"""What it does."""

X = 1


def f(a):
    """Doubles."""
    return 2 * a
'''
SAME = {
    "comment": SOURCE.replace("X = 1", "X = 1  # one"),
    "docstring": SOURCE.replace("Doubles", "Twice"),
    "docstring of the module": SOURCE.replace("What it does", "Else"),
    "layout": SOURCE.replace("\n\n", "\n\n\n").replace("2 * a", "(2 * a)"),
}
OTHER = {
    "constant": SOURCE.replace("X = 1", "X = 1.0"),
    "expression": SOURCE.replace("2 * a", "a * 2"),
    "name": SOURCE.replace("f(a)", "g(a)"),
    "docstring that is used": SOURCE.replace("X = 1", 'X = """What it does."""'),
}


@pytest.fixture
def digest_with(tmp_path, monkeypatch):
    """digest_with(source, name) -> the code digest while a module of that name and source is imported."""

    def digest(source: str, name: str = "mdn.models.probe") -> str:
        path = tmp_path / "probe.py"
        path.write_text(source)
        module = ModuleType(name)
        module.__file__ = str(path)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, module)
            return manifest.code_digest()

    return digest


@pytest.mark.parametrize("change", SAME)
def test_what_computes_the_same_has_the_same_code_digest(digest_with, change):
    assert SAME[change] != SOURCE
    assert digest_with(SAME[change]) == digest_with(SOURCE)


@pytest.mark.parametrize("change", OTHER)
def test_other_code_has_another_digest(digest_with, change):
    assert digest_with(OTHER[change]) != digest_with(SOURCE)


def test_only_code_that_computes_counts(digest_with):
    without = manifest.code_digest()
    assert digest_with(SOURCE, "mdn.reports.probe") == without
    assert digest_with(SOURCE, "elsewhere.probe") == without
    assert digest_with(SOURCE, "mdn_kernels.probe") != without
    assert digest_with(SOURCE, "mdn_kernels.probe") != digest_with(SOURCE, "mdn_kernels.other")


def test_a_file_digest_is_the_head_of_its_sha256(tmp_path):
    path = tmp_path / "shard.bin"
    path.write_bytes(bytes(range(256)) * 5000)
    assert manifest.file_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def test_the_environment_is_strict_json_and_names_versions():
    import torch

    found = json.loads(json.dumps(manifest.environment(), allow_nan=False))
    assert "gpu_shared_by" not in found
    assert found["versions"]["torch"] == torch.__version__
    assert {"commit", "dirty", "python", "host", "gpu"} <= found.keys()


def test_the_environment_names_how_many_share_the_gpu(monkeypatch):
    monkeypatch.setenv("MDN_GPU_SHARED_BY", "4")
    assert manifest.environment()["gpu_shared_by"] == 4


def test_the_environment_does_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = manifest.environment()
    assert found["commit"] is None
    assert found["dirty"] is False
