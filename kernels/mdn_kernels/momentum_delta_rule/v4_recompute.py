"""The momentum delta rule by v4_hopper, with nothing kept for the backward but the inputs.

What changed from v4_hopper: the backward runs the forward again, so the residuals Ṽ, T⁻¹, the scores and the
states between spans need not be kept, as in the paper's variant without materialised residuals.
"""

from functools import partial

from mdn_kernels.momentum_delta_rule import v4_hopper

forward = partial(v4_hopper.forward, save_residual=False)
