"""What a sweep comes to: the learning rate that is best on validation, and what it reaches on the test.

Needs neither torch nor params.yaml.
"""

from collections.abc import Iterable
from statistics import mean
from typing import Any, Protocol, TypeVar


class Trained(Protocol):
    """A cell's record: its configuration, and its figures, empty until it has been tested."""

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def metrics(self) -> dict[str, float]: ...


Cell = TypeVar("Cell", bound=Trained)


def parts(cell: Trained) -> dict[str, float]:
    """Test accuracy by part (`512x32`: tokens, pairs), in the order of the data."""
    names = [f"{part['length']}x{part['pairs']}" for part in cell.config["data"]["test"]]
    return {name: cell.metrics[f"test/{name}"] for name in names}


def best(cells: Iterable[Cell]) -> list[Cell]:
    """The cells, one a seed, of the learning rate with the highest validation accuracy in the mean over
    seeds; of equal ones the smallest. Cells without a test are passed over."""
    by_rate: dict[float, list[Cell]] = {}
    for cell in cells:
        if cell.metrics:
            by_rate.setdefault(cell.config["lr"], []).append(cell)
    if not by_rate:
        return []
    rate = max(by_rate, key=lambda lr: (mean(c.metrics["validation/accuracy"] for c in by_rate[lr]), -lr))
    return sorted(by_rate[rate], key=lambda cell: cell.config["seed"])


def summary(cells: Iterable[Trained]) -> dict[str, float]:
    """For each width, the best learning rate and the means over its seeds; flat, for `dvc metrics`."""
    cells = list(cells)
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
        for name in parts(chosen[0]):
            found[f"w{width}/test/{name}"] = mean(parts(cell)[name] for cell in chosen)
    return found
