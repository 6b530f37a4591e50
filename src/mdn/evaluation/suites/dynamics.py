"""How the memories of a trained model move while it reads held-out text: state changes, gates, spectra.

The text is the first of the held-out splits, read from its start after an end-of-text token, as many tokens
as the evaluation window has. Results are means; the samples hold a row a layer, which the figures draw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mdn.analysis.spectrum import eigenvalues, histogram
from mdn.data.gpt2 import EOT
from mdn.data.shards import open_split, read_index
from mdn.evaluation.dynamics import Array, Gates, gates, recurrent_layers, state_changes
from mdn.evaluation.suites import NotRun

if TYPE_CHECKING:
    from mdn.evaluation.scoring import Progress
    from mdn.evaluation.suites import Rows
    from mdn.evaluation.suites.run import Cell

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NO_MEMORY = "attention keeps every key and value: it has no memory of fixed size, and no gates"
NO_CLOSED_FORM = "a decay for each channel: the eigenvalues have no closed form"


def tasks(cell: Cell) -> list[str]:
    return ["state_change", "transition"]


def identity(cell: Cell) -> list[Any]:
    return [cell.evaluation.window, read_index(cell.tokens)["digest"]]


def run(cell: Cell, task: str, progress: Progress) -> tuple[Rows, Rows]:
    if not recurrent_layers(cell.model):
        raise NotRun(NO_MEMORY)
    split = _split(cell)
    text, wanted = open_split(cell.tokens, split), cell.evaluation.window - 1
    if len(text) < wanted:
        raise NotRun(
            f"window: {cell.evaluation.window} is more than the {len(text)} tokens of {split} and one"
        )
    ids = [EOT, *text.tokens(0, wanted).tolist()]
    measure = _state_change if task == "state_change" else _transition
    figures, layers = measure(cell, ids, progress)
    shared = {
        "task": task,
        "stderr": None,
        "n": len(ids),
        "limit": cell.evaluation.window,
        "truncated": 0,
        "task_hash": None,
        "data": f"{cell.tokens.name}, {split}, sha256 {read_index(cell.tokens)['digest'][:12]}",
    }
    results = [{**shared, "metric": metric, "value": value} for metric, value in figures.items()]
    samples = [
        {"task": task, "layer": n, "mixer": mixer, **layers.get(n, {"absent": NO_MEMORY})}
        for n, mixer in enumerate(cell.model.mixers)
    ]
    return results, samples


def _split(cell: Cell) -> str:
    held = [name for name in read_index(cell.tokens)["splits"] if name.startswith("heldout")]
    if not held:
        raise NotRun(f"{cell.tokens.name} holds no text out; set a part's holdout in params.yaml")
    return held[0]


def _state_change(cell: Cell, ids: list[int], progress: Progress) -> tuple[dict[str, float], dict[int, Any]]:
    """The mean over tokens and layers; ΔS_t of each layer."""
    changes = state_changes(cell.model, ids, progress)
    mean = float(np.mean(list(changes.values())))
    return {"mean": mean}, {n: {"change": _short(change)} for n, change in changes.items()}


def _transition(cell: Cell, ids: list[int], progress: Progress) -> tuple[dict[str, float], dict[int, Any]]:
    """Over all tokens and layers the share of transitions with a complex pair along the key (they oscillate),
    the share with a negative real part there, and the largest modulus; each layer's gates and eigenvalues."""
    layers: dict[int, Any] = {}
    oscillating, negative, radius = [], [], []
    for n, gate in gates(cell.model, ids).items():
        quantiles = {name: _short(np.quantile(value, QUANTILES)) for name, value in gate.items()}
        layers[n] = {"quantiles": list(QUANTILES), "gates": quantiles}
        spectrum = _spectrum(cell.model.mixers[n], gate)
        if spectrum is None:
            layers[n]["absent"] = NO_CLOSED_FORM
            continue
        along, across = spectrum
        layers[n] |= {"along": histogram(along), "across": histogram(across)}
        oscillating.append((along[..., 0].imag != 0).mean())
        negative.append((along.real.min(-1) < 0).mean())
        radius.append(max(np.abs(along).max(), np.abs(across).max()))
    progress(len(ids), len(ids))
    if not radius:
        return {}, layers
    shares = {"oscillating": float(np.mean(oscillating)), "negative": float(np.mean(negative))}
    return {**shares, "radius": float(max(radius))}, layers


def _spectrum(mixer: str, gate: Gates) -> tuple[Array, Array] | None:
    letters = {
        name.removeprefix("log_"): np.exp(value) if name.startswith("log_") else value
        for name, value in gate.items()
    }
    if "key" in gate:  # not quite of length 1
        along = "eta" if mixer == "mdn" else "beta"
        letters[along] = letters[along] * gate["key"]
    return eigenvalues(mixer, letters)


def _short(values: Array) -> list[float]:
    """Six digits, which no figure needs more than."""
    return [float(f"{value:.6g}") for value in values.tolist()]
