"""Which token an update of the memory depends on, for three ways to use momentum (the paper's Fig. 1).

Each takes steps along gradients of ½ |v_t − (αS)ᵀk_t|², which are −k_t ṽ_tᵀ with ṽ_t = v_t − αSᵀk_t:

    blockwise   the gradients of a block's tokens are all taken at the memory before the block and enter the
                momentum together; the whole block gets one update: M ← μM + Σ_t η g_t
    window      U_t = Σ_{t−W<s≤t} μ^{t−s} η g_s, the last W gradients, each at the memory of its own step
    stepwise    U_t = M_t = μ M_{t−1} + η g_t, the paper's

and S ← αS − β U. Derivatives are exact to rounding: these updates are polynomials in keys and values, so a
perturbation by 1e-30 i gives them as an imaginary part, without a difference of nearly equal numbers.

T tokens · K key channels · V value channels · D = K + V channels of a token x_t = (k_t, v_t)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SCHEMES = ("blockwise", "window", "stepwise")
STEP = 1e-30
ALPHA, BETA, MU, ETA = 0.95, 0.5, 0.7, 1.0


def example(T: int = 16, K: int = 4, V: int = 4, seed: int = 0) -> Array:
    """Tokens [T, K + V] with keys of length 1."""
    x_TD = np.random.default_rng(seed).standard_normal((T, K + V))
    x_TD[:, :K] /= np.linalg.norm(x_TD[:, :K], axis=1, keepdims=True)
    return x_TD


def run(x_TD: Array, scheme: str, size: int, K: int = 4, memory: Array | None = None) -> tuple[Array, Array]:
    """(updates U, the memory that each token's gradient is taken at), both [T, K, V].

    size: tokens of a block or of the window. memory [T, K, V]: where to take the gradients instead.
    """
    k_TK, v_TV = x_TD[:, :K], x_TD[:, K:]
    T, V = v_TV.shape
    S = np.zeros((K, V), x_TD.dtype)
    M = np.zeros_like(S)
    update, read, gradient = (np.zeros((T, K, V), x_TD.dtype) for _ in range(3))
    block = size if scheme == "blockwise" else 1
    for start in range(0, T, block):
        tokens = range(start, min(start + block, T))
        for t in tokens:
            read[t] = S if memory is None else memory[t]
            gradient[t] = -ETA * np.outer(k_TK[t], v_TV[t] - ALPHA * read[t].T @ k_TK[t])
        if scheme == "window":
            M = sum(MU ** (start - s) * gradient[s] for s in range(max(0, start - size + 1), start + 1))
        else:
            M = MU * M + sum(gradient[t] for t in tokens)
        for t in tokens:
            update[t] = M
        S = ALPHA * S - BETA * M
    return update, read


def dependence(x_TD: Array, scheme: str, size: int, K: int = 4, direct: bool = False) -> Array:
    """|∂U_i/∂x_j| [T, T], the Frobenius norm of each Jacobian.

    direct: with the memories that gradients are taken at held fixed, so that only the tokens whose gradients
    enter U_i count. Else along every path: through the memory, each update depends on all that came before.
    """
    T, D = x_TD.shape
    memory = run(x_TD, scheme, size, K)[1] if direct else None
    found_TT = np.zeros((T, T))
    for j in range(T):
        for d in range(D):
            moved = x_TD.astype(complex)
            moved[j, d] += STEP * 1j
            update = run(moved, scheme, size, K, memory)[0]
            found_TT[:, j] += np.square(update.imag / STEP).sum((1, 2))
    return np.sqrt(found_TT)
