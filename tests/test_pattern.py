"""Layer patterns."""

import pytest

from mdn.pattern import expand, parse


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("mdn", ("mdn",)),
        ("mdn:3,attention:1", ("mdn", "mdn", "mdn", "attention")),
        ("mdn:3,attention", ("mdn", "mdn", "mdn", "attention")),
        (" mdn:2 , attention ", ("mdn", "mdn", "attention")),
    ],
)
def test_a_pattern_reads_as_its_layers(pattern, layers):
    assert parse(pattern) == layers


@pytest.mark.parametrize("pattern", ["mdn:", "mdn:0", "mdn:-1", "mdn:x", "mdn:1.5", "mdn,attention:"])
def test_a_count_that_is_none_is_refused(pattern):
    with pytest.raises(ValueError, match=r"has no count; write (mdn|attention):N"):
        parse(pattern)


def test_attention_sits_where_the_paper_puts_it():
    three = expand("mdn:3,attention:1", 24)
    assert [n for n, mixer in enumerate(three) if mixer == "attention"] == [3, 7, 11, 15, 19, 23]
    seven = expand("mdn:7,attention:1", 24)
    assert [n for n, mixer in enumerate(seven) if mixer == "attention"] == [7, 15, 23]


@pytest.mark.parametrize(("layers", "remedy"), [(21, "use 20 or 24"), (3, "use 4")])
def test_a_remainder_is_refused_with_the_nearest_depths(layers, remedy):
    with pytest.raises(ValueError, match=f"layers={layers} is not divisible by pattern length 4.*{remedy}"):
        expand("mdn:3,attention:1", layers)
