"""Learning rate as a function of the step, and the two decay groups."""

from dataclasses import replace

import pytest
import torch

from mdn.models.lm import LanguageModel
from mdn.training.optim import build_optimizer, learning_rate


def test_warmup_is_linear_and_the_cosine_ends_at_its_floor(params):
    for scale in ("smoke", "400m", "1b3"):
        run = params.run(scale, "mdn")
        warmup, last = run.training.warmup_steps, run.training.steps - 1
        assert learning_rate(run, 0) == pytest.approx(run.lr / warmup)
        assert learning_rate(run, warmup // 2 - 1) == pytest.approx(run.lr * (warmup // 2) / warmup)
        assert learning_rate(run, warmup - 1) == pytest.approx(run.lr)
        assert learning_rate(run, warmup) == pytest.approx(run.lr)
        assert learning_rate(run, (warmup + last) // 2) == pytest.approx(0.55 * run.lr, rel=0.05)
        assert learning_rate(run, last) == pytest.approx(0.1 * run.lr)
        rates = [learning_rate(run, step) for step in range(warmup, last + 1, max(1, last // 500))]
        assert rates == sorted(rates, reverse=True)


def test_no_warmup_starts_at_the_peak(tiny_run):
    run = replace(tiny_run, training=replace(tiny_run.training, warmup_tokens=0))
    assert learning_rate(run, 0) == pytest.approx(run.lr)


def test_gates_norms_and_biases_do_not_decay(params, tiny_run):
    model = LanguageModel(tiny_run)
    optimizer = build_optimizer(model, tiny_run)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert set(decay) == {id(p) for p in model.parameters()}
    spared = ("A_log", "Mu_log", "log_factor", "D_log", "dt_bias", "mu_bias", "norm")
    for name, parameter in model.named_parameters():
        wanted = 0.0 if any(word in name for word in spared) else 0.1
        assert decay[id(parameter)] == wanted, name


def test_the_optimizer_is_the_papers(tiny_run):
    settings = build_optimizer(LanguageModel(tiny_run), tiny_run).param_groups[0]
    assert settings["betas"] == (0.9, 0.95)
    assert settings["eps"] == 1e-15
    assert isinstance(build_optimizer(LanguageModel(tiny_run), tiny_run), torch.optim.AdamW)
