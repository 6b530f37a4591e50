"""LongBench's metrics against values counted by hand and against those of the packages that it uses."""

import pytest

from mdn.evaluation.metrics import classification, code_similarity, qa_f1, rouge_l


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [
        ("The fox.", "a fox", 1.0),  # articles, capitals and stops do not count
        ("fox hen", "the fox", 2 / 3),  # precision 1/2, recall 1
        ("fox fox", "fox", 2 / 3),  # a word counts as often as it is there
        ("don't", "dont", 1.0),
        ("the", "fox", 0.0),
        ("", "fox", 0.0),
        ("::::", "fox", 0.0),
    ],
)
def test_qa_f1_is_of_the_bare_words(prediction, truth, score):
    assert qa_f1(prediction, truth) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [  # values of `Rouge().get_scores([prediction], [truth], avg=True)["rouge-l"]["f"]`, rouge 1.0.1
        ("the cat sat on the mat.", "the cat was on the mat.", 0.7999999950000002),
        ("Rain fell. Roads flooded.", "Heavy rain flooded roads. The north was hit.", 0.16666666222222234),
        ("a b c d. b a", "b a d c.", 0.749999995),
        ("b a. b", "a b", 0.4999999950000001),  # of the two subsequences of "b a" it takes b
        ("x", " . ", 0.0),
        ("x", "x", 0.999999995),
        ("...", "x y", 0.0),  # the package raises on these two, LongBench makes it 0
        ("", "x", 0.0),
    ],
)  # fmt: skip
def test_rouge_l_is_the_packages(prediction, truth, score):
    assert rouge_l(prediction, truth) == score


def test_rouge_l_counts_different_words_of_the_union_over_sentences():
    # common with the truth's only sentence: {a, b} from the first, {a, d} from the second
    assert rouge_l("a b x. a d d", "a b c d") == pytest.approx(2 * (3 / 4) * (3 / 4) / (3 / 2))


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [
        ("City", "City", 1.0),
        ("City or Date", "City", 1 / 2),
        ("Date", "City", 0.0),
        ("", "City", 0.0),
        ("Other location", "Other location", 1.0),  # "location" is part of the truth and does not count
        ("location", "Other location", 0.0),
        ("Other location", "location", 1 / 2),
    ],
)
def test_classification_divides_by_the_classes_named(prediction, truth, score):
    assert classification(prediction, truth, ["Date", "City", "location", "Other location"]) == score


def test_classification_skips_the_class_after_one_that_was_taken_off():
    """The original removes from the list that it runs over: "ba" stays, although it is in the truth."""
    assert classification("bay", "bay", ["a", "ba", "bay"]) == 1 / 2
    assert classification("bay", "bay", ["b", "bay", "a"]) == 1


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [
        ("return x", "return x", 1.0),
        ("\n\nreturn x\nmore", "return x", 1.0),
        ("# why\n```python\nreturn x", "return x", 1.0),
        ("// only", "return x", 0.0),
        ("", "return x", 0.0),
        ("abcd", "bcde", 0.75),  # 2 · 3 / 8
        ("abc", "b", 0.5),  # 2 · 1 / 4
        ("abcdef", "abc", 0.67),  # 2 · 3 / 9, in whole per cent
    ],
)
def test_code_similarity_is_of_the_first_line_of_code(prediction, truth, score):
    assert code_similarity(prediction, truth) == score
