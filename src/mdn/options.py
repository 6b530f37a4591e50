"""What a user may change about each mixer. Free of torch, so that reading params.yaml stays quick."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AttentionOptions:
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class Mamba2Options:
    expand: int = 2
    convolution: int = 4


@dataclass(frozen=True)
class GdnOptions:
    convolution: int = 4
    gate_bounds: bool = False  # alpha_max = cos^2(theta), beta_max = sin^2(theta), as in MDN


@dataclass(frozen=True)
class CombaOptions:
    convolution: int = 4
    output_correction: bool = True


@dataclass(frozen=True)
class KdaOptions:
    convolution: int = 4
    init: str = "kda"  # rates exp(A_log) start in (1, 16); gdn: in (0, 16), as GDN's

    def __post_init__(self) -> None:
        if self.init not in ("kda", "gdn"):
            raise ValueError(f"init: {self.init!r} is unknown; use kda or gdn")


@dataclass(frozen=True)
class MdnOptions:
    convolution: int = 4
    tau: str = "sqrt(d/h)"  # temperature of eta: sqrt(d/h), sqrt(d), sqrt(d/8) or a number
    eta: str = "tanh"  # tanh: tanh(e/tau) + 1; sigmoid: 2 sigmoid(e)
    log_mu_min: float | None = -2.0  # lower bound of log mu; null: none
    alpha_bound: bool = True  # false: alpha_max = 1
    beta_bound: bool = True  # false: beta_max = 1
    output_correction: bool = True  # q <- q - d k

    def __post_init__(self) -> None:
        if self.eta not in ("tanh", "sigmoid"):
            raise ValueError(f"eta: {self.eta!r} is unknown; use tanh or sigmoid")
        if self.tau not in ("sqrt(d/h)", "sqrt(d)", "sqrt(d/8)"):
            try:
                positive = float(self.tau) > 0
            except ValueError:
                positive = False
            if not positive:
                raise ValueError(
                    f"tau: {self.tau!r} is unknown; use sqrt(d/h), sqrt(d), sqrt(d/8) or a number"
                )


@dataclass(frozen=True)
class Options:
    """The options of every mixer; a run uses those of the mixers in its pattern."""

    attention: AttentionOptions = field(default_factory=AttentionOptions)
    mamba2: Mamba2Options = field(default_factory=Mamba2Options)
    gdn: GdnOptions = field(default_factory=GdnOptions)
    comba: CombaOptions = field(default_factory=CombaOptions)
    kda: KdaOptions = field(default_factory=KdaOptions)
    mdn: MdnOptions = field(default_factory=MdnOptions)
