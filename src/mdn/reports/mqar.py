"""Multi-query associative recall in the report: which cells make up its figure, and its tables."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from mdn.config import MqarScale, Params
from mdn.mqar.cells import cell
from mdn.mqar.summary import best, parts
from mdn.reports.departures import quantity
from mdn.reports.frame import published
from mdn.reports.runs import Run
from mdn.reports.sheets import Chapter, Sheet
from mdn.reports.tables import number


@dataclass(frozen=True)
class Sweep:
    """All cells of one model at one width; `chosen` are those of the learning rate that is best on
    validation."""

    model: str
    title: str
    width: int
    cells: list[Run]
    chosen: list[Run]

    @property
    def accuracies(self) -> dict[str, list[float]]:
        """By part of the test, one value a seed."""
        by_seed = [parts(run) for run in self.chosen]
        return {name: [values[name] for values in by_seed] for name in by_seed[0]} if by_seed else {}

    @property
    def mark(self) -> str:
        """What keeps its numbers from being those of whole trainings."""
        if any(run.state == "failed" for run in self.chosen):
            return " (diverged)"
        return " (cut)" if any(run.manifest.get("cut") for run in self.chosen) else ""


def sweeps(params: Params, runs: dict[tuple[str, str], Run], scale: str) -> list[Sweep]:
    """Every model that has a cell at a scale of `mqar.scales`, in the order of `models`, from the
    narrowest."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for (at, _), run in runs.items():
        if at == f"mqar-{scale}" and run.config.get("model") in params.models:
            groups.setdefault((run.config["width"], run.config["model"]), []).append(run)
    order = list(params.models)
    found = []
    for width, model in sorted(groups, key=lambda key: (key[0], order.index(key[1]))):
        cells = sorted(groups[width, model], key=lambda run: (run.config["lr"], run.config["seed"]))
        title = params.models[model].title or model
        found.append(Sweep(model, title, width, cells, best(cells)))
    return found


def chapter(params: Params, runs: dict[tuple[str, str], Run]) -> Chapter:
    text = (
        "Two layers, no language: sequences of keys and values, then each key again, and the model has to "
        "know its value (Fig. 4, Table 5). Smoke scale shows that the parts work and compares nothing."
    )
    return Chapter("mqar", "Multi-query associative recall", text, sheets(params, runs))


def sheets(params: Params, runs: dict[tuple[str, str], Run]) -> list[Sheet]:
    """For each scale with a record its results and all its trainings; Table 5."""
    tables = []
    for scale, at in params.mqar.scales.items():
        if found := sweeps(params, runs, scale):
            tables += [_results(scale, at.title, found), _trainings(params, scale, at.title, found)]
    return [*tables, settings(params)]


def settings(params: Params) -> Sheet:
    """Table 5: the paper's settings, where the study gives them, beside those of every scale."""
    paper, scales = published()["mqar"], params.mqar.scales.values()
    columns = [_settings(params, at) for at in scales]
    rows = [[what, paper.get(what, "not published"), *(column[what] for column in columns)] for what in LINES]
    head = ["", "In the paper", *(f"Scale {at.title}" for at in scales)]
    notes = [
        "Blocks are those of Zoology: a norm and a mixer, no MLP, one matrix for embedding and head.",
        "Early stopping and learning rate look at validation examples that are not the test's; Zoology's "
        "look at the test's.",
        "Ours beside Zoology: gradients clipped at 1, RMSNorm, no dropout on the embedding, no extra "
        "convolution in front of attention.",
    ]
    title = "Table 5: settings of multi-query associative recall"
    return Sheet("mqar-settings", title, head, rows, notes, sortable=False)


LINES = (
    "Layers",
    "Heads",
    "Key size",
    "Value expansion",
    "Model width",
    "Vocabulary",
    "Training examples",
    "Test",
    "Epochs",
    "Batch",
    "Early stop",
    "Learning rates",
    "Seeds",
    "Optimizer",
)


def _settings(params: Params, at: MqarScale) -> dict[str, str]:
    data, shape = params.mqar.data[at.data], at.shape
    decay = f"{at.training.weight_decay:g}"
    values = (
        f"{shape.layers}",
        f"{shape.heads}",
        f"{shape.head_k}",
        f"{shape.head_v / shape.head_k:g}",
        _list(at.widths),
        f"{data.vocabulary}",
        "; ".join(f"{p.examples} of {p.length} tokens, {p.pairs} pairs" for p in data.train),
        ", ".join(f"{p.length}/{p.pairs}" for p in data.test)
        + f" (tokens/pairs), {_examples(data.test)} each",
        f"{at.training.epochs}",
        f"{at.training.batch}",
        f"validation accuracy > {at.training.stop_above:.0%}",
        ", ".join(map(quantity, at.lrs)),
        _list(at.seeds),
        f"AdamW, weight decay {decay}, cosine over epochs to 0",
    )
    return dict(zip(LINES, values, strict=True))


def _examples(test: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(f"{part.examples}" for part in test))


