"""The harness against brute force and against lm-eval's own HFLM on the same weights."""

import math

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from torch import nn

from mdn.evaluation.harness import Harness
from mdn.evaluation.tasks import PREFIXED, build

from .items import EXAMPLES
from .models import EOT
from .test_scoring import one_by_one


def harness(model, tokenizer, **changes) -> Harness:
    return Harness(model, tokenizer, **{"window": 128, "batch_tokens": 512, **changes})


def instance(kind: str, *arguments, number: int = 0) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("t", number, 1))


def test_pairs_are_split_where_lm_eval_splits_them(model, tokenizer):
    # "the " + "cat": the space moves to the answer; " the" is one token of the joint text
    requests = [instance("loglikelihood", "see the ", "cat"), instance("loglikelihood", "see", " the cat")]
    found = harness(model, tokenizer).loglikelihood(requests)
    ids = tokenizer.encode("see the cat", add_special_tokens=False).ids
    for (value, _), context in zip(found, ("see the", "see"), strict=True):
        count = len(tokenizer.encode(context, add_special_tokens=False).ids)
        assert value == pytest.approx(one_by_one(model, ids[:count], ids[count:])[0], abs=1e-4)


@pytest.mark.parametrize(("context", "prefix"), [("", False), ("", True), ("He is", True)])
def test_end_of_text_comes_first_if_the_context_is_empty_or_the_task_asks(model, tokenizer, context, prefix):
    (found,) = harness(model, tokenizer, prefix=prefix).loglikelihood(
        [instance("loglikelihood", context, " in")]
    )
    ids = tokenizer.encode(context, add_special_tokens=False).ids
    answer = tokenizer.encode(" in", add_special_tokens=False).ids
    assert found[0] == pytest.approx(one_by_one(model, [EOT, *ids], answer)[0], abs=1e-4)


def test_cut_prompts_are_counted_and_only_they(model, tokenizer):
    lm = harness(model, tokenizer, window=10)
    lm.loglikelihood(
        [instance("loglikelihood", "x" * n, "yz") for n in (8, 9, 10, 60)]
    )  # one token is not read
    assert lm.cut == {2, 3}


@pytest.mark.parametrize("length", [1, 9, 10, 11, 20, 27])
def test_rolling_likelihood_scores_every_token_once_in_disjoint_windows(model, tokenizer, length):
    text = "abcdefghijklmnopqrstuvwxyz!"[:length]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    window, wanted = 10, 0.0
    for start in range(0, len(ids), window):
        stop = min(start + window, len(ids))  # a short last window is filled up with what is before it
        before = ids[stop - window - 1 : start] if start else [EOT]
        wanted += one_by_one(model, before, ids[start:stop])[0]
    found = harness(model, tokenizer, window=window).loglikelihood_rolling(
        [instance("loglikelihood_rolling", "other"), instance("loglikelihood_rolling", text)]
    )
    assert found[1] == pytest.approx(wanted, abs=1e-4)


def test_an_empty_text_has_rolling_likelihood_zero(model, tokenizer):
    assert harness(model, tokenizer).loglikelihood_rolling([instance("loglikelihood_rolling", "")]) == [0.0]


