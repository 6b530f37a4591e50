"""Sizes of the mixers under test: odd, and no two alike."""

from mdn.config import Shape
from mdn.mixers import MIXERS

D_MODEL = 24
VARIANTS = [*MIXERS, "gdn-bounds"]


def shape(name: str) -> Shape:
    match name:
        case "mamba2":
            return Shape(layers=1, heads=4, head_k=5, head_v=12)
        case "attention":
            return Shape(layers=1, heads=3, head_k=8, head_v=8)
    return Shape(layers=1, heads=2, head_k=6, head_v=10)
