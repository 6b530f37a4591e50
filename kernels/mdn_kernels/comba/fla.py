"""Comba by flash-linear-attention's `chunk_comba`."""

from mdn_kernels.common.fla import called_as_version, fla_operator

forward = called_as_version(fla_operator("comba", "chunk_comba"))
