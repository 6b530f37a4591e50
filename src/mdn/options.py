"""What a user may change about each mixer, and the sizes that fit it. Free of torch, so that reading
params.yaml stays quick."""

from dataclasses import dataclass, field
from typing import Annotated

from mdn.typed import Bound, Count, Positive, one_of


@dataclass(frozen=True)
class Shape:
    """Size of one model at one scale. `head_k` and `head_v` are the key and value sizes of a head."""

    layers: Count
    heads: Count
    head_k: Count
    head_v: Count
    attention_heads: Count | None = None  # heads of the attention layers of a hybrid; null: `heads`


class MixerOptions:
    """Base of every mixer's options."""

    def check(self, d_model: int, shape: Shape) -> None:
        """Raises ValueError, with the remedy, for a shape that does not fit this mixer at a model width."""


@dataclass(frozen=True)
class AttentionOptions(MixerOptions):
    rope_theta: Positive = 10000.0

    def check(self, d_model: int, shape: Shape) -> None:
        heads = shape.attention_heads or shape.heads
        if d_model % (2 * heads):
            name = "attention_heads" if shape.attention_heads else "heads"
            remedy = "an even d_model" if d_model % 2 else f"as {name} a divisor of {d_model // 2}"
            raise ValueError(
                f"attention: {heads} heads do not divide d_model={d_model} into heads of even size; "
                f"use {remedy}"
            )


@dataclass(frozen=True)
class Mamba2Options(MixerOptions):
    expand: Count = 2
    convolution: Count = 4

    def check(self, d_model: int, shape: Shape) -> None:
        inner, wanted = shape.heads * shape.head_v, self.expand * d_model
        if inner != wanted:
            raise ValueError(
                f"mamba2: heads={shape.heads} of head_v={shape.head_v} make {inner} channels, not "
                f"expand·d_model = {wanted}; use heads={wanted / shape.head_v:g}"
            )


@dataclass(frozen=True)
class GdnOptions(MixerOptions):
    convolution: Count = 4
    gate_bounds: bool = False  # alpha_max = cos^2(theta), beta_max = sin^2(theta), as in MDN


@dataclass(frozen=True)
class CombaOptions(MixerOptions):
    convolution: Count = 4
    output_correction: bool = True


@dataclass(frozen=True)
class KdaOptions(MixerOptions):
    convolution: Count = 4
    init: Annotated[str, one_of("kda", "gdn")] = (
        "kda"  # rates exp(A_log) start in (1, 16); gdn: in (0, 16), as GDN's
    )


TAUS = ("sqrt(d/h)", "sqrt(d)", "sqrt(d/8)")  # d model width, h heads


def _is_temperature(tau: str) -> bool:
    try:
        return tau in TAUS or float(tau) > 0
    except ValueError:
        return False


@dataclass(frozen=True)
class MdnOptions(MixerOptions):
    convolution: Count = 4
    tau: Annotated[str, Bound(f"{', '.join(TAUS)} or a number above 0", _is_temperature)] = (
        "sqrt(d/h)"  # of eta
    )
    eta: Annotated[str, one_of("tanh", "sigmoid")] = "tanh"  # tanh: tanh(e/tau) + 1; sigmoid: 2 sigmoid(e)
    log_mu_min: float | None = -2.0  # lower bound of log mu; null: none
    alpha_bound: bool = True  # false: alpha_max = 1
    beta_bound: bool = True  # false: beta_max = 1
    output_correction: bool = True  # q <- q - d k


@dataclass(frozen=True)
class Options:
    """The options of every mixer; a run uses those of the mixers in its pattern."""

    attention: AttentionOptions = field(default_factory=AttentionOptions)
    mamba2: Mamba2Options = field(default_factory=Mamba2Options)
    gdn: GdnOptions = field(default_factory=GdnOptions)
    comba: CombaOptions = field(default_factory=CombaOptions)
    kda: KdaOptions = field(default_factory=KdaOptions)
    mdn: MdnOptions = field(default_factory=MdnOptions)
