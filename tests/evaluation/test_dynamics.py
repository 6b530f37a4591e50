"""State changes, gates and spectra read out of a model, against its own passes over the same tokens."""

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mdn.config import Evaluation, Shape
from mdn.data.gpt2 import EOT
from mdn.data.shards import ShardWriter, write_index
from mdn.evaluation.dynamics import gates, state_changes
from mdn.evaluation.scoring import quiet
from mdn.evaluation.suites import NotRun, dynamics
from mdn.evaluation.suites.run import Cell, run_suite
from mdn.models.lm import LanguageModel
from mdn.options import Options
from mdn.tracking.record import Record

T, K, V, VOCABULARY = 20, 6, 8, 50257
RECURRENT = ["mamba2", "gdn", "comba", "kda", "mdn"]


@pytest.fixture
def build(params):
    """build(pattern, **options of its first mixer) -> a model of two layers whose gates move a lot."""

    def make(pattern: str, vocabulary: int = 50, **options) -> LanguageModel:
        mixers = pattern.split(",")
        heads = 8 if "mamba2" in mixers else 2
        defaults = {mixer: asdict(getattr(Options(), mixer)) for mixer in mixers}
        defaults[mixers[0]] |= options
        run = replace(
            params.run("smoke", "mdn"),
            d_model=32,
            pattern=pattern,
            shape=Shape(layers=2, heads=heads, head_k=K, head_v=V, attention_heads=2),
            options=defaults,
        )
        torch.manual_seed(0)
        model = LanguageModel(run, vocabulary)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.mul_(8)
        return model.double().eval()

    return make


def tokens(n: int = T) -> list[int]:
    return torch.randint(50, (n,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.no_grad()
@pytest.mark.parametrize("pattern", [*RECURRENT, "mdn,attention"])
def test_state_changes_are_those_between_passes_over_ever_longer_prefixes(build, pattern):
    model, ids = build(pattern), tokens()
    found = state_changes(model, ids)
    assert list(found) == ([0] if "attention" in pattern else [0, 1])
    before = model.init_states(1)
    for t in range(T):
        _, after = model.hidden(torch.tensor([ids[: t + 1]]), model.init_states(1))
        for layer, change in found.items():
            moved = (after[layer]["S"] - before[layer]["S"])[0].numpy()
            norms = [np.sqrt(np.square(head).sum()) for head in moved]
            assert change[t] == pytest.approx(sum(norms) / len(norms), rel=1e-9)
        before = after


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["gdn", "mdn"])
def test_gates_are_the_mixers_own(build, pattern):
    model, ids, inputs = build(pattern), tokens(), []
    model.mixer(1).register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    found = gates(model, ids)[1]
    own = model.mixer(1).head_gates(inputs[0])
    assert [*found] == ["log_alpha", "beta", *(["log_mu", "eta"] if pattern == "mdn" else []), "key"]
    for name, gate in zip(found, own, strict=False):
        np.testing.assert_allclose(found[name], gate[0].numpy(), rtol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("mamba2", {}),
        ("gdn", {}),
        ("gdn", {"gate_bounds": True}),
        ("comba", {}),
        ("mdn", {}),
        ("mdn", {"beta_bound": False}),
    ],
)
def test_the_spectrum_is_that_of_what_the_mixer_does_to_its_state(build, pattern, options):
    """A token's map of the state is linear: its matrix, column by column, from the mixer's own steps."""
    model, ids, inputs = build(pattern, **options), tokens(), []
    mixer = model.mixer(0)
    handle = mixer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    gate = gates(model, ids)[0]
    handle.remove()
    along, across = dynamics._spectrum(pattern, gate)
    names = mixer.rule.matrices
    for t in (1, 7, T - 1):
        _, state = mixer(inputs[0][:, :t], mixer.init_state(1, dtype=torch.float64))
        _, base = mixer(inputs[0][:, t : t + 1], state)
        columns = []
        for name in names:
            for row in range(K):
                moved = {key: value.clone() for key, value in state.items()}
                moved[name][0, :, row, 0] += 1
                _, after = mixer(inputs[0][:, t : t + 1], moved)
                columns.append(torch.cat([(after[n] - base[n])[0, :, :, 0] for n in names], 1))
        for head, matrix in enumerate(torch.stack(columns, 2).numpy()):
            expected = np.concatenate([along[t, head], np.tile(across[t, head], K - 1)])
            found = np.linalg.eigvals(matrix)
            gaps = np.abs(found[:, None] - expected)
            assert max(gaps.min(0).max(), gaps.min(1).max()) < 1e-5
            assert found.sum().real == pytest.approx(expected.sum().real, abs=1e-9)


def test_nothing_is_watched_afterwards_even_after_a_failure(build, monkeypatch):
    model = build("mdn")
    gates(model, tokens())
    assert model.mixer(0).watch is None
    monkeypatch.setattr(model.mixer(1), "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gates(model, tokens())
    assert model.mixer(0).watch is None


@torch.no_grad()
def test_states_and_gates_that_are_not_finite_are_a_failure(build):
    model = build("mdn")
    model.mixer(0).dt_bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="gates are not finite"):
        gates(model, tokens())
    with pytest.raises(FloatingPointError, match="states are not finite"):
        state_changes(model, tokens())


