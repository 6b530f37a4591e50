"""`mdn doctor`: finds a version whose gradients are wrong, and lets the known exception be."""

import sys
import types
from dataclasses import replace

import pytest
import torch.nn.functional as F

from mdn_kernels import doctor, registry
from mdn_kernels.gated_delta_rule import chunk


def findings(subject):
    return [finding for finding in doctor.examine() if finding.subject.startswith(subject)]


@pytest.fixture(autouse=True)
def _one_operator(monkeypatch):
    monkeypatch.setattr(doctor, "OPERATORS", ("gated_delta_rule",))


def test_the_versions_here_are_right():
    found = {finding.subject.split()[1]: finding.ok for finding in findings("gated_delta_rule")}
    assert found.pop("recurrent")
    assert found.pop("chunk")
    assert set(found.values()) <= {True, None}  # None: needs a card


def registered(monkeypatch, name, forward, **changes):
    """A version of the gated delta rule with this forward, else as `chunk`."""
    module = types.ModuleType(f"{name}_version")
    module.forward = forward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    version = replace(registry.get("gated_delta_rule", "chunk"), name=name, module=module.__name__, **changes)
    monkeypatch.setitem(registry._versions["gated_delta_rule"], name, version)


def test_a_wrong_gradient_is_found_though_the_outputs_are_right(monkeypatch):
    def forward(q, k, v, log_alpha, beta, **keywords):
        return chunk.forward(q, k, v, log_alpha.detach() + 0 * log_alpha, beta, **keywords)

    registered(monkeypatch, "wrong", forward)
    (finding,) = findings("gated_delta_rule wrong")
    assert finding.ok is False
    assert "dlog_alpha" in finding.text


def test_a_wrong_gradient_of_the_normalisation_is_found(monkeypatch):
    def forward(q, k, *others, normalize_qk, **keywords):
        if normalize_qk:
            q, k = F.normalize(q, dim=-1), k / k.detach().norm(dim=-1, keepdim=True)
        return chunk.forward(q, k, *others, normalize_qk=False, **keywords)

    registered(monkeypatch, "wrong", forward)
    (finding,) = findings("gated_delta_rule wrong")
    assert finding.ok is False
    assert "dk" in finding.text


def test_a_version_that_decodes_is_looked_at_for_one_token_without_gradients(monkeypatch):
    def forward(q, *others, **keywords):
        assert q.shape[1] == 1
        return chunk.forward(q.detach(), *others, **keywords)

    registered(monkeypatch, "step", forward, decodes=True)
    (finding,) = (x for x in findings("gated_delta_rule step") if x.subject.endswith("step"))
    assert finding.ok


def test_a_version_that_is_known_to_fail_is_no_alarm(monkeypatch):
    monkeypatch.setattr(doctor, "OPERATORS", ("momentum_delta_rule",))
    monkeypatch.setattr(doctor, "GATES", ("log_mu=-2",))
    (finding,) = findings("momentum_delta_rule v1_logspace")
    assert finding.ok is None
    assert "inf" in finding.text


@pytest.mark.parametrize(
    ("triton", "bad"), [("3.3.1", 0), ("3.6.0", 1), ("3.7.0", 1), ("3.7.1", 0), (None, 0)]
)
def test_known_bad_compilers_are_named(triton, bad):
    assert len(list(doctor._known_bad(triton, major=9))) == bad
    assert not list(doctor._known_bad(triton, major=8))
