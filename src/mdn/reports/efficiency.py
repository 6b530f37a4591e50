"""Speed and memory in the report: which records make up Fig. 6, and its tables."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mdn.config import Params
from mdn.reports.frame import published
from mdn.reports.runs import Run
from mdn.reports.sheets import Chapter, Sheet
from mdn.reports.tables import number

KERNELS = {"fla": "FLA", "v4_recompute": "residuals computed again"}
BASELINES = {"gdn": "GDN", "gdn-fla": "GDN (FLA)"}  # by name of their records
REST = {
    "prefill": "a prompt at once, and token by token",
    "loader": "waiting for the loader",
    "compiled": "training through torch.compile, and without",
}
Shape = tuple[int, int]  # sequences, tokens


@dataclass(frozen=True)
class System:
    """A model, with one of its kernels."""

    model: str
    title: str
    run: Run

    @property
    def variant(self) -> bool:
        return self.run.name != self.model

    def shapes(self, kind: str) -> list[Shape]:
        """With a record, from the shortest sequence; those that failed too."""
        names = {key.split("/")[1] for key in self.run.metrics if key.startswith(f"{kind}/")}
        names |= {cell.split("/")[1] for cell in self.run.manifest["failures"] if cell.startswith(f"{kind}/")}
        shapes = [tuple(map(int, name.split("x"))) for name in names]
        return sorted(((B, T) for B, T in shapes), key=lambda shape: shape[1])

    def figure(self, kind: str, shape: Shape, name: str) -> float | None:
        return self.run.metrics.get(f"{kind}/{shape[0]}x{shape[1]}/{name}")

    def failure(self, kind: str, shape: Shape) -> str | None:
        return self.run.manifest["failures"].get(f"{kind}/{shape[0]}x{shape[1]}")


def systems(params: Params, runs: dict[tuple[str, str], Run], scale: str) -> list[System]:
    """Everything measured at a scale, in the order of `models`, a model's other kernels after it."""
    found = []
    for (at, name), run in runs.items():
        if at != f"efficiency-{scale}" or run.state == "absent":
            continue
        kernel = run.config["kernel"]
        model = name if kernel == "auto" else name.removesuffix(f"-{kernel}")
        if model in params.models:
            title = params.models[model].title or model
            told = "" if kernel == "auto" else f" ({KERNELS.get(kernel, kernel)})"
            found.append(System(model, title + told, run))
    order = list(params.models)
    return sorted(found, key=lambda system: (order.index(system.model), system.run.name))


def all_shapes(found: list[System], kind: str) -> list[Shape]:
    """From the shortest sequence."""
    return sorted({shape for system in found for shape in system.shapes(kind)}, key=lambda shape: shape[1])


def chapter(params: Params, runs: dict[tuple[str, str], Run]) -> Chapter:
    text = "Time and memory of the models side by side on one card, with random tokens (Fig. 6)."
    return Chapter("efficiency", "Efficiency", text, sheets(params, runs))


def sheets(params: Params, runs: dict[tuple[str, str], Run]) -> list[Sheet]:
    """For each scale with a record: training, decoding, and the rest."""
    made = []
    for scale, at in params.scales.items():
        found = systems(params, runs, scale)
        made += [sheet(scale, at.title, found) for sheet in (_training, _decoding, _rest)]
    return [sheet for sheet in made if sheet.rows]


def _training(scale: str, title: str, found: list[System]) -> Sheet:
    head = ["Model", "Sequences × tokens", "Tokens/s", "p20 to p80"]
    head += [f"Tokens/s to {name}'s" for name in BASELINES.values()]
    head += ["MFU", "Peak GiB", "Peak to GDN (FLA)'s", "Estimated GiB"]
    memory = _paper(scale).get("memory_gb", {})
    head += [*(["Paper's GB"] if memory else []), "Steps", "Kernel", "Hardware"]
    rows: list[list[str]] = []
    speeds: dict[Shape, dict[int, float]] = {}
    for system in found:
        for shape in system.shapes("train"):
            speed = system.figure("train", shape, "tokens_per_second")
            lead = [system.title, f"{shape[0]} × {shape[1]}"]
            if speed is None:
                rows.append([*lead, f"failed: {system.failure('train', shape)}", *[""] * (len(head) - 3)])
                continue
            tokens = shape[0] * shape[1]
            ends = (system.figure("train", shape, f"seconds_{p}") for p in ("p80", "p20"))
            ratios = [_ratio(found, system, base, shape, "tokens_per_second") for base in BASELINES]
            speeds.setdefault(shape, {})[len(rows)] = speed
            rows.append(
                [
                    *lead,
                    f"{speed:.0f}",
                    " to ".join(f"{tokens / seconds:.0f}" for seconds in ends if seconds),
                    *ratios,
                    _told(system.figure("train", shape, "mfu"), 3),
                    _told(system.figure("train", shape, "peak_gib"), 1),
                    _ratio(found, system, "gdn-fla", shape, "peak_gib"),
                    _told(system.figure("train", shape, "estimated_gib"), 1),
                    *([f"{memory.get(system.title, '')}"] if memory else []),
                    f"{system.figure('train', shape, 'samples'):.0f}",
                    ", ".join(system.run.manifest["kernels"].values()),
                    system.run.hardware,
                ]
            )
    best = {(max(at, key=lambda n: at[n]), 2) for at in speeds.values() if len(at) > 1}
    notes = [
        "A step is forward, backward, clipping and AdamW in bfloat16 autocast, without a loader; the median "
        "of all rounds, in which the models take turns. Ratios are of one campaign only.",
        "MFU: FLOPs of the model (mdn.models.cost) by the card's dense bfloat16 peak. Peak: tensors alone; "
        "estimated: by mdn plan, with CUDA's own memory and what fragments cost.",
        *_published(scale),
        *_about(scale, found),
    ]
    text = f"Fig. 6 in numbers: training ({title} scale)"
    return Sheet(f"efficiency-{scale}", text, head, rows, notes, frozenset(best))


