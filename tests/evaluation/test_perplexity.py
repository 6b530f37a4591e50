import math

import numpy as np
import pytest

from mdn.data.shards import ShardWriter, open_split, write_index
from mdn.evaluation.perplexity import heldout

from .models import EOT, VOCABULARY, Constant
from .test_scoring import one_by_one


@pytest.fixture
def split(tmp_path):
    """Documents of 30, 1 and 44 tokens in shards of about 40."""
    random = np.random.default_rng(0)
    writer = ShardWriter(tmp_path, "heldout_wiki", 40)
    for length in (30, 1, 44):
        tokens = random.integers(0, 300, length, dtype=np.uint16)
        tokens[-1] = EOT
        writer.write(tokens)
    write_index(tmp_path, {"heldout_wiki": writer.close()}, [])
    return open_split(tmp_path, "heldout_wiki")


@pytest.mark.parametrize("batch_tokens", [1, 50, 10_000])
@pytest.mark.parametrize(("window", "limit"), [(16, 1000), (16, 64), (16, 40), (75, 75), (100, 1000), (7, 1)])
def test_every_token_up_to_the_limit_counts_once(model, split, window, limit, batch_tokens):
    tokens = split.tokens(0, min(limit, 75)).tolist()
    wanted = sum(
        one_by_one(model, [EOT], tokens[start : start + window])[0] for start in range(0, len(tokens), window)
    )
    found = heldout(model, split, window=window, limit=limit, batch_tokens=batch_tokens)
    assert sum(found.tokens) == len(tokens)
    assert sum(found.loglikelihood) == pytest.approx(wanted, abs=1e-3)
    assert found.perplexity == pytest.approx(math.exp(-wanted / len(tokens)), rel=1e-4)


def test_a_constant_model_is_as_perplexed_as_its_vocabulary_is_large(split):
    found = heldout(Constant(), split, window=16, limit=1000, batch_tokens=64)
    assert found.perplexity == pytest.approx(VOCABULARY, rel=1e-4)


def test_an_empty_split_is_refused(model, split):
    with pytest.raises(ValueError, match="heldout_tokens"):
        heldout(model, split, window=16, limit=0, batch_tokens=64)
