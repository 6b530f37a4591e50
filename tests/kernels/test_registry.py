"""The registry of kernel versions: order, choice, limits, lazy imports."""

import subprocess
import sys

import pytest
import torch

from mdn_kernels import registry
from mdn_kernels.registry import KernelVersion, choose, get, register, select, versions

CALL = {"T": 64, "K": 64, "V": 64}


def version(name, **fields):
    defaults = {
        "op": "op",
        "module": "no.such.module",
        "devices": ("cpu", "cuda"),
        "dtypes": (torch.float32, torch.bfloat16),
    }
    return KernelVersion(name=name, **(defaults | fields))


@pytest.fixture(autouse=True)
def _three_versions(monkeypatch):
    monkeypatch.setattr(registry, "_versions", {})
    register(version("recurrent", dtypes=(torch.float64, torch.float32)))
    register(version("old"))
    register(version("paper", automatic=False))
    register(version("new", devices=("cuda",), dtypes=(torch.bfloat16,), max_key=128, max_value=256))


def test_versions_are_listed_oldest_first():
    assert [v.name for v in versions("op")] == ["recurrent", "old", "paper", "new"]


@pytest.mark.parametrize(
    ("device", "dtype", "change", "expected"),
    [
        ("cpu", torch.float32, {}, "old"),
        ("cuda", torch.bfloat16, {}, "new"),
        (torch.device("cuda", 3), torch.bfloat16, {}, "new"),
        ("cuda", torch.float32, {}, "old"),
        ("cuda", torch.bfloat16, {"K": 128, "V": 256}, "new"),
        ("cuda", torch.bfloat16, {"K": 129}, "old"),
        ("cuda", torch.bfloat16, {"V": 257}, "old"),
        ("cpu", torch.float64, {}, "recurrent"),
        ("cpu", torch.float32, {"T": 1}, "recurrent"),
    ],
)
def test_choose_takes_the_newest_automatic_version_that_fits(device, dtype, change, expected):
    assert choose("op", device, dtype, **(CALL | change)).name == expected


def test_choose_gives_the_reason_of_each_version_when_none_fits():
    with pytest.raises(
        ValueError, match=r"new runs on cuda, not on cpu; old takes .*float16; recurrent takes"
    ):
        choose("op", "cpu", torch.float16, **CALL)


def test_select_takes_a_named_version_that_is_not_automatic():
    assert select("op", "paper", "cpu", torch.float32, **CALL).name == "paper"
    assert select("op", None, "cpu", torch.float32, **CALL).name == "old"


@pytest.mark.parametrize(
    ("device", "dtype", "change", "message"),
    [
        ("cpu", torch.bfloat16, {}, "runs on cuda, not on cpu; versions that fit: old, paper"),
        ("cuda", torch.float32, {}, "takes torch.bfloat16, not torch.float32"),
        ("cuda", torch.bfloat16, {"K": 192}, "keys of at most 128 channels, not K=192"),
        ("cuda", torch.bfloat16, {"V": 512}, "values of at most 256 channels, not V=512"),
    ],
)
def test_select_refuses_a_named_version_beyond_its_limits(device, dtype, change, message):
    with pytest.raises(ValueError, match=message):
        select("op", "new", device, dtype, **(CALL | change))


def test_one_token_goes_to_the_newest_version_that_decodes():
    register(version("step", devices=("cuda",), decodes=True))
    register(version("newer", devices=("cuda",)))
    for T, name in ((1, "step"), (2, "newer")):
        assert choose("op", "cuda", torch.float32, T=T, K=64, V=64).name == name
    assert choose("op", "cpu", torch.float32, T=1, K=64, V=64).name == "recurrent"
    assert choose("op", "cuda", torch.float64, T=1, K=64, V=64).name == "recurrent"
    with pytest.raises(ValueError, match="'step' decodes one token a call, not T=64; versions that fit: old"):
        select("op", "step", "cuda", torch.bfloat16, **CALL)


def test_unknown_names_are_answered_with_what_exists():
    with pytest.raises(ValueError, match="no version 'v7'; use one of recurrent, old, paper, new"):
        get("op", "v7")
    with pytest.raises(ValueError, match=r"no operator 'other' is registered \(registered: op\)"):
        versions("other")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="already has a version 'old'"):
        register(version("old"))


def test_the_module_is_imported_by_load_only():
    with pytest.raises(ModuleNotFoundError, match="no"):
        get("op", "old").load()


def test_importing_an_operator_imports_none_of_its_versions():
    code = (
        "import sys, mdn_kernels.momentum_delta_rule as op\n"
        "from mdn_kernels.registry import versions\n"
        "assert versions(op.OP)\n"
        "assert not [v.module for v in versions(op.OP) if v.module in sys.modules]\n"
        "assert all(callable(v.load()) for v in versions(op.OP) if 'cpu' in v.devices)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
