"""Eigenvalues of one token's state transition, from its gates in closed form.

The transition of every rule here is a multiple of the identity plus a multiple of k kᵀ, so it acts on the
direction of the key and on the K − 1 directions across it apart from each other. With |k| = 1:

    mamba2   α I                                     along α              across α
    gdn      α (I − β k kᵀ)                          along α (1 − β)      across α
    comba    α I − β k kᵀ                            along α − β          across α
    mdn      ⎡α I − αβη k kᵀ   −βμ I⎤                along λ₊, λ₋         across α, μ
             ⎣αη k kᵀ            μ I⎦

where λ² − r λ + αμ = 0 and r = α + μ − αβη (Appendix F; Eqs. 58–60). A key of another length enters as
β |k|² in place of β for the three single states, and η |k|² in place of η for mdn. KDA decays each channel by
itself: its K eigenvalues have no closed form.

These are spectra of single steps. What many tokens do is decided by the product of their transitions, whose
spectral radius may exceed 1 though every factor's is below (tests/analysis/test_spectrum.py has a pair).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CELL = 0.04  # of a histogram


def trace(alpha: Array, beta: Array, mu: Array, eta: Array) -> Array:
    """r = α + μ − αβη, the trace of MDN's transition along the key."""
    return alpha + mu - alpha * beta * eta


def roots(r: Array, product: Array) -> Array:
    """Both roots of λ² − rλ + product, complex, [..., 2]; first the one above the real axis, or the larger.

    The smaller of two real roots comes from the product of both, as r − √(r² − 4·product) would cancel.
    """
    r, product = np.broadcast_arrays(np.asarray(r, float), np.asarray(product, float))
    discriminant = r * r - 4 * product
    root = np.sqrt(np.abs(discriminant))
    larger = (r + np.copysign(root, r)) / 2
    smaller = np.divide(product, larger, out=np.zeros_like(larger), where=larger != 0)
    pair = np.stack([r / 2 + 0.5j * root, r / 2 - 0.5j * root], -1)
    return np.where((discriminant < 0)[..., None], pair, np.stack([larger, smaller], -1))


def eigenvalues(mixer: str, gates: Mapping[str, Array]) -> tuple[Array, Array] | None:
    """(along the key, across it), each [..., 1 or 2]; None for a rule without a closed form.

    Args:
        mixer: its name in layer patterns.
        gates: alpha, beta, mu, eta, as far as the rule has them, all of one shape.
    """
    alpha = gates["alpha"]
    match mixer:
        case "mamba2":
            along = alpha
        case "gdn":
            along = alpha * (1 - gates["beta"])
        case "comba":
            along = alpha - gates["beta"]
        case "mdn":
            mu = gates["mu"]
            r = trace(alpha, gates["beta"], mu, gates["eta"])
            return roots(r, alpha * mu), np.stack([alpha, mu], -1)
        case _:
            return None
    return along[..., None], alpha[..., None]


def histogram(values: Array) -> dict[str, list[list[float]]]:
    """How many eigenvalues lie where: {"real": [[x, count], …], "complex": [[x, y, count], …]}.

    x and y are the centres of cells of side CELL; of a conjugate pair the one above the axis is counted.
    """
    flat = np.ravel(values)

    def cell(x: Array) -> Array:
        return (np.floor(np.clip(x, -1, 1 - CELL / 2) / CELL) + 0.5) * CELL

    real = np.stack([cell(flat[flat.imag == 0].real)], -1)
    above = flat[flat.imag > 0]
    pairs = np.stack([cell(above.real), cell(above.imag)], -1)
    found = {}
    for name, places in (("real", real), ("complex", pairs)):
        cells, counts = np.unique(places.round(6), axis=0, return_counts=True)
        found[name] = [[*place, count] for place, count in zip(cells.tolist(), counts.tolist(), strict=True)]
    return found


def in_unit_circle(alpha: Array, beta: Array, mu: Array, eta: Array) -> Array:
    """Appendix F's condition that no eigenvalue of MDN's transition lies outside the unit circle:
    −(1 − α)(1 − μ) ≤ αβη ≤ (1 + α)(1 + μ) and |α|, |μ| ≤ 1."""
    pull = alpha * beta * eta
    along = (-(1 - alpha) * (1 - mu) <= pull) & (pull <= (1 + alpha) * (1 + mu))
    return along & (np.abs(alpha) <= 1) & (np.abs(mu) <= 1)


def least_trace(modulus: Array, log_mu_min: float | None = None, bounded: bool = False) -> Array:
    """The smallest r that gates can give at √(αμ) = modulus, with α, μ ≤ 1, η ≤ 2 and log μ ≥ log_mu_min.

    With β ≤ 1 it is that of μ − α, with β ≤ 1 − α (`bounded`) that of μ + 2α² − α; both are searched on a
    grid of α, from modulus² (there μ = 1) to what the bound of μ allows. Half of it is the least real part of
    a complex eigenvalue of this modulus, where that is above −modulus.
    """
    product = np.square(np.asarray(modulus, float))[..., None]
    least_mu = 0.0 if log_mu_min is None else np.exp(log_mu_min)
    most = np.minimum(1.0, np.divide(product, least_mu, out=np.ones_like(product), where=least_mu > 0))
    alpha = product + (most - product) * np.linspace(0, 1, 2001)
    mu = np.divide(product, alpha, out=np.zeros_like(alpha), where=alpha > 0)
    beta = 1 - alpha if bounded else 1.0
    return (alpha + mu - 2 * alpha * beta).min(-1)
