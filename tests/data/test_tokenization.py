import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_vocabulary import TINY_MERGES, write_tiny_vocabulary

from mdn.data import gpt2
from mdn.data.tokenization import EOT, encode, tokenizer

FOLDER = Path(__file__).parents[2] / "data/raw" / gpt2.FOLDER


def naive_bpe(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Textbook BPE of ASCII text: split into words, then apply the merges one by one in their order."""
    ids = []
    for word in re.findall(
        r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", text
    ):
        symbols = [{" ": "Ġ", "\n": "Ċ"}.get(letter, letter) for letter in word]
        for left, right in TINY_MERGES:
            at = 0
            while at < len(symbols) - 1:
                if (symbols[at], symbols[at + 1]) == (left, right):
                    symbols[at : at + 2] = [left + right]
                at += 1
        ids += [vocabulary[symbol] for symbol in symbols]
    return ids


@pytest.mark.parametrize(
    "text",
    [
        "lower the lowest tower",
        " low  low lolow\n\nthe hehe",
        "it's they'll 42 lows!? low-er",
        "x",
        "the " * 300,
    ],
)
def test_tokens_are_those_of_textbook_bpe(tmp_path, tiny, text):
    write_tiny_vocabulary(tmp_path)
    vocabulary = json.loads((tmp_path / "encoder.json").read_text())
    end = vocabulary["<|endoftext|>"]
    assert next(encode(tiny, [text], end)).tolist() == [*naive_bpe(text, vocabulary), end]


def test_every_document_ends_with_end_of_text_and_decodes_to_itself(tiny):
    texts = ["lower", "", "naïve Ω 🙂\r\n\t", "\u0000 \u00ad \ufeff", "<|endoftext|> spelled out"]
    for text, ids in zip(texts, encode(tiny, texts), strict=True):
        assert ids.dtype == np.uint16
        assert ids[-1] == EOT
        assert EOT not in ids[:-1]
        assert tiny.decode(ids[:-1].tolist()) == text


def test_a_spelled_out_end_of_text_forges_no_boundary(tiny):
    end = tiny.token_to_id("<|endoftext|>")
    ids = next(encode(tiny, ["a<|endoftext|>b"], end))
    assert (ids == end).tolist() == [False] * (len(ids) - 1) + [True]


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
def test_a_changed_or_missing_vocabulary_is_named_with_both_digests(tmp_path, name):
    files = write_tiny_vocabulary(tmp_path)
    with (tmp_path / name).open("a") as file:
        file.write(" ")
    with pytest.raises(
        ValueError, match=rf"{name}: sha256 is \w{{64}}, not {files[name]}; `dvc repro -f fetch"
    ):
        tokenizer(tmp_path, files)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name}: not found; `dvc repro fetch"):
        tokenizer(tmp_path, files)


def test_a_users_choice_of_parallelism_is_kept(tiny, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    list(encode(tiny, ["a"]))
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    list(encode(tiny, ["a"]))
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


@pytest.fixture(scope="module")
def published():
    if not FOLDER.exists():
        pytest.skip("GPT-2's vocabulary is not fetched")
    return tokenizer(FOLDER)


# Published: OpenAI's tiktoken tests, the documentation of Hugging Face's GPT-2.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        (" Hello world", [18435, 995]),
        ("hello world", [31373, 995]),
        ("Hello, my dog is cute", [15496, 11, 616, 3290, 318, 13779]),
        ("0", [15]),
        ("000", [830]),
        ("0000000000", [8269, 405]),
        ("00000000000000000", [8269, 10535, 830]),
    ],
)
def test_gpt2_tokens_are_the_published_ones(published, text, ids):
    assert next(encode(published, [text])).tolist() == [*ids, 50256]


def test_gpt2_has_its_size_and_end_of_text(published):
    assert published.get_vocab_size() == gpt2.SIZE == 50257
    assert published.token_to_id("<|endoftext|>") == EOT == 50256
