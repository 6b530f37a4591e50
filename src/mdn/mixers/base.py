"""What the mixers share: their interface, the parts around the operators, and the decay gate.

B batch · T tokens · D model width · H heads · K key channels · V value channels · W convolution width ·
N sequences (B, or those packed along T when cu_seqlens is given)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mdn.config import ConfigError, Shape
from mdn.options import MixerOptions
from mdn.rules import Rule
from mdn_kernels.common import fused
from mdn_kernels.common.convolution import short_convolution
from mdn_kernels.registry import get

EPS = 1e-6  # of every RMSNorm
FUSED = {torch.sigmoid: "sigmoid", F.silu: "silu"}  # gates that `fused.gated_rms_norm` has

State = dict[str, Tensor]  # what decoding carries on from; one sequence a row


def precise(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is so already: the precision of gates, norms and losses."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def decay(raw: Tensor, rate_log: Tensor, bias: Tensor) -> Tensor:
    """The log of a decay, −exp(rate_log) · softplus(raw + bias) ≤ 0, as in Mamba2 and all that follow it."""
    return -precise(rate_log).exp() * F.softplus(precise(raw) + precise(bias))


def bounds(eta: Tensor | float, log_factor: Tensor) -> tuple[Tensor, Tensor]:
    """MDN's upper bounds (log α_max, β_max) = (log cos²θ, sin²θ) with θ = arctan(η · exp(log_factor)).

    With s = η · exp(log_factor) they are −log(1 + s²) and s² / (1 + s²): exact for small and large s.
    """
    square = (eta * precise(log_factor).exp()).square()
    return -torch.log1p(square), square / (1 + square)


class Mixer(nn.Module, ABC):
    """Mixes tokens over time: [B, T, D] -> [B, T, D], causal, and decodable token by token.

    Args:
        d_model: D.
        shape: heads and their sizes.
        options: the mixer's own dataclass of `mdn.options`.
        kernel: version of the operator; None: the best for the device. Attention has none and ignores it.

    Raises:
        ValueError: for a version that the operator does not have, or a shape that does not fit D.
    """

    op: ClassVar[str | None] = None  # its operator in mdn_kernels
    rule: ClassVar[Rule]

    def __init__(self, d_model: int, shape: Shape, options: MixerOptions, kernel: str | None = None):
        super().__init__()
        options.check(d_model, shape)
        if kernel is not None and self.op is not None:
            try:
                get(self.op, kernel)
            except ValueError as error:
                raise ConfigError(f"kernel: {error}") from None
        self.kernel = kernel

    @abstractmethod
    def init_state(
        self, batch: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """The state before the first token; dtype is that of the activations."""

    def with_room(self, state: State, tokens: int) -> State:
        """The same state at a fixed size for `tokens` more, one a call; itself if its size never changes."""
        return state

    @abstractmethod
    def forward(
        self, x_BTD: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        """Without a state: training, and no state comes back. With one: continues from it (prefill for any T,
        decoding for T = 1) and returns the next; the one given is left as it was.

        cu_seqlens [N + 1]: offsets of N sequences packed along T in a batch of one, which stay apart.
        """


class LinearMixer(Mixer):
    """A mixer whose memory is one or two matrices [H, K, V] and a short convolution's last inputs."""

    conv_channels: int
    # An analysis sets it and is shown what each call of the operator is given, by the operator's names.
    watch: Callable[[dict[str, Tensor]], object] | None = None

    def __init__(self, d_model: int, shape: Shape, options: Any, kernel: str | None = None):
        super().__init__(d_model, shape, options, kernel)
        self.state_shape = (shape.heads, shape.head_k, shape.head_v)
        self.reach = options.convolution - 1

    def init_state(
        self, batch: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        dtype = dtype or torch.get_default_dtype()
        state = {"conv": torch.zeros(batch, self.reach, self.conv_channels, device=device, dtype=dtype)}
        for name in self.rule.matrices:
            exact = torch.promote_types(dtype, torch.float32)
            state[name] = torch.zeros(batch, *self.state_shape, device=device, dtype=exact)
        return state

    def corrected(
        self, d_H: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, *others: Tensor
    ) -> tuple[list[Tensor], bool]:
        """The output correction: [q − d k, k, *others], and whether the operator has still to normalise them.

        One kernel corrects and normalises where it can, with d in float32. torch reads d in q's dtype, which
        leaves few right digits of a small q − d k. One token of decoding is normalised by the operator's own
        launch, and an analysis that watches is shown the keys before they are normalised.
        """
        if self.watch is None and q_BTHK.shape[1] > 1 and fused.launches(q_BTHK, k_BTHK):
            return fused.corrected_l2norm(d_H, q_BTHK, k_BTHK, *others), False
        d = d_H[:, None].to(q_BTHK.dtype)
        return [torch.addcmul(q_BTHK, k_BTHK, d, value=-1), k_BTHK, *others], True

    def apply_op(
        self, op: Callable, *inputs: Tensor, state: State | None, cu_seqlens: Tensor | None, **options: Any
    ) -> tuple[Tensor, State]:
        """Runs the operator on the state's matrices: its output and, with a state, the new matrices."""
        if self.watch is not None:
            self.watch(dict(zip(signature(op).parameters, inputs, strict=False)))
        names = self.rule.matrices
        initial = None if state is None else tuple(state[name] for name in names)
        o, final = op(
            *inputs,
            initial_state=initial[0] if initial is not None and len(names) == 1 else initial,
            output_final_state=state is not None,
            cu_seqlens=cu_seqlens,
            # One token has versions of its own, whatever version trained the model.
            version=self.kernel if inputs[0].shape[1] > 1 else None,
            **options,
        )
        if final is None:
            return o, {}
        return o, dict(zip(names, (final,) if len(names) == 1 else final, strict=True))


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over a few tokens, then SiLU; its channels come in parts of `sizes`."""

    def __init__(self, sizes: Sequence[int], width: int, bias: bool = False):
        super().__init__()
        self.sizes = list(sizes)
        self.weight = nn.Parameter(torch.empty(sum(sizes), width))
        self.bias = nn.Parameter(torch.empty(sum(sizes))) if bias else None

    def forward(
        self, x_BTC: Tensor, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[Sequence[Tensor], State]:
        if state is None and fused.launches(x_BTC):
            return fused.convolution_silu(x_BTC, self.weight, self.bias, cu_seqlens, self.sizes), {}
        y_BTC, last = short_convolution(x_BTC, self.weight, state["conv"] if state else None, cu_seqlens)
        if self.bias is not None:
            y_BTC = y_BTC + self.bias.to(y_BTC.dtype)
        return F.silu(y_BTC).split(self.sizes, -1), {"conv": last}


class QKV(nn.Module):
    """Queries, keys and values of the delta rules: one projection, one short convolution, SiLU.

    The rows of both weights are those of q, k and v, in that order.
    """

    def __init__(self, d_model: int, shape: Shape, width: int):
        super().__init__()
        self.shape = shape
        self.sizes = [shape.heads * shape.head_k, shape.heads * shape.head_k, shape.heads * shape.head_v]
        self.proj = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.conv = ShortConvolution(self.sizes, width)

    def forward(
        self, x_BTD: Tensor, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        parts, conv = self.conv(self.proj(x_BTD), state, cu_seqlens)
        q, k, v = (part.unflatten(-1, (self.shape.heads, -1)) for part in parts)
        return q, k, v, conv


class HeadGates(nn.Linear):
    """`count` numbers a head from bias-free linear maps, [B, T, count · H]: H first ones, H second ones, and
    so on. In float32 whatever autocast says: decays multiply up over thousands of tokens."""

    def __init__(self, d_model: int, heads: int, count: int):
        super().__init__(d_model, heads * count, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):
            y = F.linear(x_BTD.to(self.weight.dtype), self.weight)
        return precise(y)


class GatedOutput(nn.Module):
    """y = W_o [RMSNorm(o) ⊙ activation(gate)], the norm over each head's V channels, one weight for all."""

    def __init__(self, d_model: int, shape: Shape, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.norm = nn.RMSNorm(shape.head_v, eps=EPS)
        self.proj = nn.Linear(shape.heads * shape.head_v, d_model, bias=False)
        self.activation = activation

    def forward(self, o_BTHV: Tensor, gate_BTC: Tensor) -> Tensor:
        gate_BTHV = gate_BTC.unflatten(-1, o_BTHV.shape[-2:])
        name = FUSED.get(self.activation)
        if name is not None and fused.launches(o_BTHV, gate_BTHV):
            y = fused.gated_rms_norm(o_BTHV, gate_BTHV, self.norm.weight, name, EPS)
            return self.proj(y.flatten(-2))
        y = F.rms_norm(precise(o_BTHV), self.norm.normalized_shape, precise(self.norm.weight), EPS)
        y = y * self.activation(precise(gate_BTHV))
        return self.proj(y.to(o_BTHV.dtype).flatten(-2))
