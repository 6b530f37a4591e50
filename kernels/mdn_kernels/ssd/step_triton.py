"""SSD for one token, as one Triton kernel (common/step_triton.py)."""

from functools import partial

from mdn_kernels.common.step_triton import step
from mdn_kernels.ssd import recurrent

forward = partial(step, recurrent.forward, ("q", "k", "v", "log_alpha"))
