"""Scaling over the GPUs of a host: records of `python -m mdn.scaling`, as curves and as a table."""

from typing import Any

from mdn.config import Params
from mdn.reports.runs import Run
from mdn.reports.sheets import Chapter, Sheet
from mdn.reports.tables import number

STRATEGIES = {"ddp": "DDP", "zero2": "ZeRO-2", "fsdp": "FSDP"}  # in the order of the panels

Curve = dict[int, float]  # GPUs -> tokens/s, as a share of that of as many single GPUs


def measured(params: Params, runs: dict[tuple[str, str], Run], scale: str) -> list[Run]:
    """The cells of a scale that have a record, a model's together."""
    found = [run for (at, _), run in runs.items() if at == f"scaling-{scale}" and "cell" in run.manifest]
    order, strategies = list(params.models), list(STRATEGIES)

    def place(run: Run) -> tuple[Any, ...]:
        cell = run.manifest["cell"]
        how = (cell["compile"], cell["tokens"], strategies.index(cell["strategy"]))
        return order.index(cell["model"]), *how, cell["batch"] // cell["devices"], cell["devices"]

    return sorted(found, key=place)


class Singles:
    """Tokens/s of one GPU that trains without messages, by what else a cell is."""

    def __init__(self, cells: list[Run]) -> None:
        self.speeds = {
            _key(run.manifest["cell"], run.manifest["cell"]["batch"]): run.metrics["tokens_per_second"]
            for run in cells
            if run.state == "finished"
            and (run.manifest["cell"]["devices"], run.manifest["cell"]["strategy"]) == (1, "ddp")
        }

    def share(self, run: Run, batch: int) -> float | None:
        """A cell's tokens/s over those of as many GPUs that each train with `batch` sequences; None if
        either is not there."""
        cell = run.manifest["cell"]
        one = self.speeds.get(_key(cell, batch))
        if one is None or run.state != "finished":
            return None
        return run.metrics["tokens_per_second"] / (cell["devices"] * one)


def _key(cell: dict[str, Any], batch: int) -> tuple[Any, ...]:
    return cell["model"], cell["context"], cell["tokens"], cell["compile"], batch


def curves(params: Params, runs: dict[tuple[str, str], Run], scale: str) -> dict[str, dict[str, Curve]]:
    """By panel and model, from real shards and not compiled: the same sequences a GPU (weak scaling), the
    same batch of all (strong scaling)."""
    cells = measured(params, runs, scale)
    singles = Singles(cells)
    found: dict[str, dict[str, Curve]] = {}
    for kind in ("a GPU", "a step"):
        for strategy, title in STRATEGIES.items():
            for run in cells:
                cell = run.manifest["cell"]
                if (cell["strategy"], cell["tokens"], cell["compile"]) != (strategy, "shards", False):
                    continue
                sequences = cell["batch"] // (cell["devices"] if kind == "a GPU" else 1)
                share = singles.share(run, sequences)
                if share is not None:
                    lines = found.setdefault(f"{sequences} sequences {kind}, {title}", {})
                    lines.setdefault(cell["model"], {})[cell["devices"]] = share
    whole = {
        title: {model: dict(sorted(curve.items())) for model, curve in lines.items() if len(curve) > 1}
        for title, lines in found.items()
    }
    return {title: lines for title, lines in whole.items() if lines}


def chapter(params: Params, runs: dict[tuple[str, str], Run]) -> Chapter:
    text = (
        "Training on 1 to 8 GPUs of one host: what is left of each GPU's speed with as many sequences a "
        "GPU (weak scaling) or a step (strong scaling) as one GPU alone."
    )
    return Chapter("scaling", "Several GPUs", text, sheets(params, runs))


def sheets(params: Params, runs: dict[tuple[str, str], Run]) -> list[Sheet]:
    """One table with a line a cell, of all scales; none if nothing was measured."""
    head = ["Model", "Scale", "GPUs", "Strategy", "Sequences a step", "Tokens", "Compiled", "Tokens/s"]
    head += ["Weak scaling", "Strong scaling", "Of bf16 peak", "GiB"]
    head += ["Messages", "Messages alone", "Waiting for data", "Loss", "Hardware", "Commit"]
    rows = []
    for scale in params.scales:
        cells = measured(params, runs, scale)
        singles = Singles(cells)
        for run in cells:
            cell, figures = run.manifest["cell"], run.metrics
            speed = f"{figures['tokens_per_second']:,.0f}" if figures else ""
            if run.state != "finished":
                speed = run.failure.get("error", run.state)
            rows.append(
                [
                    params.models[cell["model"]].title or cell["model"],
                    params.scales[scale].title,
                    f"{cell['devices']}",
                    STRATEGIES[cell["strategy"]],
                    f"{cell['batch']} of {cell['context']}",
                    cell["tokens"],
                    "yes" if cell["compile"] else "no",
                    speed,
                    _percent(singles.share(run, cell["batch"] // cell["devices"])),
                    _percent(singles.share(run, cell["batch"])),
                    _percent(figures.get("mfu")),
                    number(figures["peak_gib"]) if "peak_gib" in figures else "",
                    _percent(figures.get("communication")),
                    _percent(figures.get("communication_alone")),
                    _percent(figures.get("data_wait")),
                    f"{figures['loss']:.4f}" if "loss" in figures else "",
                    run.hardware,
                    run.commit or "",
                ]
            )
    if not rows:
        return []
    notes = [
        "Scaling: tokens/s over those of as many single GPUs that each train with the cell's sequences a GPU "
        "(weak) or with all its sequences (strong).",
        "Median of 27 steps, the first 3 left out. GiB: the most of a GPU. Messages: share of two profiled "
        "steps in which NCCL ran, and in which nothing else did. Waiting for data: of the slowest GPU.",
        "One of them again: python -m mdn.scaling plan --cell NAME | python -m mdn.scaling run -",
    ]
    return [Sheet("scaling-cells", "Training on several GPUs of a host", head, rows, notes)]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
