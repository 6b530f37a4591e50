"""The gated delta rule by flash-linear-attention's `chunk_gated_delta_rule`."""

from mdn_kernels.common.fla import called_as_version, fla_operator

forward = called_as_version(fla_operator("gated_delta_rule", "chunk_gated_delta_rule"))