def _list(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def _results(scale: str, title: str, found: list[Sweep]) -> Sheet:
    """A line a model and width: accuracy at each length and number of pairs, in per cent, mean over seeds."""
    names = list(dict.fromkeys(name for sweep in found for name in sweep.accuracies))
    head = ["Model", "Width", *(name.replace("x", "/") for name in names), "Mean"]
    head += ["Best rate", "Seeds", "Epochs", "Kernel", "Hardware"]
    rows, values = [], []
    for sweep in found:
        accuracy = sweep.accuracies
        means = [100 * mean(accuracy[name]) if name in accuracy else None for name in names]
        known = [value for value in means if value is not None]
        values.append([*means, mean(known) if known else None])
        told = [
            number(value) + _spread(accuracy[name]) if value is not None else ""
            for name, value in zip(names, means, strict=True)
        ]
        epochs = "–".join(
            dict.fromkeys(f"{e:.3g}" for e in _ends(run.metrics["epochs"] for run in sweep.chosen))
        )
        rows.append(
            [
                sweep.title + sweep.mark,
                f"{sweep.width}",
                *told,
                number(mean(known)) if known else "not finished",
                quantity(sweep.chosen[0].config["lr"]) if sweep.chosen else "",
                _list(run.config["seed"] for run in sweep.chosen),
                epochs,
                "; ".join(dict.fromkeys(_kernels(run) for run in sweep.chosen)),
                "; ".join(dict.fromkeys(run.hardware for run in sweep.chosen)),
            ]
        )
    best_cells = set()
    for width in {sweep.width for sweep in found}:
        lines = [n for n, sweep in enumerate(found) if sweep.width == width]
        for m in range(len(names) + 1):
            column = {n: number(v) for n in lines if (v := values[n][m]) is not None}
            if len(set(column.values())) > 1:
                top = max(column.values(), key=float)
                best_cells |= {(n, 2 + m) for n, text in column.items() if text == top}
    notes = [
        "Accuracy in per cent by tokens/pairs, of the learning rate that is best on validation; ± is half "
        "the range over seeds; best of a width in bold.",
        *_cuts(found),
    ]
    text = f"Multi-query associative recall ({title} scale)"
    return Sheet(f"mqar-{scale}", text, head, rows, notes, frozenset(best_cells))


def _spread(values: list[float]) -> str:
    return f" ± {50 * (max(values) - min(values)):.2f}" if len(values) > 1 else ""


def _kernels(run: Run) -> str:
    return ", ".join((run.manifest.get("kernels") or {}).values())


def _ends(values: Iterable[float]) -> list[float]:
    known = list(values)
    return [min(known), max(known)] if known else []


def _cuts(found: list[Sweep]) -> list[str]:
    """Trainings whose figures are those of a part of them."""
    cut = [(sweep, run) for sweep in found for run in sweep.chosen if run.manifest.get("cut")]
    return [
        f"{sweep.title}, width {sweep.width}, seed {run.config['seed']}: {run.manifest['cut']}."
        for sweep, run in cut
    ]


def _trainings(params: Params, scale: str, title: str, found: list[Sweep]) -> Sheet:
    """A line a training: what its learning rate and kernel led to."""
    head = ["Model/width, rate, seed", "State", "Epochs", "Validation", "Test", "Largest gradient norm"]
    head += ["First non-finite step", "Steps skipped", "Seconds", "Kernel", "Hardware", "Commit"]
    rows = []
    notes = [
        f"One of them again: python -m mdn.mqar plan --scale {scale} --cell NAME | MDN_FORCE=1 python -m "
        "mdn.mqar run -",
    ]
    for sweep in found:
        for run in sweep.cells:
            config, figures = run.config, run.metrics
            norms = run.series("train/grad_norm_max")[1]
            state = run.manifest.get("cut") or run.state
            if run.state == "failed":
                state = f"failed: {run.failure.get('error', 'no reason recorded')}"
            wanted = cell(params, scale, sweep.model, config["width"], config["lr"], config["seed"])
            if wanted.fingerprint() != run.manifest.get("fingerprint"):
                state += " †"
            first = figures.get("first_nonfinite_step")
            rows.append(
                [
                    config["name"],
                    state,
                    f"{figures['epochs']:.3g}" if figures else "",
                    number(100 * figures["validation/accuracy"]) if figures else "",
                    number(100 * figures["test/accuracy"]) if figures else "",
                    number(max(norms)) if norms else "",
                    "none" if figures and first is None else f"{first or ''}",
                    f"{figures.get('skipped_steps', '')}",
                    f"{figures['seconds']:.0f}" if figures else "",
                    _kernels(run),
                    run.hardware,
                    run.commit or "",
                ]
            )
    if any(row[1].endswith("†") for row in rows):
        notes.append("† trained with another configuration than params.yaml has now")
    text = f"Trainings of multi-query associative recall ({title} scale)"
    return Sheet(f"mqar-{scale}-trainings", text, head, rows, notes)
