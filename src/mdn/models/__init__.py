"""Language models: the stack around the mixers, and what it costs."""

from mdn.models.lm import LanguageModel, build, load

__all__ = ["LanguageModel", "build", "load"]
