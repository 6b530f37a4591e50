"""Decoding in place and from a CUDA graph gives what decoding anew gives."""

import pytest
import torch

from mdn.models import decoder as decoder_module
from mdn.models.decoder import Decoder

RECURRENT = ["mamba2", "gdn", "comba", "kda", "mdn"]
GROWING = ["transformer", "mdn-h-3to1"]


def ids(B: int, T: int) -> torch.Tensor:
    return torch.randint(61, (B, T), generator=torch.Generator().manual_seed(1))


def decoder_after(model, prompt) -> Decoder:
    _, states = model.hidden(prompt, model.init_states(len(prompt)))
    return Decoder(model, states)


def places(decoder: Decoder) -> list[int]:
    return [x.data_ptr() for state in decoder.states for x in state.values()]


@torch.no_grad()
@pytest.mark.parametrize("name", [*RECURRENT, *GROWING])
def test_states_stay_in_their_place_and_become_what_new_ones_would_be(name, make_model, monkeypatch):
    monkeypatch.setattr(decoder_module, "ROOM", 3)
    model, tokens = make_model(name), ids(2, 12)
    anew, in_place = (decoder_after(model, tokens[:, :5]) for _ in range(2))
    seen = []
    for token in tokens[:, 5:].split(1, 1):
        torch.testing.assert_close(in_place.in_place(token), anew.anew(token), rtol=1e-4, atol=1e-4)
        seen.append(places(in_place))
    if name in RECURRENT:
        assert all(x == seen[0] for x in seen)
    else:  # room for three, three and one
        assert seen[0] == seen[1] == seen[2]
        assert seen[3] == seen[4] == seen[5]
    for mine, new in zip(in_place.states, anew.states, strict=True):
        for part, x in new.items():
            kept = mine[part][:, : x.shape[1]] if "length" in mine else mine[part]
            torch.testing.assert_close(kept, x, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_state_with_room_is_left_as_it_was_by_a_step_that_may_not_overwrite(make_model):
    model, tokens = make_model("transformer", layers=1), ids(2, 6)
    _, (state,) = model.hidden(tokens[:, :5], model.init_states(2))
    roomy = model.mixer(0).with_room(state, 2)
    before = {name: x.clone() for name, x in roomy.items()}
    hidden, (following,) = model.hidden(tokens[:, 5:], [roomy])
    torch.testing.assert_close(hidden, model.hidden(tokens)[0][:, 5:])
    assert following["length"].item() == 6
    assert all(torch.equal(x, before[name]) for name, x in roomy.items())


@torch.no_grad()
def test_on_the_cpu_states_are_new_ones(make_model):
    decoder = decoder_after(make_model("mdn", layers=1), ids(2, 5))
    first = places(decoder)
    decoder(ids(2, 1))
    assert not set(first) & set(places(decoder))
    assert decoder.graph is None


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("name", [*RECURRENT, *GROWING])
def test_a_graph_gives_what_decoding_anew_gives(name, make_model, monkeypatch):
    monkeypatch.setattr(decoder_module, "ROOM", 4)
    model, tokens = make_model(name).cuda(), ids(3, 40).cuda()
    anew, graph = (decoder_after(model, tokens[:, :30]) for _ in range(2))
    for token in tokens[:, 30:].split(1, 1):
        torch.testing.assert_close(graph(token), anew.anew(token), rtol=1e-3, atol=1e-3)
    assert graph.graph is not None


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