def write_tokens(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for name in names:
        writer = ShardWriter(folder, name, 1000)
        writer.write(np.arange(90, dtype=np.uint16))
        splits[name] = writer.close()
    write_index(folder, splits, [])


@pytest.fixture
def cell(tmp_path, tiny_run, build) -> Cell:
    folder = tmp_path / "tokens/smoke"
    write_tokens(folder, "train", "heldout_wiki", "heldout_c4")
    record = Record(tmp_path / "runs/smoke/mdn")
    record.folder.mkdir(parents=True)
    tiny_run.to_yaml(record.folder / "config.yaml")
    save_file({"head": torch.ones(1)}, record.weights)
    setting = Evaluation(limit=2, window=T, batch_tokens=512, heldout_tokens=100)
    return Cell(record, build("mdn", VOCABULARY), SimpleNamespace(), setting, tmp_path / "raw", folder)


def evaluated(cell: Cell) -> tuple[dict, list[dict]]:
    path = run_suite(cell, "dynamics", lambda name: quiet)
    with gzip.open(path.with_name("dynamics.samples.jsonl.gz"), "rt") as file:
        return json.loads(path.read_text()), [json.loads(line) for line in file]


def test_the_suite_reports_means_and_a_row_for_every_layer(cell):
    report, rows = evaluated(cell)
    values = {(row["task"], row["metric"]): row["value"] for row in report["results"]}
    assert [*values] == [
        ("state_change", "mean"),
        *(("transition", m) for m in ("oscillating", "negative", "radius")),
    ]
    assert all(row["n"] == T and row["data"].startswith("smoke, heldout_wiki") for row in report["results"])
    assert [(row["task"], row["layer"]) for row in rows] == [
        (task, layer) for task in ("state_change", "transition") for layer in (0, 1)
    ]
    changes = [row["change"] for row in rows[:2]]
    assert values["state_change", "mean"] == pytest.approx(np.mean(changes), rel=1e-5)
    for row in rows[2:]:
        count = sum(n for *_, n in row["along"]["real"]) + 2 * sum(n for *_, n in row["along"]["complex"])
        assert count == 2 * 2 * T  # two eigenvalues, two heads
        assert sum(n for *_, n in row["across"]["real"]) == 2 * 2 * T
        assert all(quantiles == sorted(quantiles) for quantiles in row["gates"].values())
    pairs = [sum(n for *_, n in row["along"]["complex"]) for row in rows[2:]]
    assert values["transition", "oscillating"] == pytest.approx(np.mean(pairs) / (2 * T))
    assert 0 < values["transition", "oscillating"] < 1
    assert values["transition", "radius"] <= 1
    assert (
        evaluated(replace(cell, evaluation=replace(cell.evaluation, window=T - 1)))[0]["identity"]
        != report["identity"]
    )


def test_shares_and_radius_are_those_of_all_layers_eigenvalues(cell, build):
    """Unbounded gates with α ≈ 1 and a small μ: β makes some real parts negative."""
    model = build("mdn", VOCABULARY, alpha_bound=False, beta_bound=False)
    with torch.no_grad():
        for layer in (0, 1):
            model.mixer(layer).A_log.fill_(4 * layer - 8)
            model.mixer(layer).Mu_log.fill_(8)
            model.mixer(layer).abme.weight.mul_(20)
    results, _ = dynamics.run(replace(cell, model=model), "transition", quiet)
    ids = [EOT, *range(T - 1)]  # the held-out text counts up
    layers = [dynamics._spectrum("mdn", gate) for gate in gates(model, ids).values()]
    along = np.stack([pair for pair, _ in layers])
    negative = (along.real < 0).any(-1)
    assert 0 < negative.mean() < 1
    wanted = {
        "oscillating": (along.imag != 0).any(-1).mean(),
        "negative": negative.mean(),
        "radius": max(np.abs(values).max() for pair in layers for values in pair),
    }
    assert {row["metric"]: row["value"] for row in results} == pytest.approx(wanted)


def test_what_does_not_apply_is_absent_with_a_reason(cell, build):
    report, rows = evaluated(replace(cell, model=build("kda,attention", VOCABULARY)))
    assert [row["metric"] for row in report["results"]] == ["mean"]
    assert [row.get("absent", "")[:9] for row in rows] == ["", "attention", "a decay f", "attention"]
    assert "log_alpha" in rows[2]["gates"]


def test_a_transformer_has_no_dynamics(cell, build):
    report, rows = evaluated(replace(cell, model=build("attention", VOCABULARY)))
    assert report["results"] == rows == []
    assert set(report["not_run"]) == {"state_change", "transition"}
    assert "keeps every key" in report["not_run"]["state_change"]


def test_without_held_out_text_it_says_so(cell):
    write_tokens(cell.tokens, "train")
    with pytest.raises(NotRun, match="holdout"):
        dynamics.run(cell, "transition", quiet)


def test_held_out_text_shorter_than_the_window_is_not_run_and_says_both_numbers(cell):
    with pytest.raises(NotRun, match="window: 92 is more than the 90 tokens of heldout_wiki and one"):
        dynamics.run(replace(cell, evaluation=replace(cell.evaluation, window=92)), "state_change", quiet)
    whole = replace(cell, evaluation=replace(cell.evaluation, window=91))
    assert dynamics.run(whole, "state_change", quiet)[0][0]["n"] == 91
