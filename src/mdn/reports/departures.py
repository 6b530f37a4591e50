"""Where a scale differs from the paper's protocol, said from params.yaml and from the runs' manifests."""

from collections.abc import Iterable
from dataclasses import dataclass

from mdn.config import Params
from mdn.reports.frame import published
from mdn.reports.layout import LONGBENCH, RETRIEVAL, STAND_INS, WIKITEXT_PPL, Column, heldout, needles
from mdn.reports.runs import Run


@dataclass(frozen=True)
class Departure:
    what: str
    paper: str
    here: str
    differs: bool


def departures(params: Params, runs: dict[tuple[str, str], Run], scale: str) -> list[Departure]:
    """Every point of the protocol, the paper's beside ours. A scale that is not one of the paper's is set
    beside both of them."""
    at, protocol = params.scales[scale], published()["protocol"]
    budget, mdn = at.training, params.models["mdn"].options.mdn
    sides = [protocol[scale]] if scale in protocol else list(protocol.values())
    shape = params.shapes.get(scale, {}).get("mdn")
    found = []

    def compare(what: str, key: str, here: float) -> None:
        values = [side[key] for side in sides]
        # A budget is cut to whole batches, and 0.5M is 2^19: five per cent is rounding.
        same = any(abs(here - value) <= 0.05 * value for value in values)
        told = " · ".join(dict.fromkeys(quantity(value) for value in values))
        found.append(Departure(what, told, quantity(here), not same))

    def state(what: str, paper: str, here: str) -> None:
        found.append(Departure(what, paper, here, paper != here))

    compare("Training tokens", "tokens", budget.tokens)
    compare("Tokens a batch", "batch_tokens", budget.batch_tokens)
    compare("Warm-up tokens", "warmup_tokens", budget.warmup_tokens)
    compare("Context, tokens", "context", budget.context)
    compare("Peak learning rate", "lr", budget.lr)
    compare("Learning rate at the end", "lr_end", budget.lr * params.optimizer.lr_final)
    adam = params.optimizer
    betas, rest = f"{adam.beta1:g} and {adam.beta2:g}", f"decay {adam.weight_decay:g}, clip {adam.clip:g}"
    state("Optimizer, as in the authors' release", sides[0]["optimizer"], f"AdamW, β {betas}, {rest}")
    vectors = "Weight decay of norms, biases and the gates' rates"
    found.append(Departure(vectors, "yes, in the authors' release", "none", True))
    text = params.data.sets[at.data]
    source = text.repository or ", ".join(part.name for part in text.parts)
    slim = at.data == "slimpajama"
    paper_data = "SlimPajama, subset of 100B tokens"
    found.append(Departure("Training text", paper_data, f"{at.data} ({source})", not slim))
    found.append(
        Departure("Which subset", "not published", f"{text.keep:.0%} of the documents, by their hash", True)
        if slim
        else Departure("Which subset", "not published", "all of it but the held-out shares", True)
    )
    if shape:
        here = (
            f"d {at.d_model}, {shape.layers} layers, {shape.heads} heads of {shape.head_k} × {shape.head_v}"
        )
        told = " · ".join(side["mdn"] for side in sides)
        found.append(Departure("MDN's shape", told, here, here not in [side["mdn"] for side in sides]))
    state("Temperature τ of η", "sqrt(d/h)", mdn.tau)
    bound = "none" if mdn.log_mu_min is None else f"{mdn.log_mu_min:g}".replace("-", "−")
    state("Lower bound of log μ", "−2", bound)
    versions = {
        version
        for (at_scale, _), run in runs.items()
        if at_scale == scale
        for op, version in (run.manifest.get("kernels") or {}).items()
        if op == "momentum_delta_rule"
    }
    used = ", ".join(sorted(versions)) or params.models["mdn"].kernel
    found.append(
        Departure(
            "Coefficient of the chunk form",
            "log space, Algorithm 1 (kernel version v1_logspace)",
            f"Γ = L_α diag(β) L_μ (kernel version {used})" if used != "v1_logspace" else "v1_logspace",
            used != "v1_logspace",
        )
    )
    limit = at.evaluation.limit
    state("Items a task", "all", "all" if limit is None else f"the first {limit}")
    state("Evaluation window, tokens", "4096", str(at.evaluation.window))
    judged = at.evaluation
    for what, paper, columns, others, window, wanted in (
        (
            "WikiText perplexity",
            "WikiText, window of 4K",
            (WIKITEXT_PPL,),
            heldout(params, scale),
            judged.window,
            4096,
        ),
        (
            "Retrieval at 2K",
            "FDA, SWDE, SQuAD, NQ, TQA, DROP; how windows are cut is not published",
            RETRIEVAL,
            [column for column in STAND_INS if column.suite == "retrieval"],
            judged.retrieval_window,
            2048,
        ),
        (
            "LongBench at 16K",
            "14 tasks",
            LONGBENCH,
            [column for column in STAND_INS if column.suite == "longbench"],
            judged.longbench_window,
            16384,
        ),
    ):
        done = _ran(runs, scale, columns)
        stand_ins = ", ".join(column.title for column in _ran(runs, scale, others))
        here = ", ".join(column.title for column in done) if len(done) < len(columns) else paper.split(";")[0]
        here = f"{here}, window of {window} tokens" if done else "not run"
        same = len(done) == len(columns) and window == wanted
        found.append(
            Departure(what, paper, here + (f"; beside it: {stand_ins}" if stand_ins else ""), not same)
        )
    if _ran(runs, scale, needles(params, scale)[1]):
        found += _needles(params, scale)
    else:
        state("RULER's needles", "2048, 4096, 8192, 16384 tokens", "not run")
    return found


def _needles(params: Params, scale: str) -> list[Departure]:
    """Fig. 5's protocol. What the paper leaves open is RULER's own."""
    setting, lengths = params.scales[scale].evaluation, "2048, 4096, 8192, 16384"
    here = ", ".join(map(str, setting.niah_lengths))
    items = "500 (RULER)"
    return [
        Departure("RULER's needles, tokens of prompt and answer", lengths, here, here != lengths),
        Departure(
            "RULER's needles, prompts a task and length",
            items,
            items if setting.niah_items == 500 else str(setting.niah_items),
            setting.niah_items != 500,
        ),
        Departure(
            "RULER's needles, haystacks",
            "filled in steps of 500 words, sentences by a trained splitter (RULER)",
            "filled by the word, sentences by their last character; 49 essays in the order of their names",
            True,
        ),
    ]


def _ran(runs: dict[tuple[str, str], Run], scale: str, columns: Iterable[Column]) -> list[Column]:
    """The columns for which any run of a scale has a value."""
    tasks = {
        (suite, result.get("task"))
        for (at, _), run in runs.items()
        if at == scale
        for suite, evaluation in run.evaluations.items()
        for result in evaluation.get("results", [])
    }
    return [column for column in columns if (column.suite, column.task) in tasks]


def quantity(value: float) -> str:
    """A number as one reads it: 15B, 0.5M, 4096, 3e−4."""
    if value >= 1e5:
        unit, size = ("B", 1e9) if value >= 1e9 else ("M", 1e6)
        return f"{value / size:.4g}{unit}"
    if value < 0.01:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    return f"{value:.0f}" if value == int(value) else f"{value:g}"
