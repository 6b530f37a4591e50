"""The momentum delta rule for one token, as one Triton kernel (common/step_triton.py)."""

from functools import partial

from mdn_kernels.common.step_triton import step
from mdn_kernels.momentum_delta_rule import recurrent

forward = partial(step, recurrent.forward, ("q", "k", "v", "log_alpha", "beta", "log_mu", "eta"))
