"""One layer: x ← x + mixer(RMSNorm(x)), then x ← x + SwiGLU(RMSNorm(x)) unless the mixer is the whole block.

B batch · T tokens · D model width
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mdn.mixers import Mixer, State
from mdn.mixers.base import EPS
from mdn_kernels.common import fused


def mlp_width(d_model: int) -> int:
    """8/3 of the model width, so that three matrices hold as much as two of 4 D; up to a multiple of 256."""
    return 256 * -(-8 * d_model // (3 * 256))


class SwiGLU(nn.Module):
    """W_down [silu(W_gate x) ⊙ W_up x]. The rows of `up` are those of W_gate, then those of W_up."""

    def __init__(self, d_model: int):
        super().__init__()
        self.up = nn.Linear(d_model, 2 * mlp_width(d_model), bias=False)
        self.down = nn.Linear(mlp_width(d_model), d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        both = self.up(x_BTD)
        if fused.launches(both):
            return self.down(fused.swiglu(both))
        gate, up = both.chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, d_model: int, mixer: Mixer, mlp: bool):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(d_model, eps=EPS)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(d_model, eps=EPS) if mlp else None
        self.mlp = SwiGLU(d_model) if mlp else None
        self.recompute = False  # see LanguageModel.recompute
        self.compiled: Callable | None = None  # see LanguageModel.compile_blocks

    def forward(
        self, x_BTD: Tensor, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State | None]:
        run = self.compiled or self._forward
        if self.recompute and torch.is_grad_enabled():
            # Nothing in a block is random.
            return checkpoint(run, x_BTD, state, cu_seqlens, use_reentrant=False, preserve_rng_state=False)
        return run(x_BTD, state, cu_seqlens)

    def _forward(
        self, x_BTD: Tensor, state: State | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, State | None]:
        y_BTD, state = self.mixer(self.mixer_norm(x_BTD), state, cu_seqlens)
        x_BTD = x_BTD + y_BTD
        if self.mlp is not None and self.mlp_norm is not None:
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return x_BTD, state
