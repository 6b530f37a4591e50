"""Comba for one token, as one Triton kernel (common/step_triton.py)."""

from functools import partial

from mdn_kernels.comba import recurrent
from mdn_kernels.common.step_triton import step

forward = partial(step, recurrent.forward, ("q", "k", "v", "p", "log_alpha", "beta"))
