"""What is trained: a cell is one model at one width, learning rate and seed, resolved from params.yaml.

`plan` lists the cells of a scale. Written to a JSON file they run on a machine that has neither params.yaml
nor what reads it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mdn.config import (
    ConfigError,
    Examples,
    MqarData,
    MqarTraining,
    Optimizer,
    Params,
    RunConfig,
    Shape,
    Training,
    fingerprint,
)
from mdn.options import Options
from mdn.pattern import parse


@dataclass(frozen=True)
class Cell:
    """One training: everything that decides its result. Its record is in runs/<scale>/<name>."""

    scale: str
    name: str
    model: str
    pattern: str
    options: dict[str, dict[str, Any]]  # of the mixers in the pattern
    kernel: str
    shape: Shape
    width: int
    lr: float
    seed: int
    data_seed: int
    data: MqarData
    training: MqarTraining

    def fingerprint(self) -> str:
        return fingerprint(self)

    def run(self) -> RunConfig:
        """The configuration as the language model reads it: no MLP, as in Zoology's models, whose blocks are
        a norm and a mixer. Its token budget, which a language model's training is measured in, has no meaning
        here.
        """
        longest = max(part.length for part in self.data.train)
        tokens = self.training.batch * longest
        return RunConfig(
            scale=self.scale,
            name=self.name,
            seed=self.seed,
            data="mqar",
            d_model=self.width,
            pattern=self.pattern,
            mlp=False,
            kernel=self.kernel,
            lr=self.lr,
            shape=self.shape,
            optimizer=Optimizer(
                beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=self.training.weight_decay, lr_final=0.0
            ),
            training=Training(
                tokens=tokens,
                warmup_tokens=0,
                batch_tokens=tokens,
                context=longest,
                lr=self.lr,
                validate_every=1,
                validation_tokens=tokens,
            ),
            options=self.options,
        )


def plan(params: Params, scale: str, models: Iterable[str]) -> list[Cell]:
    """The cells of models at a scale of `mqar.scales`: for each seed and learning rate, from the widest, all
    models, so that what is to be compared runs side by side.

    Raises:
        ConfigError: for a scale or model that does not exist.
    """
    if scale not in params.mqar.scales:
        raise ConfigError(f"scale: {scale!r} is unknown; mqar.scales has {', '.join(params.mqar.scales)}")
    for name in models:
        if name not in params.models:
            raise ConfigError(f"model: {name!r} is unknown; params.yaml has {', '.join(params.models)}")
    at = params.mqar.scales[scale]
    return [
        cell(params, scale, name, width, lr, seed)
        for seed in at.seeds
        for lr in at.lrs
        for width in sorted(at.widths, reverse=True)
        for name in models
    ]


def cell(params: Params, scale: str, name: str, width: int, lr: float, seed: int) -> Cell:
    at, model = params.mqar.scales[scale], params.models[name]
    mixers = dict.fromkeys(parse(model.pattern))
    return Cell(
        scale=f"mqar-{scale}",
        name=f"{name}/w{width}-lr{lr:.1e}-s{seed}",
        model=name,
        pattern=model.pattern,
        options={mixer: asdict(getattr(model.options, mixer)) for mixer in mixers},
        kernel=model.kernel,
        shape=params.mqar_shape(scale, name, width),
        width=width,
        lr=lr,
        seed=seed,
        data_seed=params.seed,
        data=params.mqar.data[at.data],
        training=at.training,
    )


def to_json(cells: list[Cell]) -> str:
    return json.dumps([asdict(cell) for cell in cells], indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str) -> list[Cell]:
    """The cells that `to_json` wrote.

    Raises:
        ValueError: if they are not, for example of an earlier version of this code.
    """
    try:
        return [_cell(raw) for raw in json.loads(text)]
    except (TypeError, KeyError) as error:
        raise ValueError(f"cells: not what this version writes ({error}); plan them again") from None


def read(path: Path) -> list[Cell]:
    if not path.exists():
        raise ValueError(f"{path}: not found; write it with `python -m mdn.mqar plan`")
    return from_json(path.read_text())


def _cell(raw: dict[str, Any]) -> Cell:
    data = raw["data"]
    splits = {split: [Examples(**part) for part in data[split]] for split in ("train", "test")}
    for mixer, options in raw["options"].items():  # refuses what the mixer does not know
        type(getattr(Options(), mixer))(**options)
    return Cell(
        **raw
        | {
            "shape": Shape(**raw["shape"]),
            "data": MqarData(**data | splits),
            "training": MqarTraining(**raw["training"]),
        }
    )
