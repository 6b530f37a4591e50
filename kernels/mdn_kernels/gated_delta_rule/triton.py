"""The gated delta rule in Triton, by the chunk form of chunk.py, with a backward written by hand.

The kernels are those of common/delta_triton.py.
"""

from torch import Tensor

from mdn_kernels.common.delta_triton import delta_rule, launches

__all__ = ["forward", "launches"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    normalize_qk: bool,
) -> tuple[Tensor, Tensor | None]:
    return delta_rule(
        q,
        k,
        v,
        None,
        log_alpha,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        normalize_qk=normalize_qk,
    )
