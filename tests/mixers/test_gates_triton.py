"""MDN's gates by their Triton kernels against its own formulas in float64: compiled on a card, or interpreted
on the CPU, where the tests run in their own process (see tests/interpreter.py).
"""

from copy import deepcopy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from tests.interpreter import interpret, interpreted_only, starts_interpreter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from mdn.config import Shape
from mdn.mixers.mdn import Mdn
from mdn.options import MdnOptions
from mdn_kernels.common import fused
from mdn_kernels.momentum_delta_rule import gates_triton
from mdn_kernels.testing import relative_error

WHERE = [
    pytest.param(
        "cpu",
        id="interpreted",
        marks=interpreted_only,
    ),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


def everywhere(test):
    return pytest.mark.parametrize("device", WHERE)(pytest.mark.usefixtures("_launches")(test))


PARAMETERS = ("A_log", "dt_bias", "Mu_log", "mu_bias", "log_factor")
OPTIONS = [
    {"log_mu_min": log_mu_min, "alpha_bound": alpha_bound, "beta_bound": beta_bound, "eta": eta}
    for log_mu_min, alpha_bound, beta_bound, eta in product(
        (None, -0.5), (True, False), (True, False), ("tanh", "sigmoid")
    )
]
EXTREME = 1e-5  # a GPU's exp(x) is off by some (4 + |x|) / 2²⁴, which is 1.4e-6 at −20, and s² has it twice


pytestmark = pytest.mark.usefixtures("poisoned")


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__, "-k", "interpreted")


@pytest.fixture
def _launches(monkeypatch):
    """On the CPU, too, float64 alone is torch's."""
    monkeypatch.setattr(fused, "launches", lambda *tensors: all(x.dtype != torch.float64 for x in tensors))