def _paper(scale: str) -> dict[str, Any]:
    """What the paper prints of Fig. 6 at a scale, or nothing."""
    paper = published()["efficiency"]
    return paper if scale == paper["scale"] else {}


def _published(scale: str) -> list[str]:
    paper = _paper(scale)
    if not paper:
        return []
    told = ", ".join(f"{name} {value}" for name, value in paper["memory_gb"].items())
    return [f"The paper's {paper['source']} (PDF p. {paper['page']}), {paper['note']}: {told}."]


def _decoding(scale: str, title: str, found: list[System]) -> Sheet:
    contexts = all_shapes(found, "decode")
    head = ["Model", *(f"ms at {T}" for _, T in contexts), *(f"GiB at {T}" for _, T in contexts), "Hardware"]
    rows, values = [], []
    for system in found:
        if system.shapes("decode"):
            seconds = [system.figure("decode", shape, "seconds") for shape in contexts]
            cells = ["failed" if system.failure("decode", s) else "" for s in contexts]
            cells = [number(1e3 * x) if x else cell for x, cell in zip(seconds, cells, strict=True)]
            memory = [_told(system.figure("decode", shape, "peak_gib"), 2) for shape in contexts]
            rows.append([system.title, *cells, *memory, system.run.hardware])
            values.append(seconds)
    best = set()
    for m in range(len(contexts)):
        column = {n: x for n, row in enumerate(values) if (x := row[m])}
        if len(column) > 1:
            best.add((min(column, key=lambda n: column[n]), m + 1))
    notes = [
        "Milliseconds a token after so many tokens of context, one sequence, greedy; on a GPU a CUDA graph a "
        "token. The paper's Fig. 6 adds up the time of a whole sequence.",
        *_about(scale, found),
    ]
    text = f"Fig. 6 in numbers: decoding ({title} scale)"
    return Sheet(f"efficiency-{scale}-decoding", text, head, rows, notes, frozenset(best))


def _rest(scale: str, title: str, found: list[System]) -> Sheet:
    """Prefill, the loader, torch.compile."""
    head = ["Model", "Sequences × tokens", "What", "Measured", "Against", "Ratio", "Peak GiB", "Hardware"]
    rows = []
    for system in found:
        for kind, what in REST.items():
            for shape in system.shapes(kind):
                lead = [system.title, f"{shape[0]} × {shape[1]}", what]
                seconds = system.figure(kind, shape, "seconds")
                if seconds is None:
                    rows.append([*lead, f"failed: {system.failure(kind, shape)}", *[""] * 4])
                    continue
                rows.append(
                    [
                        *lead,
                        *_compared(system, kind, shape, seconds),
                        _told(system.figure(kind, shape, "peak_gib"), 2),
                        system.run.hardware,
                    ]
                )
    notes = ["Token by token: all that fitted into ten seconds, for the whole prompt.", *_about(scale, found)]
    text = f"Prefill, loader and torch.compile ({title} scale)"
    return Sheet(f"efficiency-{scale}-rest", text, head, rows, notes)


def _compared(system: System, kind: str, shape: Shape, seconds: float) -> list[str]:
    """What was measured, what it stands against, and the ratio."""

    def figure(name: str) -> float:
        return system.run.metrics[f"{kind}/{shape[0]}x{shape[1]}/{name}"]

    if kind == "prefill":
        token, read = figure("token_seconds"), figure("tokens_read")
        whole = token * shape[1]
        return [
            f"{1e3 * seconds:.1f} ms",
            f"{1e3 * whole:.0f} ms ({read:.0f} read)",
            f"{whole / seconds:.1f}",
        ]
    if kind == "loader":
        waited = figure("wait_seconds")
        return [f"{1e3 * waited:.2f} ms", f"{1e3 * seconds:.1f} ms a step", f"{waited / seconds:.2%}"]
    speed, eager = figure("tokens_per_second"), system.figure("train", shape, "tokens_per_second")
    told = f"{speed:.0f} tokens/s, first step {figure('compile_seconds'):.0f} s"
    return [told, f"{eager:.0f} tokens/s" if eager else "", f"{speed / eager:.3f}" if eager else ""]


def _ratio(found: list[System], system: System, base: str, shape: Shape, name: str) -> str:
    """To a system of the same campaign."""
    other = next((s for s in found if s.run.name == base and s.run.campaign == system.run.campaign), None)
    theirs = other.figure("train", shape, name) if other else None
    ours = system.figure("train", shape, name)
    return f"{ours / theirs:.3f}" if ours and theirs else ""


def _told(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"


def _about(scale: str, found: list[System]) -> Iterable[str]:
    """How it was made, what is missing, and how to make it again."""
    yield f"Again: python -m mdn.efficiency plan --scale {scale} | python -m mdn.efficiency run --warm -"
    made = {
        f"{system.run.hardware}, driver {system.run.manifest.get('driver')}, commit {system.run.commit}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(system.run.manifest["versions"].items()))
        for system in found
    }
    yield from sorted(made)
    for system in found:
        if system.run.manifest.get("cut"):
            yield f"{system.title}: {system.run.manifest['cut']}."
