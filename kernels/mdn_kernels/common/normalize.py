"""L2 normalisation of queries and keys."""

import torch
from torch import Tensor


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|² + eps) over the last dimension, which is finite and differentiable at 0."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
