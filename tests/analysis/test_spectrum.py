"""Closed forms against an eigensolver on the transition matrix, and the claims made of them."""

from itertools import pairwise

import numpy as np
import pytest

from mdn.analysis.spectrum import eigenvalues, in_unit_circle, least_trace, roots, trace

RNG = np.random.default_rng(0)
N = 20_000
K = 5


def unit_keys(n: int) -> np.ndarray:
    k = RNG.standard_normal((n, K))
    return k / np.linalg.norm(k, axis=1, keepdims=True)


def sample(n: int = N, bounded: bool = False, log_mu_min: float | None = None) -> dict[str, np.ndarray]:
    """Gates in their open ranges: α, β, μ ∈ (0, 1), η ∈ (0, 2); every third at the ends of the ranges."""
    alpha, beta, mu, eta = np.clip(RNG.random((4, n)), 1e-9, 1 - 1e-9)
    edge = RNG.random((4, n)) < 1 / 12
    alpha, beta, mu, eta = (
        np.where(at, np.where(x < 0.5, 1e-9, 1 - 1e-9), x)
        for at, x in zip(edge, (alpha, beta, mu, eta), strict=True)
    )
    if log_mu_min is not None:
        mu = np.exp(log_mu_min * (1 - mu))
    return {"alpha": alpha, "beta": beta * (1 - alpha) if bounded else beta, "mu": mu, "eta": 2 * eta}


def matrix(mixer: str, gates: dict[str, float], k: np.ndarray) -> np.ndarray:
    """The transition, built column by column from the recurrence itself, on one value channel with v = 0."""
    alpha, beta = gates["alpha"], gates["beta"]

    def step(state: np.ndarray) -> np.ndarray:
        S, M = state[:K], state[K:]
        match mixer:
            case "mamba2":
                return alpha * S
            case "gdn":
                return alpha * S - beta * k * (k @ (alpha * S))
            case "comba":
                return alpha * S - beta * k * (k @ S)
        M = gates["mu"] * M + gates["eta"] * k * (k @ (alpha * S))  # −η k (v − α Sᵀk)ᵀ
        return np.concatenate([alpha * S - beta * M, M])

    return np.stack([step(e) for e in np.eye(2 * K if mixer == "mdn" else K)], 1)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Of two multisets of complex numbers: every one is matched with its nearest, greedily."""
    left, worst = list(expected), 0.0
    for value in found:
        nearest = min(left, key=lambda other: abs(other - value))
        worst = max(worst, abs(nearest - value))
        left.remove(nearest)
    assert not left
    return worst


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("mixer", ["mamba2", "gdn", "comba", "mdn"])
def test_closed_form_is_what_an_eigensolver_finds_in_the_whole_matrix(mixer, bounded):
    gates = sample(300, bounded)
    along, across = eigenvalues(mixer, gates)
    for n, k in enumerate(unit_keys(300)):
        found = np.concatenate([along[n], np.tile(across[n], K - 1)])
        at = {name: gate[n] for name, gate in gates.items()}
        # An eigensolver resolves a double eigenvalue to √ε only.
        assert distance(found, np.linalg.eigvals(matrix(mixer, at, k))) < 1e-6


def test_a_key_that_is_not_of_length_one_scales_beta():
    gates = sample(100)
    for n, k in enumerate(unit_keys(100) * RNG.uniform(0.3, 1.0, (100, 1))):
        at = {name: gate[n] for name, gate in gates.items()}
        along, across = eigenvalues("mdn", at | {"eta": at["eta"] * (k @ k)})
        found = np.concatenate([along, np.tile(across, K - 1)])
        assert distance(found, np.linalg.eigvals(matrix("mdn", at, k))) < 1e-6


def test_kda_has_no_closed_form():
    assert eigenvalues("kda", sample(3)) is None


def test_roots_keep_their_digits_where_the_textbook_formula_loses_them():
    found = roots(np.array([1.0, -1.0, 0.0, 2.0]), np.array([1e-18, 1e-18, 0.0, 1.0]))
    np.testing.assert_allclose(found, [[1, 1e-18], [-1, -1e-18], [0, 0], [1, 1]], rtol=1e-15)


def test_without_momentum_mdn_is_gdn_beside_a_dead_direction():
    gates = sample() | {"mu": np.zeros(N), "eta": np.ones(N)}
    mdn, gdn = eigenvalues("mdn", gates)[0], eigenvalues("gdn", gates)[0]
    np.testing.assert_allclose(mdn[:, 0], gdn[:, 0], atol=1e-12)
    assert (mdn[:, 1] == 0).all()


def test_a_complex_pair_has_modulus_sqrt_alpha_mu_and_the_angle_of_the_trace():
    gates = sample()
    along, _ = eigenvalues("mdn", gates)
    r, modulus = trace(**gates), np.sqrt(gates["alpha"] * gates["mu"])
    complex_pair = r * r < 4 * gates["alpha"] * gates["mu"]
    assert 0.2 < complex_pair.mean() < 0.8
    assert ((along[:, 0].imag != 0) == complex_pair).all()
    chosen = along[complex_pair]
    np.testing.assert_allclose(np.abs(chosen), modulus[complex_pair, None].repeat(2, 1), rtol=1e-12)
    np.testing.assert_allclose(
        np.cos(np.angle(chosen[:, 0])), r[complex_pair] / 2 / modulus[complex_pair], atol=1e-7
    )


def test_the_unit_circle_condition_holds_exactly_where_no_eigenvalue_is_outside():
    """Appendix F, over ranges far wider than the gates'."""
    alpha, mu = RNG.uniform(-1.3, 1.3, (2, N))
    beta, eta = RNG.uniform(-3, 3, (2, N))
    along, across = eigenvalues("mdn", {"alpha": alpha, "beta": beta, "mu": mu, "eta": eta})
    radius = np.abs(np.concatenate([along, across], 1)).max(1)
    clear = np.abs(radius - 1) > 1e-9
    condition = in_unit_circle(alpha, beta, mu, eta)
    assert 0.1 < condition.mean() < 0.9
    assert (condition == (radius <= 1))[clear].all()


