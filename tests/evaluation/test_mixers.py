"""Every kind of layer of ours: neither batch nor padding nor grouping changes what is scored and written."""

import weakref
from dataclasses import asdict, replace

import pytest
import torch

from mdn.config import Shape
from mdn.evaluation import decoding
from mdn.evaluation.decoding import decode
from mdn.evaluation.scoring import score
from mdn.models.lm import build
from mdn.options import Options

from .test_scoring import one_by_one, random_pairs

PATTERNS = ["attention", "mamba2", "gdn", "comba", "kda", "mdn", "mdn,attention"]


@pytest.fixture(scope="module", params=PATTERNS)
def lm(request, params):
    mixers = request.param.split(",")
    shape = Shape(layers=2, heads=2, head_k=8, head_v=8)
    if "mamba2" in mixers:
        shape = replace(shape, heads=8)
    run = replace(
        params.run("smoke", "mdn"),
        d_model=32,
        pattern=request.param,
        shape=shape,
        options={mixer: asdict(getattr(Options(), mixer)) for mixer in mixers},
    )
    torch.manual_seed(0)
    model = build(run)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(8)  # layers that matter, and clear winners in decoding
    return model.eval()


def test_scores_do_not_depend_on_batch_and_padding(lm):
    pairs = random_pairs(2, 7, 100)
    alone = [one_by_one(lm, *pair) for pair in pairs]
    for batch_tokens in (1, 100_000):
        found = score(lm, pairs, window=256, batch_tokens=batch_tokens)
        assert [value for value, _ in found] == pytest.approx([value for value, _ in alone], abs=1e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in alone]


def test_groups_write_what_each_prompt_writes_alone(lm):
    prompts = [context for context, _ in random_pairs(3, 6, 90)]
    found = decode(lm, prompts, lambda n, ids: len(ids) >= 5, batch_tokens=300)
    for prompt, written in zip(prompts, found, strict=True):
        whole = lm.generate(torch.tensor([prompt]), 5)[0].tolist()
        assert written == whole[len(prompt) :]


def test_long_prompts_read_together_in_parts_give_what_each_gives_alone(lm, monkeypatch):
    monkeypatch.setattr(decoding, "STATE", 24)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 300, (length,), generator=generator).tolist() for length in (131, 130, 128)]
    found = decode(lm, prompts, lambda n, ids: len(ids) >= 5, batch_tokens=72)  # attention: one by one
    for prompt, written in zip(prompts, found, strict=True):
        assert written == lm.generate(torch.tensor([prompt]), 5)[0].tolist()[len(prompt) :]


def test_memory_in_decoding_grows_with_the_tokens_of_attention_only(lm, monkeypatch):
    """Bytes that the states keep alive, views' whole storages included."""
    sizes, hidden = [], lm.hidden

    def watch(ids_BT, states):
        h, states = hidden(ids_BT, states)
        storages = [part.untyped_storage() for state in states for part in state.values()]
        sizes.append((ids_BT.numel(), sum({s.data_ptr(): s.nbytes() for s in storages}.values())))
        return h, states

    monkeypatch.setattr(lm, "hidden", watch)
    prompt = torch.randint(0, 300, (300,), generator=torch.Generator().manual_seed(4)).tolist()
    (written,) = decode(lm, [prompt], lambda n, ids: len(ids) >= 4, batch_tokens=64)
    assert [tokens for tokens, _ in sizes] == [64, 64, 64, 64, 44, 1, 1, 1]
    attention = sum(name == "attention" for name in lm.mixers)
    each = attention * 2 * lm.run.d_model * 4  # keys and values in float32
    fixed = sum(part.nbytes for state in lm.init_states(1) for part in state.values())
    read = 0
    for tokens, size in sizes:
        read += tokens
        assert size == fixed + each * read
    assert written == lm.generate(torch.tensor([prompt]), 4)[0].tolist()[300:]


def test_decoding_holds_no_state_but_the_last(lm, monkeypatch):
    """Of keys and values a second copy would be half of the memory."""
    earlier, hidden = [], lm.hidden

    def watch(ids_BT, states):
        assert [ref for refs in earlier[:-1] for ref in refs if ref() is not None] == []
        h, states = hidden(ids_BT, states)
        earlier.append([weakref.ref(part) for state in states for part in state.values()])
        return h, states

    monkeypatch.setattr(lm, "hidden", watch)
    decode(lm, [list(range(40))], lambda n, ids: len(ids) >= 5, batch_tokens=16)
    assert len(earlier) == 3 + 4
