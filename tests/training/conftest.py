"""Token shards for trainings in tests."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mdn.data.shards import ShardWriter, write_index


@pytest.fixture(scope="session")
def count_tokens() -> Callable[[Path], None]:
    """Writes a set of one train and one held-out split: counting upwards, which a model learns at once."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        splits = {}
        for split, length in (("train", 3000), ("heldout_numbers", 400)):
            writer = ShardWriter(folder, split, 1000)
            for start in range(0, length, 500):
                writer.write((np.arange(start, start + 500) % 50).astype(np.uint16))
            splits[split] = writer.close()
        write_index(folder, splits, [])

    return write
