"""LongBench's metrics (arXiv 2308.14508; github.com/THUDM/LongBench, metrics.py): score of one prediction
against one true answer, between 0 and 1. They give what the original gives; its oddities are named.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence


def qa_f1(prediction: str, truth: str) -> float:
    """F1 of the words, in lower case, without punctuation and articles."""
    found, wanted = _words(prediction), _words(truth)
    same = sum((Counter(found) & Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def rouge_l(prediction: str, truth: str) -> float:
    """ROUGE-L of the package `rouge` 1.0.1, which LongBench uses.

    Texts are sentences between full stops, sentences are words between spaces. U is the set of all words that
    are in a longest common subsequence of any sentence of the truth with any of the prediction, and precision
    and recall are |U| over the numbers of *different* words. The package runs out of stack on long sentences
    without a stop, which LongBench scores as 0; here they are scored.
    """
    found, wanted = _sentences(prediction), _sentences(truth)
    if not found or not wanted:
        return 0.0
    union: set[str] = set()
    for sentence in wanted:
        for other in found:
            union |= set(_common(sentence, other))
    precision = len(union) / len({word for sentence in found for word in sentence})
    recall = len(union) / len({word for sentence in wanted for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence, backwards; of several the one that the package finds."""
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for n, other in enumerate(second):
            row.append(above[n] + 1 if word == other else max(above[n + 1], row[n]))
        lengths.append(row)
    found, i, j = [], len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.append(first[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def classification(prediction: str, truth: str, classes: Sequence[str]) -> float:
    """1 over the number of classes named in the prediction, if the truth is one of them.

    A class that is part of the truth's name does not count beside it. As in the original the class after one
    that was taken off is not looked at.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in truth and name != truth:
            named.remove(name)  # while running over it, as the original does
    return 1 / len(named) if truth in named else 0.0


def code_similarity(prediction: str, truth: str) -> float:
    """Likeness of the first line that has no comment in it and no backtick, in whole per cent: `ratio` of the
    package fuzzywuzzy, which is difflib's, rounded."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if is_code(line)), "")
    if line == truth:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, truth).ratio()) / 100 if line and truth else 0.0


def is_code(line: str) -> bool:
    return not any(mark in line for mark in ("`", "#", "//"))
