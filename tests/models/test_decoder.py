"""Decoding in place and from a CUDA graph gives what decoding anew gives."""

import pytest
import torch

from mdn.models.decoder import Decoder

RECURRENT = ["mamba2", "gdn", "comba", "kda", "mdn"]


def ids(B: int, T: int) -> torch.Tensor:
    return torch.randint(61, (B, T), generator=torch.Generator().manual_seed(1))


def decoder_after(model, prompt) -> Decoder:
    _, states = model.hidden(prompt, model.init_states(len(prompt)))
    return Decoder(model, states)


@torch.no_grad()
@pytest.mark.parametrize("name", RECURRENT)
def test_states_stay_in_their_place_and_become_what_new_ones_would_be(name, make_model):
    model, tokens = make_model(name, layers=2), ids(2, 12)
    anew, in_place = (decoder_after(model, tokens[:, :5]) for _ in range(2))
    places = [x.data_ptr() for state in in_place.states for x in state.values()]
    for token in tokens[:, 5:].split(1, 1):
        torch.testing.assert_close(in_place.in_place(token), anew(token))
    assert [x.data_ptr() for state in in_place.states for x in state.values()] == places
    for mine, new in zip(in_place.states, anew.states, strict=True):
        for name, x in new.items():
            torch.testing.assert_close(mine[name], x)


@torch.no_grad()
@pytest.mark.parametrize(("name", "fixed"), [("mdn", True), ("transformer", False), ("mdn-h-3to1", False)])
def test_only_states_that_keep_their_sizes_can_be_captured(name, fixed, make_model):
    decoder = decoder_after(make_model(name), ids(2, 5))
    decoder(ids(2, 1))
    assert decoder.fixed == fixed
    decoder(ids(2, 1))
    assert decoder.graph is None  # on the CPU


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", [*RECURRENT, "transformer", "mdn-h-3to1"])
def test_a_graph_gives_what_decoding_anew_gives(name, make_model):
    model, tokens = make_model(name).cuda(), ids(3, 40).cuda()
    anew, graph = (decoder_after(model, tokens[:, :30]) for _ in range(2))
    for token in tokens[:, 30:].split(1, 1):
        torch.testing.assert_close(graph(token), anew.anew(token), rtol=1e-3, atol=1e-3)
    assert (graph.graph is not None) == (name in RECURRENT)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mdn", "gdn"])
def test_generates_under_autocast_what_single_steps_generate(name, make_model, monkeypatch):
    model, prompt = make_model(name).cuda(), ids(3, 5).cuda()

    def generate():
        with torch.autocast("cuda", torch.bfloat16):
            return model.generate(prompt, 20)

    found = generate()
    monkeypatch.setattr(Decoder, "__call__", Decoder.anew)
    assert torch.equal(found, generate())