@pytest.mark.parametrize("bounded", [False, True])
def test_in_their_ranges_the_gates_always_fulfil_the_condition(bounded):
    """The study, 2.8; so a negative real part by itself is no divergence."""
    assert in_unit_circle(**sample(bounded=bounded)).all()


@pytest.mark.parametrize("log_mu_min", [-2.0, -1.5, -1.357, -1.0])
def test_the_bounds_keep_every_eigenvalue_in_the_right_half(log_mu_min):
    """β ≤ 1 − α, η < 2 and μ > 1/8 make the trace positive (the study, 2.8), and with αμ > 0 both real parts.
    All lower bounds of log μ that the paper tries are above log 1/8 = −2.08."""
    gates = sample(bounded=True, log_mu_min=log_mu_min)
    along, across = eigenvalues("mdn", gates)
    assert (trace(**gates) > 0).all()
    assert (along.real > 0).all()
    assert (across > 0).all()


@pytest.mark.parametrize("margin", [1e-2, 1e-6])
def test_an_eighth_is_the_best_constant(margin):
    """Just below μ = 1/8 the trace is negative at α = 1/4, β = 3/4, η → 2."""
    at = {"alpha": 0.25, "beta": 0.75, "eta": 2 - margin / 10}
    assert trace(mu=1 / 8 - margin, **at) < 0 < trace(mu=1 / 8 + margin, **at)


def test_without_the_bound_of_beta_a_bound_of_mu_is_not_enough():
    """The statement above needs β ≤ 1 − α: here μ is far above 1/8 and a real part is negative."""
    gates = {"alpha": np.array(0.95), "beta": np.array(0.95), "mu": np.array(0.5), "eta": np.array(1.9)}
    assert eigenvalues("mdn", gates)[0].real.max() < 0


def test_the_radius_of_the_whole_gdn_transition_is_alpha():
    """The paper's p. 5 gives α (1 − β), the eigenvalue along the key; across it there are K − 1 of α."""
    gates = sample(200)
    along, across = eigenvalues("gdn", gates)
    for n, k in enumerate(unit_keys(200)):
        matrix_n = matrix("gdn", {name: gate[n] for name, gate in gates.items()}, k)
        assert np.abs(np.linalg.eigvals(matrix_n)).max() == pytest.approx(gates["alpha"][n], abs=1e-9)
    assert (across >= along).all()
    assert (across > along + 0.1).any()


