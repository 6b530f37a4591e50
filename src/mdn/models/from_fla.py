"""Weights of flash-linear-attention's models and layers (0.6.0) as ours.

    python -m mdn.models.from_fla model.safetensors --scale 400m --model gdn --out runs/fla/gdn

writes a run folder that `mdn generate` and the evaluation read. The model's shape is that of params.yaml, and
the checkpoint has to agree with it. RULES says what the two call differently; all other names are the same.
Options of FLA that change no weight (allow_neg_eigval, a norm_eps other than 1e-6) go unnoticed. MDN is
left to Python, see `mixer_weights`.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mdn.config import ConfigError, RunConfig, load
from mdn.models.lm import LanguageModel
from mdn.pattern import expand

_DELTA = {
    "qkv.proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "qkv.conv.weight": ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),
    "gate.weight": ("g_proj.weight",),
    "out.norm.weight": ("o_norm.weight",),
    "out.proj.weight": ("o_proj.weight",),
}
# Ours, and theirs: one below the other.
RULES: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        "qkv.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        "out.weight": ("o_proj.weight",),
    },
    "mamba2": {
        "conv.weight": ("conv1d.weight",),
        "conv.bias": ("conv1d.bias",),
        "in_proj.weight": ("in_proj.weight",),
        "norm.weight": ("norm.weight",),
        "out.weight": ("out_proj.weight",),
    },
    "gdn": _DELTA | {"ab.weight": ("a_proj.weight", "b_proj.weight")},
    "comba": _DELTA | {"ab.weight": ("a_proj.weight", "b_proj.weight")},
    "kda": {
        **{ours: theirs for ours, theirs in _DELTA.items() if ours != "gate.weight"},
        "b.weight": ("b_proj.weight",),
        "f.0.weight": ("f_proj.0.weight",),
        "f.1.weight": ("f_proj.1.weight",),
        "gate.0.weight": ("g_proj.0.weight",),
        "gate.1.weight": ("g_proj.1.weight",),
        "gate.1.bias": ("g_proj.1.bias",),
    },
    "mdn": _DELTA | {"abme.weight": ("a_proj.weight", "b_proj.weight", "m_proj.weight", "e_proj.weight")},
}
_VECTORS = ("A_log", "dt_bias", "D", "decay", "Mu_log", "mu_bias", "log_factor", "D_log")


def mixer_weights(name: str, fla: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of our mixer `name` from those of FLA's layer.

    MDN: FLA's MomentumDeltaNet gates its output with SiLU, the paper and this project with σ; outputs are
    the same only with `mixer.out.activation = F.silu`.

    Raises:
        ValueError: for a weight that is missing, or one that our mixer has no place for.
    """
    rules = RULES[name] | {x: (x,) for x in _VECTORS if x in fla}
    wanted = {x for theirs in rules.values() for x in theirs}
    if wanted - fla.keys():
        raise ValueError(f"{name}: FLA's layer has no {', '.join(sorted(wanted - fla.keys()))}")
    unknown = {x for x in fla.keys() - wanted if not x.startswith("rotary.")}
    if unknown:
        raise ValueError(f"{name}: our mixer has no place for {', '.join(sorted(unknown))}")
    return {ours: torch.cat([_plain(fla[x]) for x in theirs]) for ours, theirs in rules.items()}


def _plain(x: Tensor) -> Tensor:
    """Convolutions without the dimension of their one input channel."""
    return x.squeeze(1) if x.dim() == 3 else x


def model_weights(run: RunConfig, fla: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of our model of `run` from those of FLA's language model.

    Raises:
        ValueError: as `mixer_weights`, and for names or shapes that are not those of the run's model.
    """
    model = {re.sub(r"^(model|backbone)\.", "", name): x for name, x in fla.items()}

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): x for name, x in model.items() if name.startswith(prefix)}

    layers = {int(number) for name in model for number in re.findall(r"^layers\.(\d+)\.", name)}
    if len(layers) > run.shape.layers:
        raise ValueError(f"{run.name}: FLA's model has {len(layers)} layers, ours {run.shape.layers}")
    final = "norm_f.weight" if "norm_f.weight" in model else "norm.weight"
    try:
        weights = {
            "embedding.weight": model["embeddings.weight"],
            "norm.weight": model[final],
            "head.weight": model.get("lm_head.weight", model["embeddings.weight"]),  # tied if it is not there
        }
        for layer, name in enumerate(expand(run.pattern, run.shape.layers)):
            theirs, ours = f"layers.{layer}.", f"blocks.{layer}."
            mixer = below(theirs + "attn.") or below(theirs + "mixer.")
            weights |= {f"{ours}mixer.{x}": y for x, y in mixer_weights(name, mixer).items()}
            if run.mlp:
                gate, up = (model[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up"))
                weights[f"{ours}mixer_norm.weight"] = model[f"{theirs}attn_norm.weight"]
                weights[f"{ours}mlp_norm.weight"] = model[f"{theirs}mlp_norm.weight"]
                weights[f"{ours}mlp.up.weight"] = torch.cat([gate, up])
                weights[f"{ours}mlp.down.weight"] = model[f"{theirs}mlp.down_proj.weight"]
            else:
                weights[f"{ours}mixer_norm.weight"] = model[f"{theirs}norm.weight"]
    except KeyError as error:
        raise ValueError(f"{run.name}: FLA's model has no {error.args[0]}") from None
    with torch.device("meta"):
        expected = LanguageModel(run, weights["head.weight"].shape[0]).state_dict()
    _compare(expected, weights)
    return {name: weights[name].float().contiguous() for name in expected}


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name in expected.keys() | found.keys():
        shapes = [list(x[name].shape) if name in x else "nothing" for x in (found, expected)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} is {shapes[0]} in FLA's model and {shapes[1]} in ours")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mdn.models.from_fla", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="the checkpoint, one or more .safetensors")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--scale", required=True, help="of params.yaml")
    parser.add_argument("--model", required=True, help="of params.yaml")
    parser.add_argument("--out", required=True, type=Path, help="the run folder to write")
    options = parser.parse_args(arguments)
    try:
        if options.out.exists():
            raise ConfigError(f"{options.out} exists; remove it or choose another --out")
        run = load(options.params).run(options.scale, options.model)
        if "mdn" in expand(run.pattern, run.shape.layers):
            raise ConfigError(
                f"{run.name}: FLA's MomentumDeltaNet gates its output with SiLU and ours with σ, so a run "
                "folder would be of another model; from Python, set mixer.out.activation"
            )
        weights = model_weights(
            run, {name: x for file in options.files for name, x in load_file(file).items()}
        )
    except (ValueError, OSError, SafetensorError) as error:
        print(f"from_fla: {error}", file=sys.stderr)
        return 2
    unfinished = options.out.with_name(options.out.name + ".part")
    unfinished.mkdir(parents=True, exist_ok=True)
    run.to_yaml(unfinished / "config.yaml")
    save_file(weights, unfinished / "model.safetensors")
    os.replace(unfinished, options.out)
    print(f"{options.out}: {len(weights)} weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
