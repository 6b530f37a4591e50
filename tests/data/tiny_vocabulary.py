import hashlib
import json
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

TINY_MERGES = [("l", "o"), ("lo", "w"), ("e", "r"), ("Ġ", "low"), ("Ġlow", "er"), ("Ġ", "t"), ("h", "e")]


def write_tiny_vocabulary(folder: Path) -> dict[str, str]:
    """A byte-level BPE of 263 entries and end-of-text, as GPT-2's two files; their digests."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in TINY_MERGES), "<|endoftext|>"]
    (folder / "encoder.json").write_text(json.dumps({entry: n for n, entry in enumerate(entries)}))
    merges = "".join(f"{left} {right}\n" for left, right in TINY_MERGES)
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + merges)
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("encoder.json", "vocab.bpe")
    }
