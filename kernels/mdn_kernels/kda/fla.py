"""KDA by flash-linear-attention's `chunk_kda`; its gates are ours, computed before."""

from mdn_kernels.common.fla import called_as_version, fla_operator

forward = called_as_version(fla_operator("kda", "chunk_kda"))
