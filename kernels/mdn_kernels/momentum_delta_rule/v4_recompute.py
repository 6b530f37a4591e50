"""The momentum delta rule by v4_hopper, with the residuals Ṽ computed again for the backward.

What changed from v4_hopper: v is kept in place of Ṽ, and the backward solves for Ṽ once more before it uses
them, as the paper's variant without materialised residuals.
"""

from functools import partial

from mdn_kernels.momentum_delta_rule import v4_hopper

forward = partial(v4_hopper.forward, save_residual=False)
