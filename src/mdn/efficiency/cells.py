"""What is measured, from params.yaml: parts, most important first, each of some models at some shapes.

Written to a JSON file, a plan runs on a machine that has neither params.yaml nor what reads it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mdn.config import Optimizer, Params, RunConfig, Shape, Training

# Model, or model:kernel version. What is compared stands side by side: MDN with its residuals kept for the
# backward and computed there again, GDN by our kernel and by FLA's.
MODELS = (
    *("mdn", "gdn:fla", "gdn", "mdn:v4_recompute"),
    *("comba", "kda", "mamba2", "transformer"),
)
KINDS = ("train", "decode", "prefill", "loader", "compiled")


@dataclass(frozen=True)
class Part:
    """One kind of measurement. In each round the models take turns, so that none has the card to itself while
    it is cool."""

    kind: str
    models: list[str]  # names of runs
    shapes: list[tuple[int, int]]  # sequences × tokens
    rounds: int
    samples: int  # of each shape in a round

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is unknown; use {', '.join(KINDS)}")

    def cell(self, shape: tuple[int, int]) -> str:
        """What a shape's figures are called: train/4x4096."""
        return f"{self.kind}/{shape[0]}x{shape[1]}"


@dataclass(frozen=True)
class Plan:
    """The record of a run is in runs/<its scale>/<its name>, as everywhere."""

    runs: list[RunConfig]
    parts: list[Part]


def plan(
    params: Params, scale: str, models: Iterable[str] = MODELS, kinds: Iterable[str] | None = None
) -> Plan:
    """What is measured at a scale: training, decoding and the rest of the paper's shapes; at scale smoke the
    same in small. Prefill at the scale `small` only, if `kinds` does not say otherwise.

    Raises:
        ConfigError: for a scale or model that does not exist.
        ValueError: for a kind that does not.
    """
    runs = [_run(params, scale, model) for model in models]
    names = [run.name for run in runs]
    tiny = scale == "smoke"
    tokens = 256 if tiny else 16384
    shapes = [(n, tokens // n) for n in (4, 8, 2, 1)]
    contexts = [(1, tokens // n) for n in (16, 8, 4, 2, 1)]
    some = [name for name in names if name in ("mdn", "gdn", "transformer")]
    samples = 2 if tiny else 4
    parts = [
        Part("train", names, shapes[:1], 1 if tiny else 2, samples),
        Part("decode", [run.name for run in runs if run.kernel == "auto"], contexts, 1, samples),
        Part("loader", [name for name in names if name == "mdn"], shapes[:1], 1, samples),
        Part("train", names, shapes[1:], 1, 2 if tiny else 3),
        Part("prefill", [name for name in names if name == "mdn"], contexts[2::2], 1, samples),
        Part("compiled", some, shapes[:1], 1, samples),
    ]
    wanted = list(kinds) if kinds is not None else [k for k in KINDS if k != "prefill" or scale == "small"]
    for kind in wanted:
        if kind not in KINDS:
            raise ValueError(f"kind: {kind!r} is unknown; use {', '.join(KINDS)}")
    return Plan(runs, [part for part in parts if part.kind in wanted and part.models])


def _run(params: Params, scale: str, model: str) -> RunConfig:
    name, _, kernel = model.partition(":")
    run = params.run(scale, name)
    if kernel:
        run = replace(run, kernel=kernel, name=f"{name}-{kernel}")
    return replace(run, scale=f"efficiency-{scale}")


def to_json(plan: Plan) -> str:
    return json.dumps(asdict(plan), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str) -> Plan:
    """The plan that `to_json` wrote.

    Raises:
        ValueError: if it is none, for example of an earlier version of this code.
    """
    try:
        raw = json.loads(text)
        parts = [Part(**part | {"shapes": [tuple(s) for s in part["shapes"]]}) for part in raw["parts"]]
        return Plan([_run_of(run) for run in raw["runs"]], parts)
    except (TypeError, KeyError) as error:
        raise ValueError(f"plan: not what this version writes ({error}); plan again") from None


def _run_of(raw: dict) -> RunConfig:
    nested = {"shape": Shape, "optimizer": Optimizer, "training": Training}
    run = RunConfig(**raw | {key: kind(**raw[key]) for key, kind in nested.items()})
    for mixer in run.options:  # refuses what the mixer does not know
        run.mixer_options(mixer)
    return run


def read(path: Path) -> Plan:
    if not path.exists():
        raise ValueError(f"{path}: not found; write it with `python -m mdn.efficiency plan`")
    return from_json(path.read_text())
