"""FLA's weights in our models: what is called what, and, where FLA 0.6.0 is installed, that its layers and
our mixers give the same outputs and gradients: on a card, or interpreted on the CPU in a process of its own.
"""

import copy
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.interpreter import interpret, interpreted_only, starts_interpreter

from mdn.config import Shape
from mdn.mixers import mixer_class
from mdn.models import from_fla, load
from mdn.models.from_fla import mixer_weights, model_weights
from mdn.options import Options
from mdn_kernels.testing import relative_error

LAYERS = ["attention", "mamba2", "gdn", "comba", "kda", "mdn"]
needs_fla = pytest.mark.skipif(
    find_spec("fla") is None or find_spec("einops") is None, reason="needs flash-linear-attention"
)


def split(weight, *sizes):
    return weight.split(list(sizes), 0)


def as_fla(model, run):
    """The model's weights as FLA's model of a gated delta rule, of attention or of Mamba2 calls them."""
    ours, shape, D = model.state_dict(), run.shape, run.d_model
    root = "backbone" if run.pattern == "mamba2" else "model"
    theirs = {f"{root}.embeddings.weight": ours["embedding.weight"], "lm_head.weight": ours["head.weight"]}
    theirs[f"{root}.{'norm_f' if root == 'backbone' else 'norm'}.weight"] = ours["norm.weight"]
    for n in range(shape.layers):
        block = {x.removeprefix(f"blocks.{n}."): y for x, y in ours.items() if x.startswith(f"blocks.{n}.")}
        mixer = {x.removeprefix("mixer."): y for x, y in block.items() if x.startswith("mixer.")}
        if run.pattern == "mamba2":
            found = {x: mixer[x] for x in ("in_proj.weight", "norm.weight", "A_log", "dt_bias", "D")}
            found |= {"conv1d.weight": mixer["conv.weight"][:, None], "conv1d.bias": mixer["conv.bias"]}
            found["out_proj.weight"] = mixer["out.weight"]
            theirs[f"backbone.layers.{n}.norm.weight"] = block["mixer_norm.weight"]
            theirs |= {f"backbone.layers.{n}.mixer.{x}": y for x, y in found.items()}
            continue
        if run.pattern == "attention":
            found = dict(zip("qkv", split(mixer["qkv.weight"], D, D, D), strict=True))
            found = {f"{x}_proj.weight": y for x, y in found.items()} | {"o_proj.weight": mixer["out.weight"]}
            found["rotary.inv_freq"] = torch.ones(3)
        else:
            sizes = [shape.heads * shape.head_k] * 2 + [shape.heads * shape.head_v]
            found = {x: mixer[x] for x in ("A_log", "dt_bias")}
            for x, y in zip("qkv", split(mixer["qkv.proj.weight"], *sizes), strict=True):
                found[f"{x}_proj.weight"] = y
            for x, y in zip("qkv", split(mixer["qkv.conv.weight"], *sizes), strict=True):
                found[f"{x}_conv1d.weight"] = y[:, None]
            found["a_proj.weight"], found["b_proj.weight"] = split(mixer["ab.weight"], *[shape.heads] * 2)
            found["g_proj.weight"] = mixer["gate.weight"]
            found["o_norm.weight"], found["o_proj.weight"] = (
                mixer["out.norm.weight"],
                mixer["out.proj.weight"],
            )
        theirs |= {f"model.layers.{n}.attn.{x}": y for x, y in found.items()}
        gate, up = block["mlp.up.weight"].chunk(2)
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": block["mlp.down.weight"]}
        theirs |= {f"model.layers.{n}.mlp.{x}.weight": y for x, y in mlp.items()}
        theirs[f"model.layers.{n}.attn_norm.weight"] = block["mixer_norm.weight"]
        theirs[f"model.layers.{n}.mlp_norm.weight"] = block["mlp_norm.weight"]
    return theirs


