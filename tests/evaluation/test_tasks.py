"""What lm-eval's protocol makes of our items, by models whose answers are known."""

import pytest
from lm_eval.evaluator import evaluate

from mdn.evaluation.data import HUB, SOURCES
from mdn.evaluation.harness import Harness
from mdn.evaluation.suites import commonsense, lm
from mdn.evaluation.tasks import DEFINITIONS, PREFIXED, build

from .items import EXAMPLES, Pair
from .models import EOT, Constant, Knowing, byte_tokenizer

BYTES = byte_tokenizer()


def scores(task: str, model) -> dict[str, float]:
    example = EXAMPLES[task]
    lm = Harness(model, BYTES, window=256, batch_tokens=2048, prefix=task in PREFIXED)
    built = build(task, example.items, example.split)
    found = evaluate(lm, {"tasks": {task: built}, "groups": {}}, bootstrap_iters=0)
    return {metric: found["results"][task][f"{metric},none"] for metric in built.aggregation()}


def knowing(task: str, pairs: list[Pair]) -> Knowing:
    first = [EOT] if task in PREFIXED else []
    return Knowing([first + BYTES.encode(a + b, add_special_tokens=False).ids for a, b in pairs])


def test_every_task_has_a_definition_a_source_and_an_example():
    assert {*lm.TASKS, *commonsense.TASKS} == set(DEFINITIONS) == set(EXAMPLES) | set(HUB)
    assert set(EXAMPLES) == {task for task in SOURCES if not task.startswith(("retrieval_", "longbench_"))}


@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_a_model_that_knows_the_answers_is_right_everywhere(task):
    for metric, value in scores(task, knowing(task, EXAMPLES[task].right)).items():
        assert value == pytest.approx(1.0, abs=1e-6), metric


@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_a_model_that_knows_wrong_answers_is_wrong_everywhere(task):
    found = scores(task, knowing(task, EXAMPLES[task].wrong))
    assert found.pop("perplexity", 1e9) > 1e6
    assert set(found.values()) == {0.0}


@pytest.mark.parametrize("task", sorted(EXAMPLES))
def test_a_constant_model_scores_what_one_counts_by_hand(task):
    assert scores(task, Constant()) == pytest.approx(EXAMPLES[task].constant, rel=1e-4)


PAGE = " = Bees = \n\n Bees , 20 @,@ 000 of them , make honey . \n"  # as WikiText's files have it


@pytest.mark.parametrize(
    ("model", "perplexity"),
    [
        (Constant(), 50257 ** (45 / 16)),  # 45 bytes are left of the page, whose 16 words are counted before
        (Knowing([[EOT, *BYTES.encode(" = Bees =\n\nBees, 20,000 of them, make honey.\n").ids[1:]]]), 1.0),
    ],
)
def test_wikitext_perplexity_is_by_the_words_of_the_raw_page(model, perplexity):
    lm = Harness(model, BYTES, window=256, batch_tokens=2048)
    task = build("wikitext", [{"page": PAGE}], "test")
    found = evaluate(lm, {"tasks": {"wikitext": task}, "groups": {}}, bootstrap_iters=0)
    assert found["results"]["wikitext"]["word_perplexity,none"] == pytest.approx(perplexity, rel=1e-4)
