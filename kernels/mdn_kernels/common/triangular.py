"""Triangular systems of the delta rules."""

import torch
from torch import Tensor


def solve_unit_lower(lower: Tensor, rhs: Tensor) -> Tensor:
    """X [..., C, D] with (I + strictly lower part of `lower`) X = rhs; lower [..., C, C], rhs [..., C, D]."""
    return torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
