"""Multi-query associative recall (MQAR) with the parameters of Zoology (arXiv 2312.04927), in NumPy.

A sequence of T tokens begins with P pairs of a key and its value. Each key comes once more, as a query, at an
even distance from the pairs; the model has to answer with its value there:

    tokens   k1 v1 k2 v2 | n  n  k2 n  n  n  k1 n      n: noise, any token of the vocabulary
    labels   .  .  .  .  | .  .  v2 .  .  .  v1 .      .: not counted

Keys are distinct, drawn from [1, V/2); values are distinct, drawn from [V/2, V). The places of the queries,
two tokens each, are drawn one after another without replacement, the i-th place with weight i^(a − 1), a =
0.01: as in text, what was said is mostly asked again soon.

N examples · T tokens · P pairs · V vocabulary
"""

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mdn.config import Examples, MqarData

IGNORED = -100
POWER = 0.01  # a
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Recall:
    """Examples of one length. The places of the queries and their answers stand for the labels: a model
    needs its logits nowhere else."""

    ids_NT: np.ndarray  # int16, all three
    queries_NP: np.ndarray  # position of each key's query
    answers_NP: np.ndarray  # and its value

    @property
    def name(self) -> str:
        return f"{self.ids_NT.shape[1]}x{self.queries_NP.shape[1]}"

    def __len__(self) -> int:
        return len(self.ids_NT)

    def labels_NT(self) -> np.ndarray:
        """The answer at every query, −100 elsewhere."""
        labels_NT = np.full(self.ids_NT.shape, IGNORED, np.int64)
        np.put_along_axis(labels_NT, self.queries_NP.astype(np.int64), self.answers_NP, 1)
        return labels_NT


def generate(what: Examples, vocabulary: int, rng: np.random.Generator) -> Recall:
    """`what.examples` sequences, with what `rng` draws."""
    N, T, P = what.examples, what.length, what.pairs
    keys_NP = _distinct(rng, N, P, 1, vocabulary // 2)
    values_NP = _distinct(rng, N, P, vocabulary // 2, vocabulary)
    places = (T - 2 * P) // 2
    # Waiting times of independent exponential clocks: the order in which they ring is that of successive
    # draws without replacement, with the clocks' rates as weights.
    rates = np.arange(1, places + 1) ** (POWER - 1)
    waiting = rng.exponential(size=(N, places)) / rates
    queries_NP = 2 * P + 2 * np.argsort(waiting, axis=1)[:, :P]
    ids_NT = rng.integers(0, vocabulary, (N, T))
    ids_NT[:, 0 : 2 * P : 2], ids_NT[:, 1 : 2 * P : 2] = keys_NP, values_NP
    np.put_along_axis(ids_NT, queries_NP, keys_NP, 1)
    return Recall(*(array.astype(np.int16) for array in (ids_NT, queries_NP, values_NP)))


def _distinct(rng: np.random.Generator, N: int, P: int, low: int, high: int) -> np.ndarray:
    """N rows of P distinct numbers from [low, high), every ordered choice equally likely.

    What repeats an earlier number of its row is drawn again until nothing does. No number is treated unlike
    another on the way, so no choice of P distinct ones can be likelier than another.
    """
    drawn_NP = rng.integers(low, high, (N, P))
    while True:
        order_NP = np.argsort(drawn_NP, axis=1, kind="stable")
        sorted_NP = np.take_along_axis(drawn_NP, order_NP, 1)
        again_NP = np.zeros((N, P), bool)
        again_NP[:, 1:] = sorted_NP[:, 1:] == sorted_NP[:, :-1]
        rows, columns = np.nonzero(again_NP)
        if not len(rows):
            return drawn_NP
        drawn_NP[rows, order_NP[rows, columns]] = rng.integers(low, high, len(rows))


def parts(data: MqarData, split: str) -> list[Examples]:
    """What a split is made of."""
    if split == "train":
        return data.train
    count = data.validation_examples
    return [Examples(p.length, p.pairs, count if split == "validation" else p.examples) for p in data.test]


def prepare(data: MqarData, seed: int, root: Path) -> Path:
    """Writes the data as .npy files to a folder of its own under `root`, once, and returns the folder.

    Each part of each split has a random generator of its own, so that adding one changes no other. The folder
    gets its name when it is complete, and processes that start together do not disturb each other.
    """
    settings = {"seed": seed, **asdict(data)}
    folder = root / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=root))
    digest = hashlib.sha256()
    for s, split in enumerate(SPLITS):
        for what in parts(data, split):
            rng = np.random.default_rng([seed, s, what.length, what.pairs])
            made = generate(what, data.vocabulary, rng)
            for name, array in vars(made).items():
                np.save(unfinished / f"{split}-{made.name}-{name}.npy", array)
                digest.update(array.tobytes())
    index = {"digest": digest.hexdigest(), "settings": settings}
    (unfinished / "index.json").write_text(json.dumps(index, indent=1))
    try:
        unfinished.rename(folder)
    except OSError:  # another process was quicker
        shutil.rmtree(unfinished)
    return folder


def read_index(folder: Path) -> dict[str, Any]:
    """digest: of all arrays. settings: what they were made from."""
    return json.loads((folder / "index.json").read_text())


def open_split(folder: Path, data: MqarData, split: str) -> list[Recall]:
    """The parts of a split, memory-mapped."""
    found = []
    for what in parts(data, split):
        stem = folder / f"{split}-{what.length}x{what.pairs}"
        arrays = (np.load(f"{stem}-{name}.npy", mmap_mode="r") for name in Recall.__dataclass_fields__)
        found.append(Recall(*arrays))
    return found


def batches(parts: list[Recall], batch: int, seed: int, epoch: int) -> list[tuple[int, np.ndarray]]:
    """An epoch's batches as (part, examples), a function of (seed, epoch): every example once, none of
    them mixed with those of another length, batches of all lengths in random order. A part's last batch
    may be smaller."""
    rng = np.random.default_rng([seed, epoch])
    found = []
    for n, part in enumerate(parts):
        order = rng.permutation(len(part))
        found += [(n, order[start : start + batch]) for start in range(0, len(part), batch)]
    return [found[i] for i in rng.permutation(len(found))]
