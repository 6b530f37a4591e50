"""How a model's memories move while it reads: the change of the state at each token, and the gates behind it.

B = 1 sequence · T tokens · H heads · K key channels · V value channels
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mdn.evaluation.scoring import Progress, precision, quiet
from mdn.mixers.base import LinearMixer
from mdn.models.decoder import Decoder
from mdn_kernels.common.normalize import l2norm

if TYPE_CHECKING:
    from mdn.models.lm import LanguageModel

Array = NDArray[Any]
Gates = dict[str, Array]


@torch.inference_mode()
def state_changes(model: LanguageModel, ids: Sequence[int], progress: Progress = quiet) -> dict[int, Array]:
    """ΔS_t = mean over heads of ‖S_t − S_{t−1}‖_F (the paper's Fig. 7), [T] for each layer with a memory S.

    The tokens are read one at a time, as in decoding, from an empty memory.

    Raises:
        FloatingPointError: if a state is not finite.
    """
    device = next(model.parameters()).device
    layers = recurrent_layers(model)
    decoder = Decoder(model, model.init_states(1, device))
    changes: list[Tensor] = []
    with precision(device):
        for t, token in enumerate(ids):
            before = [decoder.states[layer]["S"].clone() for layer in layers]  # it may write over them
            decoder(torch.tensor([[token]], device=device))
            moved = (decoder.states[n]["S"] - S_BHKV for n, S_BHKV in zip(layers, before, strict=True))
            changes.append(torch.stack([torch.linalg.matrix_norm(d_BHKV).mean() for d_BHKV in moved]))
            progress(t + 1, len(ids))
    found = torch.stack(changes).double().cpu().numpy()
    if not np.isfinite(found).all():
        raise FloatingPointError("the model's states are not finite")
    return dict(zip(layers, found.T, strict=True))


@torch.inference_mode()
def gates(model: LanguageModel, ids: Sequence[int]) -> dict[int, Gates]:
    """The gates of every layer with a memory while it reads `ids`, [T, H], by the operator's names: log_alpha
    (KDA's [T, H, K]) and, as far as the rule has them, beta, log_mu and eta.

    A rule with beta also has `key`, kᵀk of the normalised key (Comba's kᵀp): 1 but for the norm's ε.

    Raises:
        FloatingPointError: if a gate is not finite.
    """
    device = next(model.parameters()).device
    with _watched(model) as seen, precision(device):
        model.hidden(torch.tensor([list(ids)], device=device))
    found: dict[int, Gates] = {}
    for layer, inputs in seen.items():
        gate = {name: value for name, value in inputs.items() if name not in ("q", "k", "v", "p")}
        if "beta" in gate:
            k_BTHK, p_BTHK = (l2norm(inputs.get(name, inputs["k"]).double()) for name in ("k", "p"))
            gate["key"] = (k_BTHK * p_BTHK).sum(-1)
        found[layer] = {name: value[0].double().cpu().numpy() for name, value in gate.items()}
        if not all(np.isfinite(value).all() for value in found[layer].values()):
            raise FloatingPointError("the model's gates are not finite")
    return found


def recurrent_layers(model: LanguageModel) -> list[int]:
    """Numbers of the layers with a memory of fixed size."""
    return list(_recurrent(model))


def _recurrent(model: LanguageModel) -> dict[int, LinearMixer]:
    mixers = {n: model.mixer(n) for n in range(len(model.mixers))}
    return {n: mixer for n, mixer in mixers.items() if isinstance(mixer, LinearMixer)}


@contextmanager
def _watched(model: LanguageModel) -> Iterator[dict[int, dict[str, Tensor]]]:
    """What each recurrent layer's operator is given, by layer and by the operator's names."""
    mixers, seen = _recurrent(model), dict[int, dict[str, Tensor]]()
    try:
        for layer, mixer in mixers.items():
            mixer.watch = partial(seen.__setitem__, layer)
        yield seen
    finally:
        for mixer in mixers.values():
            mixer.watch = None
