"""The harness against brute force and against lm-eval's own HFLM on the same weights."""

import math
from dataclasses import replace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from torch import nn

from mdn.config import Shape
from mdn.evaluation.harness import Harness
from mdn.evaluation.tasks import PREFIXED
from mdn.evaluation.tasks import build as build_task
from mdn.mixers.base import EPS
from mdn.models.block import mlp_width
from mdn.models.lm import LanguageModel, build

from .items import EXAMPLES
from .models import EOT, Knowing, byte_tokenizer
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


def test_long_prompts_lose_their_start_leave_room_for_the_answer_and_are_counted():
    tokenizer, options = byte_tokenizer(), {"until": ["\n"], "max_gen_toks": 6}
    known = [
        tokenizer.encode(f"{text}yes\n", add_special_tokens=False).ids for text in ("0123456789", "01234")
    ]
    lm = harness(Knowing([*known, [EOT, known[0][-1]]]), tokenizer, window=16)
    prompts = ("0123456789", "01234", "x0123456789", "x" * 20 + "0123456789", "")
    answers = lm.generate_until([instance("generate_until", prompt, options) for prompt in prompts])
    assert answers == ["yes", "yes", "yes", "yes", ""]
    assert lm.cut == {2, 3}


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


def as_llama(ours: LanguageModel):
    """Our Transformer as the class of transformers that has its layers: RMSNorm, RoPE, SwiGLU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    run, weights = ours.run, ours.state_dict()
    config = LlamaConfig(
        vocab_size=len(ours.embedding.weight),
        hidden_size=run.d_model,
        intermediate_size=mlp_width(run.d_model),
        num_hidden_layers=run.shape.layers,
        num_attention_heads=run.shape.heads,
        max_position_embeddings=64,
        rms_norm_eps=EPS,
        tie_word_embeddings=False,
        bos_token_id=EOT,
        eos_token_id=EOT,
    )
    theirs = {"lm_head.weight": weights["head.weight"], "model.norm.weight": weights["norm.weight"]}
    theirs["model.embed_tokens.weight"] = weights["embedding.weight"]
    for n in range(run.shape.layers):
        block, layer = f"blocks.{n}.", f"model.layers.{n}."
        parts = dict(zip("qkv", weights[f"{block}mixer.qkv.weight"].chunk(3), strict=True))
        theirs |= {f"{layer}self_attn.{name}_proj.weight": part for name, part in parts.items()}
        theirs[f"{layer}self_attn.o_proj.weight"] = weights[f"{block}mixer.out.weight"]
        gate, up = weights[f"{block}mlp.up.weight"].chunk(2)
        theirs |= {f"{layer}mlp.gate_proj.weight": gate, f"{layer}mlp.up_proj.weight": up}
        theirs[f"{layer}mlp.down_proj.weight"] = weights[f"{block}mlp.down.weight"]
        theirs[f"{layer}input_layernorm.weight"] = weights[f"{block}mixer_norm.weight"]
        theirs[f"{layer}post_attention_layernorm.weight"] = weights[f"{block}mlp_norm.weight"]
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(theirs)
    return llama.eval()


@pytest.fixture(scope="module")
def reference(tokenizer, params):
    """Our Transformer with random weights, and HFLM around its export."""
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(1)
    shape = Shape(layers=2, heads=2, head_k=8, head_v=8)
    ours = build(replace(params.run("smoke", "transformer"), d_model=16, shape=shape)).eval()
    with torch.no_grad():
        for weight in ours.parameters():
            if weight.dim() == 2:
                weight.mul_(15)  # no answer as likely as another
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    llama = as_llama(ours)

    def hflm(prefix: bool) -> HFLM:
        return HFLM(pretrained=llama, tokenizer=fast, batch_size=3, max_length=64, add_bos_token=prefix)

    return ours, hflm


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_scores_are_those_of_lm_evals_own_model(reference, tokenizer, task):
    model, hflm = reference
    example, prefix = EXAMPLES[task], task in PREFIXED
    found = []
    for lm in (harness(model, tokenizer, window=64, prefix=prefix), hflm(prefix)):
        ours = build_task(task, example.items, example.split)
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
    model, hflm = reference
    requests = [instance("loglikelihood_rolling", text) for text in ("short", "long " * 40, "a" * 64)]
    ours = harness(model, tokenizer, window=64).loglikelihood_rolling(requests)
    assert ours == pytest.approx(hflm(False).loglikelihood_rolling(requests, disable_tqdm=True), rel=1e-5)
