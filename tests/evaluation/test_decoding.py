import pytest
import torch

from mdn.evaluation import decoding
from mdn.evaluation.decoding import decode

from .models import VOCABULARY, Echo, Knowing


def prompts(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 2, 3, 3, 17, 18, 40, 40, 41, 90, 200]
    return [torch.randint(0, 300, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompt: list[int], count: int) -> list[int]:
    """Brute force: the whole sequence anew for every token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model.logits(model.hidden(torch.tensor([ids]))[0])[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch_tokens", [1, 64, 500, 100_000])
def test_groups_write_what_each_prompt_writes_alone(model, batch_tokens):
    given = prompts()
    limits = [3 + n % 5 for n in range(len(given))]
    found = decode(model, given, lambda n, ids: len(ids) >= limits[n], batch_tokens=batch_tokens)
    assert found == [alone(model, prompt, limits[n]) for n, prompt in enumerate(given)]


def test_no_state_ever_sees_a_token_that_is_not_its_own(model, monkeypatch):
    given = prompts()
    read: dict[int, list[list[int]]] = {}
    hidden = model.hidden

    def watch(ids_BT, states):
        rows = read.setdefault(len(ids_BT), [[] for _ in ids_BT])
        for row, ids in zip(rows, ids_BT.tolist(), strict=True):
            row += ids
        return hidden(ids_BT, states)

    monkeypatch.setattr(model, "hidden", watch)
    group = given[4:9]
    found = decode(model, group, lambda n, ids: len(ids) >= 4, batch_tokens=100_000)
    (rows,) = read.values()
    for prompt, written in zip(group, found, strict=True):
        whole = prompt + written
        assert any(row[: len(whole) - 1] == whole[:-1] for row in rows)


def test_lengths_in_a_group_are_close(model, monkeypatch):
    groups = []
    inner = decoding._decode_group
    monkeypatch.setattr(decoding, "_decode_group", lambda *a: groups.append(a[2]) or inner(*a))
    given = prompts()
    decode(model, given, lambda n, ids: True, batch_tokens=100_000)
    spreads = [max(len(given[n]) for n in g) - min(len(given[n]) for n in g) for g in groups]
    assert sorted(n for g in groups for n in g) == list(range(len(given)))
    assert max(spreads) <= decoding.SPREAD < 200 - 1


def test_prefill_keeps_to_the_budget(model, monkeypatch):
    sizes = []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, states: sizes.append(ids.numel()) or hidden(ids, states))
    decode(model, [list(range(100)), list(range(1, 101))], lambda n, ids: True, batch_tokens=32)
    assert max(sizes) <= 32


def watched(model, monkeypatch) -> list[tuple[int, int]]:
    """Sequences and tokens of every pass."""
    passes, hidden = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, states: passes.append(ids.shape) or hidden(ids, states))
    return passes


def test_long_prompts_of_about_one_length_share_their_steps(model, monkeypatch):
    """Needles in haystacks: without attention a group may hold more tokens than a pass."""
    generator = torch.Generator().manual_seed(1)
    given = [torch.randint(0, 300, (96 + n % 5,), generator=generator).tolist() for n in range(12)]
    wanted = [alone(model, prompt, 6) for prompt in given]
    monkeypatch.setattr(decoding, "STATE", 16)
    passes = watched(model, monkeypatch)
    assert decode(model, given, lambda n, ids: len(ids) >= 6, batch_tokens=12 * 16) == wanted
    assert passes == [(12, 16)] * 6 + [(12, 1)] * (4 + 5)


@pytest.mark.parametrize(("batch_tokens", "groups"), [(399, [3, 3, 3, 3]), (800, [8, 4]), (10_000, [12])])
def test_a_growing_state_keeps_a_group_within_the_budget(monkeypatch, batch_tokens, groups):
    given = [[n] * 100 for n in range(12)]
    passes = watched(model := Knowing([[*prompt, 300 + prompt[0]] for prompt in given]), monkeypatch)
    found = decode(model, given, lambda n, ids: True, batch_tokens=batch_tokens)
    assert found == [[300 + n] for n in range(12)]
    assert passes == [(size, 100) for size in groups]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(monkeypatch, value):
    logits = torch.zeros(2, VOCABULARY)
    logits[1, 7] = value
    monkeypatch.setattr(model := Echo(), "logits", lambda h: logits)
    with pytest.raises(FloatingPointError, match="not finite"):
        decode(model, [[1], [2]], lambda n, ids: True, batch_tokens=64)