@pytest.mark.parametrize("name", ["gdn", "transformer", "mamba2"])
def test_every_weight_of_a_model_finds_its_place(name, make_model, make_run):
    run, model = make_run(name, layers=2), make_model(name, layers=2)
    found = model_weights(run, as_fla(model, run))
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for x, y in expected.items():
        assert torch.equal(found[x], y), x


def test_tied_embeddings_are_the_head_too(make_model, make_run):
    run, model = make_run("gdn", layers=1), make_model("gdn", layers=1)
    theirs = as_fla(model, run)
    del theirs["lm_head.weight"]
    found = model_weights(run, theirs)
    assert torch.equal(found["head.weight"], model.embedding.weight)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model.layers.0.attn.q_conv1d.bias": torch.zeros(3)}, "no place for q_conv1d.bias"),
        ({"model.layers.0.attn.a_proj.weight": None}, "FLA's layer has no a_proj.weight"),
        ({"model.layers.0.mlp.up_proj.weight": None}, "no layers.0.mlp.up_proj.weight"),
        (
            {"model.layers.0.attn.A_log": torch.zeros(3)},
            r"blocks.0.mixer.A_log is \[3\] .* and \[2\] in ours",
        ),
        ({"model.layers.1.attn_norm.weight": torch.ones(3)}, "FLA's model has 2 layers, ours 1"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, problem, make_model, make_run):
    run = make_run("gdn", layers=1)
    theirs = as_fla(make_model("gdn", layers=1), run) | change
    with pytest.raises(ValueError, match=problem):
        model_weights(run, {x: y for x, y in theirs.items() if y is not None})


def test_writes_a_run_folder_that_generates(tmp_path, monkeypatch, make_model, make_run, params, capsys):
    run, model = make_run("gdn", layers=1), make_model("gdn", layers=1)
    save_file({x: y.clone() for x, y in as_fla(model, run).items()}, tmp_path / "model.safetensors")
    monkeypatch.setattr(from_fla, "load", lambda path: params)
    monkeypatch.setattr(type(params), "run", lambda self, scale, name: run)
    arguments = [str(tmp_path / "model.safetensors"), "--scale", "smoke", "--model", "gdn"]
    arguments += ["--out", str(tmp_path / "run")]
    assert from_fla.main(arguments) == 0
    prompt = torch.tensor([[3, 5]])
    assert torch.equal(load(tmp_path / "run").generate(prompt, 4), model.generate(prompt, 4))
    assert from_fla.main(arguments) == 2
    assert "exists" in capsys.readouterr().err


def test_no_run_folder_is_made_of_an_mdn_which_would_be_another_model(tmp_path, monkeypatch, params, capsys):
    monkeypatch.setattr(from_fla, "load", lambda path: params)
    arguments = ["unread.safetensors", "--scale", "smoke", "--model", "mdn", "--out", str(tmp_path / "run")]
    assert from_fla.main(arguments) == 2
    assert "gates its output with SiLU" in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, monkeypatch, make_run, params, capsys):
    monkeypatch.setattr(from_fla, "load", lambda path: params)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(b"PK")
    arguments = [str(file), "--scale", "smoke", "--model", "gdn", "--out", str(tmp_path / "run")]
    assert from_fla.main(arguments) == 2
    assert "from_fla: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def flash_attention(q_BTHR, k_BTHR, v_BTHR, causal, window_size):
    """What FLA's layer calls of flash-attn, which needs a build of its own."""
    assert causal
    assert window_size == (-1, -1)
    heads_first = (x.transpose(1, 2) for x in (q_BTHR, k_BTHR, v_BTHR))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


@pytest.fixture
def _flash_attention(monkeypatch):
    monkeypatch.setattr("fla.layers.attn.flash_attn_func", flash_attention)


