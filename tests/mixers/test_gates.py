"""MDN's gates and all their switches against the formulas as printed, in float64."""

import math

import pytest
import torch

from mdn.mixers.base import HeadGates, bounds
from mdn.mixers.mdn import temperature

from .small import D_MODEL

SWITCHES = [
    {},
    {"tau": "sqrt(d)"},
    {"tau": "sqrt(d/8)"},
    {"tau": "0.5"},
    {"eta": "sigmoid"},
    {"log_mu_min": -0.25},
    {"log_mu_min": None},
    {"alpha_bound": False},
    {"beta_bound": False},
    {"alpha_bound": False, "beta_bound": False},
]


def printed_gates(m, x, tau="sqrt(d/h)", eta="tanh", log_mu_min=-2.0, alpha_bound=True, beta_bound=True):
    H = 2
    divisor = {
        "sqrt(d/h)": math.sqrt(D_MODEL / H),
        "sqrt(d)": math.sqrt(D_MODEL),
        "sqrt(d/8)": math.sqrt(D_MODEL / 8),
    }.get(tau) or float(tau)
    a, b, mu, e = (x @ m.abme.weight.T).split(H, -1)
    eta = torch.tanh(e / divisor) + 1 if eta == "tanh" else 2 / (1 + torch.exp(-e))
    if alpha_bound or beta_bound:
        theta = torch.arctan(eta * torch.exp(m.log_factor))
    log_alpha = -torch.exp(m.A_log) * torch.log1p(torch.exp(a + m.dt_bias))
    if alpha_bound:
        log_alpha = log_alpha + torch.log(torch.cos(theta) ** 2)
    beta = 1 / (1 + torch.exp(-b))
    if beta_bound:
        beta = beta * torch.sin(theta) ** 2
    log_mu = -torch.exp(m.Mu_log) * torch.log1p(torch.exp(mu + m.mu_bias))
    if log_mu_min is not None:
        log_mu = torch.maximum(log_mu, torch.tensor(log_mu_min, dtype=torch.float64))
    return log_alpha, beta, log_mu, eta


@torch.no_grad()
@pytest.mark.parametrize("options", SWITCHES, ids=str)
def test_gates_follow_the_printed_formulas(options, make_mixer):
    mixer = make_mixer("mdn", **options).double()
    x = 3 * torch.randn(2, 31, D_MODEL, dtype=torch.float64)
    gates = mixer.head_gates(x)
    for ours, printed in zip(gates, printed_gates(mixer, x, **options), strict=True):
        torch.testing.assert_close(ours, printed, atol=1e-12, rtol=1e-10)
    log_alpha, beta, log_mu, eta = gates
    assert (log_alpha <= 0).all()
    assert (log_mu <= 0).all()
    assert ((eta > 0) & (eta < 2)).all()
    if options.get("alpha_bound", True) and options.get("beta_bound", True):
        assert (log_alpha.exp() + beta <= 1 + 1e-12).all()


@torch.no_grad()
@pytest.mark.parametrize("options", [*SWITCHES[1:], {"output_correction": False}], ids=str)
def test_every_ablation_changes_the_function(options, make_mixer):
    mixer, plain = make_mixer("mdn", **options), make_mixer("mdn")
    mixer.load_state_dict({k: v for k, v in plain.state_dict().items() if k in mixer.state_dict()})
    x = 3 * torch.randn(2, 31, D_MODEL)
    assert (mixer(x)[0] - plain(x)[0]).abs().max() > 1e-3


@torch.no_grad()
def test_gate_bounds_change_gdn_in_both_gates(make_mixer):
    x = torch.randn(1, 9, D_MODEL)
    bounded, plain = make_mixer("gdn-bounds"), make_mixer("gdn")
    bounded.load_state_dict(plain.state_dict() | {"log_factor": torch.tensor([0.5, -1.0])})
    factor = torch.tensor([0.5, -1.0]).exp()
    log_alpha, beta = plain.head_gates(x)
    log_alpha_bounded, beta_bounded = bounded.head_gates(x)
    torch.testing.assert_close(log_alpha_bounded, log_alpha + torch.log(torch.cos(torch.atan(factor)) ** 2))
    torch.testing.assert_close(beta_bounded, beta * torch.sin(torch.atan(factor)) ** 2)


def test_bounds_stay_exact_where_the_angle_does_not():
    log_factor = torch.tensor([-30.0, -12.0, 0.0, 12.0, 30.0], requires_grad=True)
    log_alpha_max, beta_max = bounds(1.0, log_factor)
    exact = log_factor.detach().double()
    torch.testing.assert_close(log_alpha_max.double(), -torch.log1p(torch.exp(2 * exact)), rtol=1e-6, atol=0)
    torch.testing.assert_close(beta_max.double(), torch.sigmoid(2 * exact), rtol=1e-6, atol=0)
    (log_alpha_max + beta_max).sum().backward()
    assert log_factor.grad.isfinite().all()


def test_head_gates_are_computed_in_float32_under_autocast():
    gates = HeadGates(D_MODEL, 2, 3)
    x = torch.randn(2, 5, D_MODEL)
    with torch.autocast("cpu", torch.bfloat16):
        found = gates(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x @ gates.weight.T)


def test_temperatures_of_the_paper_and_of_the_release():
    assert temperature("sqrt(d)", 1024, 6) == 32
    assert temperature("sqrt(d/8)", 2048, 6) == 16
    assert temperature("sqrt(d/h)", 1024, 4) == 16
    assert temperature("2.5", 1024, 4) == 2.5
