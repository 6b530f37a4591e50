"""Run folders made by hand: what a training leaves behind, without one."""

from pathlib import Path
from typing import Any

import pytest

from mdn.config import RunConfig
from mdn.tracking.record import Record, open_record, write_json


class Runs:
    """A folder `runs` under `root` and what a training does there."""

    data, code = "d" * 12, "c" * 12

    def __init__(self, root: Path):
        self.root = root / "runs"

    def open(self, run: RunConfig, data: str = data, code: str = code) -> tuple[Record, str]:
        return open_record(self.root, run, data=data, code=code)

    def begin(self, run: RunConfig, steps: int = 3, **opening: str) -> Record:
        """A new record with its description and `steps` log lines."""
        record, todo = self.open(run, **opening)
        assert todo == "new"
        run.to_yaml(record.folder / "config.yaml")
        made: dict[str, Any] = {
            "fingerprint": run.fingerprint(),
            "data": self.data,
            "code": self.code,
        } | opening
        made |= {"commit": "abc123", "versions": {"torch": "2"}}
        made |= {"kernels": {"gated_delta_rule": "recurrent", "momentum_delta_rule": "v2_segsum"}}
        write_json(record.folder / "manifest.json", made)
        self.write(record, 1, steps)
        return record

    def write(self, record: Record, first: int, last: int) -> None:
        for step in range(first, last + 1):
            record.append(step, {"train/loss": 4 / step, "train/lr": 1e-3})

    def finish(self, record: Record) -> None:
        record.weights.write_bytes(b"weights")
        record.finish({"validation_loss": 2.5})


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)
