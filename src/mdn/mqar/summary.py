"""What a sweep comes to: the learning rate that is best on validation, and what it reaches on the test.

Reads records; needs neither torch nor params.yaml.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from mdn.tracking.record import read_json


@dataclass(frozen=True)
class Trained:
    """The record of a cell. metrics is empty until it has been tested."""

    folder: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    metrics: dict[str, float]
    failure: dict[str, Any]

    @property
    def parts(self) -> dict[str, float]:
        """Test accuracy by part, in the data's order."""
        names = [f"{part['length']}x{part['pairs']}" for part in self.config["data"]["test"]]
        return {name: self.metrics[f"test/{name}"] for name in names}


def read_cell(folder: Path) -> Trained:
    """Raises ValueError, naming the file, if one is not what its name says."""

    def mapping(name: str) -> dict[str, Any]:
        path = folder / name
        if not path.exists():
            return {}
        try:
            return dict(read_json(path))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not a JSON mapping ({error}); repeat its training") from None

    return Trained(
        folder,
        mapping("config.yaml"),
        mapping("manifest.json"),
        mapping("metrics.json"),
        mapping("failed.json"),
    )


def best(cells: Iterable[Trained]) -> list[Trained]:
    """The cells, one a seed, of the learning rate with the highest validation accuracy in the mean over
    seeds; of equal ones the smallest. Cells without a test are passed over."""
    by_rate: dict[float, list[Trained]] = {}
    for cell in cells:
        if cell.metrics:
            by_rate.setdefault(cell.config["lr"], []).append(cell)
    if not by_rate:
        return []
    rate = max(by_rate, key=lambda lr: (mean(c.metrics["validation/accuracy"] for c in by_rate[lr]), -lr))
    return sorted(by_rate[rate], key=lambda cell: cell.config["seed"])


def summary(folders: Iterable[Path]) -> dict[str, float]:
    """For each width, the best learning rate and the means over its seeds; flat, for `dvc metrics`."""
    cells = [read_cell(folder) for folder in folders]
    found: dict[str, float] = {}
    for width in sorted({cell.config["width"] for cell in cells}):
        chosen = best(cell for cell in cells if cell.config["width"] == width)
        if not chosen:
            continue
        found |= {
            f"w{width}/lr": chosen[0].config["lr"],
            f"w{width}/seeds": len(chosen),
            f"w{width}/validation": mean(cell.metrics["validation/accuracy"] for cell in chosen),
            f"w{width}/test": mean(cell.metrics["test/accuracy"] for cell in chosen),
        }
        for part in chosen[0].parts:
            found[f"w{width}/test/{part}"] = mean(cell.parts[part] for cell in chosen)
    return found
