"""SSD by flash-linear-attention's `chunk_simple_gla`, which is the same recurrence."""

from mdn_kernels.common.fla import called_as_version, fla_operator

forward = called_as_version(fla_operator("simple_gla", "chunk_simple_gla"), normalizes=False)
