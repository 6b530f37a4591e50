"""AdamW with decay groups, and the learning rate as a pure function of the step."""

import math

import torch

from mdn.config import RunConfig
from mdn.models.lm import LanguageModel


def learning_rate(run: RunConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up over `warmup_steps`, then a cosine that reaches `lr_final` × peak at the last step. It is
    a function of the step alone, so a resumed training cannot be off by one.
    """
    peak, warmup = run.lr, run.training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1.0, (step - warmup) / max(1, run.training.steps - 1 - warmup))
    floor = run.optimizer.lr_final
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))


def build_optimizer(model: LanguageModel, run: RunConfig) -> torch.optim.AdamW:
    """AdamW over the model's two groups: matrices decay, gates' parameters, norms and biases do not."""
    decay, no_decay = model.parameter_groups()
    settings = run.optimizer
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in decay], "weight_decay": settings.weight_decay},
            {"params": [p for _, p in no_decay], "weight_decay": 0.0},
        ],
        lr=learning_rate(run, 0),
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