def test_two_stable_steps_can_make_an_unstable_product():
    """Why the condition is one of single steps: α + β ≤ 1, log μ ≥ −2, both radii below 1, and that of their
    product above."""
    first = {"alpha": 0.9, "beta": 0.1, "mu": 0.15, "eta": 1.9}
    second = {"alpha": 0.02, "beta": 0.9, "mu": 0.95, "eta": 1.2}
    keys = np.zeros((2, K))
    keys[0, :2], keys[1, :2] = (-0.52, 0.854), (-0.91, 0.415)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    steps = [matrix("mdn", gates, k) for gates, k in zip((first, second), keys, strict=True)]
    radii = [np.abs(np.linalg.eigvals(step)).max() for step in (*steps, steps[1] @ steps[0])]
    assert max(radii[:2]) < 0.96
    assert radii[2] > 1.2


def test_one_heads_own_gates_can_pump_the_state():
    """Under all of MDN's bounds too, with one key: 100 steps turn memory into momentum along a narrow ellipse
    (small η), two back along a wide one. Every radius is below 1, that of the 102 together above 1.5."""

    def gates(eta: float, s: float = 0.5) -> dict[str, float]:
        square = (s * eta) ** 2  # tan²θ: α_max = cos²θ, β_max = sin²θ
        return {"alpha": 1 / (1 + square), "beta": square / (1 + square), "mu": 0.999, "eta": eta}

    key = unit_keys(1)[0]
    slow, fast = matrix("mdn", gates(0.1), key), matrix("mdn", gates(1.6), key)
    assert max(np.abs(np.linalg.eigvals(step)).max() for step in (slow, fast)) < 1
    product = np.linalg.matrix_power(fast, 2) @ np.linalg.matrix_power(slow, 100)
    assert np.abs(np.linalg.eigvals(product)).max() > 1.5


@pytest.mark.parametrize(
    "bounds", [{}, {"log_mu_min": -1.0, "bounded": True}, {"log_mu_min": -2.0, "bounded": True}]
)
def test_least_trace_is_reached_and_never_undercut(bounds):
    gates = sample(200_000, bounds.get("bounded", False), bounds.get("log_mu_min"))
    modulus, r = np.sqrt(gates["alpha"] * gates["mu"]), trace(**gates)
    edges = np.linspace(0.05, 0.95, 10)
    for low, high in pairwise(edges):
        inside = r[(modulus >= low) & (modulus < high)]
        bound = least_trace(np.linspace(low, high, 20), **bounds).min()
        assert bound - 1e-6 <= inside.min() < bound + 0.1


def test_unbounded_complex_eigenvalues_fill_a_disc_about_one():
    """|λ − 1| < √2, where that cuts the unit circle: least_trace is modulus² − 1."""
    modulus = np.linspace(0.05, 0.99, 30)
    np.testing.assert_allclose(least_trace(modulus), modulus**2 - 1, atol=1e-12)


def test_the_second_order_form_needs_alpha_in_its_key_term():
    """Eliminating the momentum (the study, 2.7); Table 1 of the paper prints the key term without α."""
    T, V = 9, 3
    gates = sample(T)
    alpha, beta, mu, eta = (gates[name] for name in ("alpha", "beta", "mu", "eta"))
    beta = 0.1 + 0.9 * beta
    keys, values = unit_keys(T), RNG.standard_normal((T, V))
    S = [np.zeros((K, V)), RNG.standard_normal((K, V))]
    M = (alpha[0] * S[0] - S[1]) / beta[0]  # of the first of the two, as S_t = α S_{t−1} − β M_t
    errors = {"two states": 0.0, "as printed": 0.0}
    for t in range(1, T):
        k, v, back = keys[t], values[t], beta[t] * mu[t] / beta[t - 1]
        M = mu[t] * M - eta[t] * np.outer(k, v - alpha[t] * S[-1].T @ k)
        following = alpha[t] * S[-1] - beta[t] * M
        for name, factor in (("two states", alpha[t]), ("as printed", 1.0)):
            second = (
                ((alpha[t] + back) * np.eye(K) - factor * beta[t] * eta[t] * np.outer(k, k)) @ S[-1]
                - back * alpha[t - 1] * S[-2]
                + beta[t] * eta[t] * np.outer(k, v)
            )
            errors[name] = max(errors[name], np.abs(second - following).max())
        S.append(following)
    assert errors["two states"] < 1e-12
    assert errors["as printed"] > 0.01