def fla_layer(name):
    """FLA's layer, and our mixer with its weights."""
    from fla import layers

    D, shape = 32, Shape(layers=1, heads=2, head_k=16, head_v=32)
    common = {"hidden_size": D, "num_heads": 2, "head_dim": 16, "norm_eps": 1e-6}
    torch.manual_seed(0)
    match name:
        case "attention":
            shape = Shape(layers=1, heads=2, head_k=16, head_v=16)
            layer = layers.Attention(hidden_size=D, num_heads=2, layer_idx=0)
        case "mamba2":
            shape = Shape(layers=1, heads=4, head_k=16, head_v=16)
            layer = layers.Mamba2(hidden_size=D, head_dim=16, state_size=16, norm_eps=1e-6)
        case "gdn":
            layer = layers.GatedDeltaNet(**common)
        case "comba":
            layer = layers.Comba(**common)
        case "kda":
            shape = Shape(layers=1, heads=2, head_k=16, head_v=16)
            layer = layers.KimiDeltaAttention(**common)
        case "mdn":
            layer = layers.MomentumDeltaNet(**common, mode="fused_recurrent")
    with torch.no_grad():
        for parameter in layer.parameters():  # no weight without effect, no norm that is just ones
            parameter.add_(0.2 * torch.randn_like(parameter))
    options = getattr(Options(), name)
    if name == "mdn":
        options = type(options)(tau="sqrt(d)")
    mixer = mixer_class(name)(D, shape, options)
    mixer.load_state_dict(mixer_weights(name, layer.state_dict()))
    if name == "mdn":
        mixer.out.activation = F.silu
    return layer, mixer


def compare(name, device, T, limit, gradients=True):
    """Outputs, and gradients of all weights, of FLA's layer and of our mixer with its weights."""
    layer, mixer = (x.to(device) for x in fla_layer(name))
    layer.train(gradients)  # without: by the recurrence
    exact = copy.deepcopy(mixer).to("cpu", torch.float64)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, T, 32, generator=generator).to(device) for _ in range(2))
    with (
        torch.set_grad_enabled(gradients),
        torch.autocast(device, torch.bfloat16, enabled=device == "cuda"),
    ):
        y, expected = mixer(x)[0], layer(x)[0]
    assert relative_error(y, expected) < limit
    if not gradients:
        return
    (names, weights), (theirs, layers) = (zip(*x.named_parameters(), strict=True) for x in (mixer, layer))
    found = torch.autograd.grad(y, weights, dy.to(y.dtype))
    expected = torch.autograd.grad(expected, layers, dy.to(expected.dtype))
    expected = mixer_weights(name, dict(zip(theirs, expected, strict=True)))
    exact_y = exact(x.to("cpu", torch.float64))[0]
    exact = torch.autograd.grad(exact_y, list(exact.parameters()), dy.to("cpu", torch.float64))
    for n, ours, right in zip(names, found, exact, strict=True):
        # In half precision the gradients of a few numbers a head are sums that cancel: no further from
        # float64 than FLA's are, which shall be those of the same function.
        wrong = relative_error(expected[n].cpu(), right)
        assert wrong < 5 * limit, n
        assert relative_error(ours.cpu(), right) <= max(limit, wrong), n


@pytest.mark.gpu
@needs_fla
@pytest.mark.usefixtures("_flash_attention")
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_layer_on_a_card(name):
    compare(name, "cuda", T=150, limit=0.05)


@needs_fla
@interpreted_only
@pytest.mark.usefixtures("_flash_attention")
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_layer(name, monkeypatch):
    from triton.runtime.autotuner import Autotuner

    def first(self, *arguments, **keywords):  # timing candidates needs a card
        return self.fn.run(*arguments, **keywords, **self.configs[0].all_kwargs())

    monkeypatch.setattr(Autotuner, "run", first)
    # FLA's chunked kernels are not for the interpreter, and its recurrences have no gradients.
    compare(name, "cpu", T=40, limit=1e-5, gradients=name in ("attention", "mamba2", "mdn"))


@pytest.mark.slow
@needs_fla
@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__, "-k", "those_of_the_layer", passed="6 passed")
