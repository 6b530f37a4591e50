"""The model as a whole: decoding, generation, loss, weight decay, saving."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from mdn.config import ConfigError
from mdn.models import LanguageModel, build, load

MODELS = ["transformer", "mamba2", "gdn", "comba", "kda", "mdn", "mamba2-h-3to1", "mdn-h-3to1"]


def ids(B: int, T: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(61, (B, T), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decoding_equal_the_full_forward(name, make_model):
    model, tokens = make_model(name), ids(2, 75)
    expected, none = model(tokens)
    assert none is None
    logits, states = model(tokens[:, :70], model.init_states(2))
    parts = [logits]
    for token in tokens[:, 70:].split(1, 1):
        logits, states = model(token, states)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_has_the_loss_and_gradients_of_its_documents_one_by_one(name, make_model):
    model = make_model(name).double()
    lengths = [1, 20, 3, 66, 1, 2]
    tokens, labels = ids(1, sum(lengths)), ids(1, sum(lengths), seed=2)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    alone = [
        model.loss(part, label, reduction="sum")
        for part, label in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True)
    ]
    (torch.stack(alone).sum() / sum(lengths)).backward()
    expected = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad(set_to_none=True)
    loss = model.loss(tokens, labels, offsets.int())
    torch.testing.assert_close(loss, torch.stack(alone).sum() / sum(lengths))
    loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[parameter], atol=1e-9, rtol=1e-6, msg=key)
    with pytest.raises(AssertionError):  # it would show if documents were not kept apart
        torch.testing.assert_close(model.loss(tokens, labels), loss)


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_activations_give_the_same_gradients(name, make_model):
    model, tokens, labels = make_model(name), ids(2, 70), ids(2, 70, seed=2)
    model.loss(tokens, labels).backward()
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad(set_to_none=True)
    calls = []
    handle = model.blocks[1].mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    model.recompute(True)
    model.loss(tokens, labels).backward()
    handle.remove()
    assert len(calls) == 2
    assert all(torch.equal(parameter.grad, kept[parameter]) for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("name", ["mdn-h-3to1", "mamba2"])
def test_packed_sequences_equal_separate_ones(name, make_model):
    model, tokens = make_model(name), ids(1, 90)
    packed, _ = model(tokens, cu_seqlens=torch.tensor([0, 20, 90]))
    separate = torch.cat([model(tokens[:, :20])[0], model(tokens[:, 20:])[0]], 1)
    torch.testing.assert_close(packed, separate, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("offsets", "problem"), [([1, 20], "starts at 1"), ([0, 9, 4, 20], "decreases"), ([0, 19], "ends at 19")]
)
def test_offsets_that_do_not_divide_the_tokens_are_refused(offsets, problem, make_model):
    with pytest.raises(ValueError, match=problem):
        make_model("transformer", layers=1)(ids(1, 20), cu_seqlens=torch.tensor(offsets))


@torch.no_grad()
@pytest.mark.parametrize("name", ["transformer", "mdn", "mdn-h-3to1"])
def test_greedy_generation_takes_the_argmax_of_the_full_forward(name, make_model):
    model, prompt = make_model(name), ids(3, 5)
    text = prompt
    for _ in range(8):
        text = torch.cat([text, model(text)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(model.generate(prompt, 8), text)


def test_generation_stops_at_the_end_of_text_and_fills_up(make_model):
    model, prompt = make_model("mdn"), ids(2, 5)
    free = model.generate(prompt, 12)[:, 5:]
    eot = int(free[0, 2])
    until = [row.tolist().index(eot) + 1 if eot in row else len(row) for row in free]
    text = model.generate(prompt, 12, eot=eot)[:, 5:]
    assert text.shape[1] == max(until)
    for row, expected, n in zip(text, free, until, strict=True):
        assert torch.equal(row[:n], expected[:n])
        assert (row[n:] == eot).all()


def test_sampling_follows_the_softmax_and_its_generator(make_model):
    model = make_model("transformer", layers=1)
    prompt = ids(1, 3).expand(4000, 3)

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, 1, temperature=2.0, generator=generator)[:, -1]

    with torch.no_grad():
        chances = torch.softmax(model(prompt[:1])[0][0, -1] / 2.0, -1)
    drawn = draw(0)
    frequencies = drawn.bincount(minlength=61) / 4000
    deviation = (chances * (1 - chances) / 4000).sqrt()
    assert ((frequencies - chances).abs() <= 5 * deviation + 1e-3).all()
    assert torch.equal(drawn, draw(0))
    assert not torch.equal(drawn, draw(1))


def test_generation_of_nothing_or_from_nothing(make_model):
    model = make_model("mdn", layers=1)
    assert torch.equal(model.generate(ids(1, 3), 0), ids(1, 3))
    with pytest.raises(ValueError, match="no prompt"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="negative"):
        model.generate(ids(1, 3), 3, temperature=-1.0)


@pytest.mark.parametrize("name", ["transformer", "mdn", "mamba2"])
def test_loss_is_the_cross_entropy_of_the_logits(name, make_model):
    model, tokens = make_model(name), ids(2, 40)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    loss = model.loss(tokens, labels)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = F.cross_entropy(model(tokens)[0].flatten(0, 1), labels.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_training_under_autocast_is_finite_with_float32_parameters(name, make_model):
    model, tokens = make_model(name), ids(2, 70)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens, tokens.roll(-1, 1))
    loss.backward()
    assert loss.dtype == torch.float32
    with torch.no_grad():
        assert abs(loss - model.loss(tokens, tokens.roll(-1, 1))) < 0.05 * loss.detach()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


NO_DECAY = {
    "A_log", "dt_bias", "Mu_log", "mu_bias", "log_factor", "D_log", "D", "decay",
    "conv.bias", "norm.weight", "mixer_norm.weight", "mlp_norm.weight", "gate.1.bias",
}  # fmt: skip


@pytest.mark.parametrize("name", [*MODELS, "mdn-no-momentum"])
def test_scales_and_biases_take_no_weight_decay_and_matrices_do(name, make_model):
    model = make_model(name)
    decay, no_decay = model.parameter_groups()
    for parameter_name, parameter in no_decay:
        assert f".{parameter_name}".endswith(tuple(f".{end}" for end in NO_DECAY)), parameter_name
        assert parameter.dim() == 1
    assert not [n for n, _ in decay if n.split(".")[-1] in NO_DECAY or "norm" in n or n.endswith("bias")]
    assert {"embedding.weight", "head.weight"} <= {n for n, _ in decay}
    together = [parameter for _, parameter in decay + no_decay]
    assert {id(p) for p in together} == {id(p) for p in model.parameters()}
    assert len(together) == len({id(p) for p in together})


def test_a_hybrid_takes_the_kernel_for_its_linear_layers_only(make_run):
    model = LanguageModel(replace(make_run("mdn-h-3to1"), kernel="recurrent"), 61)
    assert [model.mixer(n).kernel for n in range(3)] == ["recurrent"] * 3
    with pytest.raises(ValueError, match=r"momentum_delta_rule has no version 'fast'.*v2_segsum"):
        LanguageModel(replace(make_run("mdn-h-3to1"), kernel="fast"), 61)


def test_a_saved_model_loads_as_it_was(make_run, tmp_path):
    run = make_run("mdn-h-3to1")
    torch.manual_seed(3)
    model = LanguageModel(run, 61)
    run.to_yaml(tmp_path / "config.yaml")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert not loaded.training
    assert loaded.run == run
    assert torch.equal(loaded(ids(1, 20))[0], model(ids(1, 20))[0])
    assert loaded.generate(ids(1, 4), 3).shape == (1, 7)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config.yaml; train this model first"):
        load(tmp_path)


def test_the_seed_decides_the_initial_values(make_run):
    run = make_run("mdn")
    first, second, third = (torch.manual_seed(seed) and build(run).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(first["head.weight"], third["head.weight"])
