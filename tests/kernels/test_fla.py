"""Version `fla`: refused where FLA is missing or miscompiled, and right where it is not (on a card)."""

from importlib.util import find_spec

import pytest
import torch

from mdn_kernels.comba import comba
from mdn_kernels.common import fla
from mdn_kernels.gated_delta_rule import gated_delta_rule
from mdn_kernels.kda import kda
from mdn_kernels.registry import choose, get
from mdn_kernels.ssd import ssd
from mdn_kernels.testing import errors, make_inputs

OPS = {op.__name__: op for op in (gated_delta_rule, comba, kda, ssd)}


def pretend(monkeypatch, *, triton, capability=9, installed=True):
    module = type("Triton", (), {"__version__": triton})
    monkeypatch.setattr(fla, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(fla, "version", lambda name: triton)
    monkeypatch.setattr(fla, "import_module", lambda name: {"triton": module, "fla.ops.x": torch}[name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))


def test_without_fla_it_says_what_to_install(monkeypatch):
    pretend(monkeypatch, triton="3.7.1", installed=False)
    with pytest.raises(ImportError, match=r"pip install flash-linear-attention==0\.6\.0"):
        fla.fla_operator("x", "sin")
    assert not fla.trusted()


@pytest.mark.parametrize("triton", ["3.4.0", "3.6.0", "3.7.0+git123"])
def test_a_triton_that_miscompiles_it_is_refused_on_hopper(monkeypatch, triton):
    pretend(monkeypatch, triton=triton)
    with pytest.raises(ImportError, match=f"Triton {triton}".replace("+", r"\+") + ".*use Triton 3.7.1"):
        fla.fla_operator("x", "sin")
    assert not fla.trusted()


@pytest.mark.parametrize(("triton", "capability"), [("3.3.1", 9), ("3.7.1", 9), ("3.6.0", 8)])
def test_other_tritons_and_cards_are_not(monkeypatch, triton, capability):
    pretend(monkeypatch, triton=triton, capability=capability)
    assert fla.fla_operator("x", "sin") is torch.sin
    assert fla.trusted() == (triton != "3.6.0")


def test_offsets_of_packed_sequences_go_where_the_tokens_are():
    given = []

    def chunk(*tensors, cu_seqlens, **keywords):
        given.append(cu_seqlens)
        return tensors[2], None

    q = torch.ones(1, 8, 2, 4, device="meta")
    fla.called_as_version(chunk)(
        q,
        q,
        q,
        scale=1.0,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=torch.tensor([0, 8], dtype=torch.int32),
        normalize_qk=False,
    )
    assert (given[0].device.type, given[0].dtype) == ("meta", torch.int64)


@pytest.mark.parametrize("name", OPS)
def test_a_default_exists_with_and_without_fla(name):
    expected = {"gated_delta_rule": "triton", "comba": "triton"}.get(
        name, "fla" if fla.trusted() else "chunk"
    )
    assert choose(name, "cuda", torch.bfloat16, 64, 128, 128).name == expected
    assert choose(name, "cuda", torch.float32, 64, 128, 128).name in ("triton", "chunk")
    assert get(name, "fla").misfit("cuda", torch.float32, 64, 64)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_matches_float64_recurrence(op, packed):
    inputs = make_inputs(
        op,
        B=1 if packed else 2,
        T=300,
        H=4,
        K=128,
        V=64 if op is ssd else 128,
        state=True,
        sequences=3 if packed else None,
        per_channel=("log_alpha",) if op is kda else (),
        dtype=torch.bfloat16,
        device="cuda",
    )
    cu_seqlens = torch.tensor([0, 70, 71, 300], device="cuda") if packed else None
    for normalize in (False, True):
        found = errors(op, "fla", inputs, cu_seqlens=cu_seqlens, normalize_qk=normalize)
        assert max(found.values()) < 0.03, found