def random(*shape, device, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def made(H, device, **options):
    """A mixer whose `head_gates` is given a, b, m and e instead of the tokens."""
    mixer = Mdn(4 * H, Shape(layers=1, heads=H, head_k=4, head_v=4), MdnOptions(**options))
    mixer.abme = torch.nn.Identity()
    with torch.no_grad():
        for seed, parameter in enumerate(mixer.parameters()):
            parameter.copy_(random(*parameter.shape, device="cpu", seed=seed))
    return mixer.to(device)


def results(mixer, abme, gradients):
    """The gates, and the gradients of a, b, m and e and of the parameters; None: the gate is not used."""
    abme = abme.detach().requires_grad_()
    gates = mixer.head_gates(abme)
    used, given = zip(
        *((gate, d.to(gate)) for gate, d in zip(gates, gradients, strict=True) if d is not None), strict=True
    )
    wanted = [abme, *(p for name in PARAMETERS if (p := getattr(mixer, name)) is not None)]
    found = torch.autograd.grad(used, wanted, given, materialize_grads=True)
    return [*(gate.detach() for gate in gates), *found]


def compare(mixer, abme, gradients):
    found = results(mixer, abme, gradients)
    expected = results(deepcopy(mixer).double(), abme.double(), gradients)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape
    assert all(gate.is_contiguous() for gate in found[:4])
    return found, expected


def check(mixer, abme, gradients):
    found, expected = compare(mixer, abme, gradients)
    errors = [
        relative_error(one, other) if other.any() else one.norm().item()
        for one, other in zip(found, expected, strict=True)
    ]
    assert max(errors[:4]) < 1e-6, errors
    assert max(errors[4:]) < 3e-6, errors


def inputs(B, T, H, device):
    """a, b, m and e, and gradients of the gates whose parts in one of theirs all have the same sign: sums of
    them that cancel would have no digits to compare."""
    abme = 3 * random(B, T, 4 * H, device=device, seed=10)
    signs = (-1, 1, -1, 1)
    return abme, [sign * random(B, T, H, device=device, seed=11 + n).abs() for n, sign in enumerate(signs)]


@everywhere
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_matches_float64(options, device):
    check(made(6, device, **options), *inputs(2, 37, 6, device))


@everywhere
@pytest.mark.parametrize(
    "shape", [(1, 1, 5), (2, 37, 1), (1, 1100, 1), (2, 37, 9), (3, 5, 16), (1, 2, 700)], ids=str
)
def test_tiles_of_any_shape(shape, device):
    check(made(shape[-1], device), *inputs(*shape, device))


@everywhere
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_extreme_values_keep_their_digits_one_by_one(options, device):
    values = torch.tensor([-100, -20, -1e-6, 0, 1e-6, 20, 100])
    T, H = 150, 6
    mixer = made(H, device, tau="16", **options)
    for name, given in {
        "A_log": [-8, 8, -8, 8, 0, 0],
        "dt_bias": [0] * H,
        "Mu_log": [8, -8, 0, 0, -8, 8],
        "mu_bias": [0] * H,
        "log_factor": [-20, -14, -5, 0, 5, 10],
    }.items():
        if (parameter := getattr(mixer, name)) is not None:
            parameter.data.copy_(torch.tensor(given))
    drawn = torch.randint(len(values), (1, T, 4 * H), generator=torch.Generator().manual_seed(0))
    _, gradients = inputs(1, T, H, device)
    for one, other in zip(*compare(mixer, values[drawn].to(device), gradients), strict=True):
        assert one.isfinite().all()
        assert ((one - other).abs() <= EXTREME * other.abs() + 1e-37).all()


@everywhere
def test_the_bound_of_log_mu_has_clamps_gradient(device):
    mixer = made(1, device, log_mu_min=-30.0)
    mixer.Mu_log.data.zero_()
    mixer.mu_bias.data.zero_()
    abme = torch.tensor([29.0, 30.0, 31.0], device=device)[:, None].expand(1, 3, 4)
    ones = torch.ones(1, 3, 1, device=device)
    *_, log_mu, _, dabme, _, _, dMu_log, _, _ = results(mixer, abme, [None, None, ones, None])
    assert log_mu.flatten().tolist() == [-29, -30, -30]  # softplus(x) = x here
    assert dabme[..., 2].flatten().tolist() == pytest.approx([-1, -1, 0])  # the bound itself passes
    assert dMu_log.item() == pytest.approx(-59)
    by_torch = results(deepcopy(mixer).double(), abme.double(), [None, None, ones, None])
    assert relative_error(dabme, by_torch[4]) < 1e-6


@everywhere
@pytest.mark.parametrize("missing", [(0,), (1, 2), (0, 2, 3), (0, 1, 2)])
def test_gates_that_nobody_uses_have_no_part_in_the_gradients(missing, device):
    abme, gradients = inputs(2, 37, 3, device)
    check(made(3, device), abme, [None if i in missing else d for i, d in enumerate(gradients)])


@everywhere
def test_inputs_and_gradients_may_lie_in_memory_as_they_like(device):
    abme, gradients = inputs(2, 37, 3, device)
    given = [gradients[0][:1, :1].expand(2, 37, 3), gradients[1].mT.contiguous().mT]
    check(made(3, device), abme.mT.contiguous().mT, given + gradients[2:])


@everywhere
def test_what_is_not_a_number_stays_so(device):
    abme, _ = inputs(1, 2, 1, device)
    abme[0, 0] = torch.nan
    gates = torch.cat(made(1, device).head_gates(abme), -1)
    assert gates[0, 0].isnan().all()
    assert gates[0, 1].isfinite().all()


@everywhere
def test_keeps_what_it_is_given_and_nothing_else(device):
    abme, _ = inputs(1, 5, 2, device)
    mixer, kept = made(2, device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        mixer.head_gates(abme.requires_grad_())
    assert kept == [abme.data_ptr(), *(getattr(mixer, name).data_ptr() for name in PARAMETERS)]


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **keywords or {})


@pytest.mark.usefixtures("_launches")
def test_a_kernel_each_way_and_a_sum_are_all_that_is_computed(monkeypatch):
    class Launched(dict):
        def __missing__(self, grid):
            return lambda *_, **__: called.names.append("kernel")

    launched = SimpleNamespace(forward=Launched(), backward=Launched())
    monkeypatch.setattr(gates_triton, "kernels", launched)
    (abme, gradients), mixer = inputs(1, 5, 2, "cpu"), made(2, "cpu")
    parameters = [getattr(mixer, name) for name in PARAMETERS]
    with Called() as called:
        gates = mixer.head_gates(abme.requires_grad_())
        torch.autograd.grad(gates[:2], [abme, *parameters], gradients[:2])
    free = {"new_empty", "empty_like", "unbind", "detach"}
    assert [name for name in called.names if name not in free] == ["kernel", "kernel", "sum"]


@everywhere
def test_activation_checkpointing_and_evaluation(device):
    abme, gradients = inputs(1, 37, 3, device)
    mixer = made(3, device)
    expected = results(mixer, abme, gradients)
    again = SimpleNamespace(
        head_gates=lambda abme: checkpoint(mixer.head_gates, abme, use_reentrant=False),
        **{name: getattr(mixer, name) for name in PARAMETERS},
    )
    with torch.no_grad():
        without = mixer.head_gates(abme)
    with torch.inference_mode():
        inference = mixer.head_gates(abme)
    for found in (results(again, abme, gradients), without, inference):
        for one, other in zip(found, expected, strict=False):
            assert torch.equal(one, other)


@everywhere
def test_the_mixer_is_what_it_is_by_torch(device, make_mixer):
    mixer = make_mixer("mdn").to(device)
    x, dy = (random(2, 37, mixer.abme.in_features, device=device, seed=seed) for seed in (1, 2))
    found = []
    for dtype in (torch.float32, torch.float64):
        mixer = mixer.to(dtype)
        here = x.to(dtype).requires_grad_()
        y, _ = mixer(here)
        found.append([y, *torch.autograd.grad(y, [here, *mixer.parameters()], dy.to(dtype))])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < 1e-4


@pytest.mark.gpu
def test_on_a_card_the_kernels_are_what_the_mixer_uses(make_mixer):
    mixer = make_mixer("mdn").to("cuda")
    with Called() as called, torch.no_grad():
        mixer.head_gates(torch.ones(1, 37, mixer.abme.in_features, device="cuda"))
    assert "softplus" not in called.names
