"""Short causal depthwise convolution, with the state that decoding carries on from.

B batch · T tokens · D channels · W width · N sequences
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mdn_kernels.common.check import check_cu_seqlens


def short_convolution(
    x_BTD: Tensor, weight_DW: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y_t = Σ_w weight[:, w] ⊙ x_{t − (W−1) + w}: the last weight is that of the current token.

    Args:
        x_BTD: inputs; with cu_seqlens B = 1.
        weight_DW: one filter a channel, W ≥ 1.
        state: [N, W − 1, D], the inputs just before each sequence; None: zeros.
        cu_seqlens: [N + 1] offsets of the N sequences packed along T; None: N = B.

    Returns:
        y [B, T, D] in x's dtype, and the new state [N, W − 1, D]: each sequence's last W − 1 inputs.

    Raises:
        ValueError: shapes that do not match, or invalid cu_seqlens.
    """
    B, T, D = x_BTD.shape
    if weight_DW.dim() != 2 or weight_DW.shape[0] != D or weight_DW.shape[1] == 0:
        raise ValueError(f"weight has shape {list(weight_DW.shape)}; expected [D, W] = [{D}, W] with W ≥ 1")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    reach = weight_DW.shape[1] - 1
    if state is None:
        state = x_BTD.new_zeros(N, reach, D)
    elif tuple(state.shape) != (N, reach, D):
        raise ValueError(f"state has shape {list(state.shape)}; expected [N, W - 1, D] = {[N, reach, D]}")
    state = state.to(x_BTD.dtype)

    if cu_seqlens is None:
        padded = torch.cat([state, x_BTD], 1)
        return _convolve(padded, weight_DW), padded[:, T:].clone()  # a view would keep all of `padded` alive
    # Each sequence gets its own state in front; outputs whose window crosses two sequences are left out.
    lengths = cu_seqlens.diff().tolist()
    pieces = [torch.cat(pair) for pair in zip(state.unbind(0), x_BTD[0].split(lengths), strict=True)]
    y = _convolve(torch.cat(pieces)[None], weight_DW)
    keep = torch.cat([torch.arange(reach + length, device=x_BTD.device) >= reach for length in lengths])
    return y[:, keep[reach:]], torch.stack([piece[len(piece) - reach :] for piece in pieces])


def _convolve(padded_BPD: Tensor, weight_DW: Tensor) -> Tensor:
    """[B, P, D] -> [B, P − W + 1, D], one output for each full window."""
    weight = weight_DW.to(padded_BPD.dtype)[:, None]
    return F.conv1d(padded_BPD.mT, weight, groups=weight.shape[0]).mT