class Script(nn.Module):
    """Writes a fixed text, whatever the prompt: its state counts the tokens written."""

    def __init__(self, prompt: int, written: list[int]) -> None:
        super().__init__()
        self.prompt, self.written = prompt, written
        self.somewhere = nn.Parameter(torch.zeros(()))

    def init_states(self, batch, device=None, dtype=None):
        return [{"read": torch.zeros(batch, dtype=torch.long)}]

    def hidden(self, ids_BT, states):
        read = states[0]["read"] + ids_BT.shape[1]
        return read[:, None, None], [{"read": read}]

    def logits(self, h):
        token = torch.tensor(self.written)[h[..., 0] - self.prompt]
        return nn.functional.one_hot(token, 50257).float()


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"until": ["\n"], "max_gen_toks": 40}, " Ann, not Bob."),
        ({"until": "not", "max_gen_toks": 40}, " Ann, "),
        ({"until": ["Bob", ","], "max_gen_toks": 40}, " Ann"),
        ({"until": [], "max_gen_toks": 4}, " Ann"),
        ({"until": [], "max_gen_toks": 40, "do_sample": False, "temperature": 0.0}, " Ann, not Bob.\nMore"),
    ],
)
def test_generation_ends_at_a_stop_string_end_of_text_or_limit(tokenizer, options, answer):
    prompt = tokenizer.encode("Who?", add_special_tokens=False).ids
    written = tokenizer.encode(" Ann, not Bob.\nMore", add_special_tokens=False).ids
    lm = harness(Script(len(prompt), [*written, EOT, 5, 5]), tokenizer)
    if options["max_gen_toks"] == 4:
        options = {**options, "max_gen_toks": len(tokenizer.encode(" Ann", add_special_tokens=False).ids)}
    assert lm.generate_until([instance("generate_until", "Who?", options)]) == [answer]
    assert not lm.cut


def test_long_prompts_leave_room_for_the_answer_and_are_counted(model, tokenizer):
    options = {"until": ["\n"], "max_gen_toks": 6}
    lm = harness(model, tokenizer, window=16)
    cut, short, whole = lm.generate_until(
        [
            instance("generate_until", "x" * 30 + "0123456789", options),
            instance("generate_until", "0123456789", options),
            instance("generate_until", "", options),
        ]
    )
    assert lm.cut == {0}
    assert cut == short
    assert isinstance(whole, str)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"until": [], "do_sample": True}, "do_sample"),
        ({"until": [], "temperature": 0.7}, "temperature"),
        ({"until": [], "max_new_tokens": 3}, "max_new_tokens"),
        ({"until": [], "max_gen_toks": 128}, "window"),
    ],
)
def test_generation_options_that_do_not_work_are_refused(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        harness(model, tokenizer).generate_until([instance("generate_until", "x", options)])


class Transformer(nn.Module):
    """A transformers model behind our interface."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def hidden(self, ids_BT, states=None, cu_seqlens=None):
        return self.inner.transformer(ids_BT).last_hidden_state, None

    def logits(self, h):
        return self.inner.lm_head(h)


@pytest.fixture(scope="module")
def reference(tokenizer):
    """A random GPT-2, and HFLM around it."""
    from lm_eval.models.huggingface import HFLM
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(1)
    config = GPT2Config(
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        bos_token_id=EOT,
        eos_token_id=EOT,
    )
    inner = GPT2LMHeadModel(config).eval()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )

    def hflm(prefix: bool) -> HFLM:
        return HFLM(pretrained=inner, tokenizer=fast, batch_size=3, max_length=64, add_bos_token=prefix)

    return Transformer(inner).eval(), hflm


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_scores_are_those_of_lm_evals_own_model(reference, tokenizer, task):
    inner, hflm = reference
    example, prefix = EXAMPLES[task], task in PREFIXED
    found = []
    for lm in (harness(inner, tokenizer, window=64, prefix=prefix), hflm(prefix)):
        ours = build(task, example.items, example.split)
        found.append(evaluate(lm, {"tasks": {task: ours}, "groups": {}}, bootstrap_iters=1000))
    ours, theirs = found
    for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
        assert mine["arguments"] == other["arguments"]
        for (value, greedy), (wanted, wanted_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert value == pytest.approx(wanted, abs=1e-4)
            assert greedy == wanted_greedy
    for key, value in theirs["results"][task].items():
        if isinstance(value, float) and math.isfinite(value):
            assert ours["results"][task][key] == pytest.approx(value, rel=1e-4)


@pytest.mark.slow
def test_rolling_likelihood_is_that_of_lm_evals_own_model(reference, tokenizer):
    inner, hflm = reference
    requests = [instance("loglikelihood_rolling", text) for text in ("short", "long " * 40, "a" * 64)]
    ours = harness(inner, tokenizer, window=64).loglikelihood_rolling(requests)
    assert ours == pytest.approx(hflm(False).loglikelihood_rolling(requests, disable_tqdm=True), rel=1e-5)
