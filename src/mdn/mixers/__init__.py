"""Token mixers, one file each. `mixer_class` imports only the one that is asked for."""

from difflib import get_close_matches
from importlib import import_module

from mdn.mixers.base import Mixer, State

__all__ = ["MIXERS", "Mixer", "State", "mixer_class"]

MIXERS = {
    "attention": "mdn.mixers.attention:Attention",
    "mamba2": "mdn.mixers.mamba2:Mamba2",
    "gdn": "mdn.mixers.gdn:Gdn",
    "comba": "mdn.mixers.comba:Comba",
    "kda": "mdn.mixers.kda:Kda",
    "mdn": "mdn.mixers.mdn:Mdn",
}


def mixer_class(name: str) -> type[Mixer]:
    """The class of a mixer by the name that layer patterns use.

    Raises:
        ValueError: if there is no such mixer.
    """
    if name not in MIXERS:
        near = get_close_matches(name, MIXERS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(MIXERS)}"
        raise ValueError(f"mixer {name!r} is unknown; {hint}")
    module, attribute = MIXERS[name].split(":")
    return getattr(import_module(module), attribute)
