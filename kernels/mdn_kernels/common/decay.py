"""Decay matrices from log gates.

No exponent is ever positive, and no running sums are subtracted: exp(A_i − A_r) from running sums A is NaN
where both are −inf and loses digits where both are large, so each segment is summed by itself.
"""

from torch import Tensor


def segment_decay(log_gate: Tensor) -> Tensor:
    """L [..., C, C] with L[i, r] = exp(Σ_{r<s≤i} log_gate_s) for r ≤ i, 0 above; log_gate [..., C] ≤ 0.

    The diagonal is 1. Where log_gate is −inf, L has exact zeros and the gradient is 0.
    """
    length = log_gate.shape[-1]
    terms = log_gate[..., None].expand(*log_gate.shape, length).tril(-1)
    return terms.cumsum(-2).exp().tril()


def running_decay(log_gate: Tensor) -> Tensor:
    """a [..., C] with a_i = exp(Σ_{s≤i} log_gate_s): what token i finds of a state from before the chunk."""
    return log_gate.cumsum(-1).exp()
