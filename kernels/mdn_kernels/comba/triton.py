"""Comba in Triton, by the chunk form of chunk.py, with a backward written by hand.

The kernels are those of common/delta_triton.py, whose `delta_rule` takes comba's arguments as they are.
"""

from mdn_kernels.common.delta_triton import delta_rule as forward
from mdn_kernels.common.delta_triton import launches

__all__ = ["forward", "launches"]
