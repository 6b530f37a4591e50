"""Which tables there are: their rows and columns, in the paper's order."""

from collections.abc import Iterable
from dataclasses import dataclass

from mdn.config import Params


@dataclass(frozen=True)
class Column:
    """One measurement. `suite` is the evaluation that makes it; None: this pipeline has none that does, and
    `why` says so."""

    key: str
    title: str
    task: str = ""
    metric: str = ""
    suite: str | None = None
    unit: str = "%"  # "%" or "ppl"
    why: str = ""

    @property
    def lower_is_better(self) -> bool:
        return self.unit == "ppl"

    @property
    def arrow(self) -> str:
        return "↓" if self.lower_is_better else "↑"


@dataclass(frozen=True)
class Table:
    key: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]


LAMBADA_PPL = Column("lambada_ppl", "LAMBADA ppl", "lambada_openai", "perplexity", "lm", "ppl")
WIKITEXT_PPL = Column(
    "wikitext_ppl", "WikiText ppl", "wikitext", "word_perplexity", None, "ppl", "no suite reads WikiText-2"
)
# The eight tasks of the paper's average.
ACCURACIES = (
    Column("lambada_acc", "LAMBADA acc", "lambada_openai", "acc", "lm"),
    Column("hellaswag", "HellaSwag acc_n", "hellaswag", "acc_norm", "commonsense"),
    Column("arc_easy", "ARC-E acc", "arc_easy", "acc", "commonsense"),
    Column("arc_challenge", "ARC-C acc_n", "arc_challenge", "acc_norm", "commonsense"),
    Column("piqa", "PIQA acc", "piqa", "acc", "commonsense"),
    Column("winogrande", "WinoGrande acc", "winogrande", "acc", "commonsense"),
    Column("boolq", "BoolQ acc", "boolq", "acc", "commonsense"),
    Column("sciq", "SciQ acc", "sciq", "acc", "commonsense"),
)
LM_AVERAGE = Column("lm_average", "LM average", suite="commonsense")
NO_RETRIEVAL = "no suite measures retrieval at 2K"
RETRIEVAL = (Column("swde", "SWDE", why=NO_RETRIEVAL), Column("drop", "DROP", why=NO_RETRIEVAL))
RETRIEVAL_AVERAGE = Column("retrieval_average", "Retrieval average", why=NO_RETRIEVAL)

SYSTEMS = ("transformer", "mamba2", "gdn", "comba", "kda", "mdn")
ABLATIONS = (
    "mdn",
    "mdn-no-correction",
    "mdn-no-momentum",
    "mdn-no-beta-bound",
    "mdn-eta-sigmoid",
    "mdn-no-mu-bound",
    "mdn-alpha-1",
)
BOUNDS = ("mdn", "mdn-mu-1.5", "mdn-mu-1.357", "mdn-mu-1")
HYBRIDS = ("mamba2-h-3to1", "gdn-h-3to1", "comba-h-3to1", "kda-h-3to1", "mdn-h-3to1", "mdn-h-7to1")
NEEDLES = {  # RULER's tasks in the order of Fig. 5's panels
    "niah_single_1": "Single needle, repeated text",
    "niah_single_2": "Single needle, essays",
    "niah_single_3": "Single needle, UUID",
    "niah_multikey_1": "Multi-key",
    "niah_multiquery": "Multi-query",
    "niah_multivalue": "Multi-value",
}
NEEDLES_LENGTH = 8192  # for which the paper prints numbers
TEXTS = {"wiki": "Wikipedia", "c4": "C4", "speeches": "Speeches", "slimpajama": "SlimPajama"}


def heldout(params: Params, scale: str) -> tuple[Column, ...]:
    """A perplexity for every part of the scale's own data set of which a share is held out. Never called by
    the name of a published set: these are other texts."""
    name = params.scales[scale].data
    text = params.data.sets[name]
    if text.source == "huggingface":
        held = [name] if text.holdout > 0 else []
    else:
        held = [part.name for part in text.parts if part.holdout > 0]
    return tuple(
        Column(
            f"heldout_{key}",
            f"{TEXTS.get(key, key)} held-out ppl",
            f"heldout_{key}",
            "perplexity",
            "lm",
            "ppl",
        )
        for key in held
    )


def needles(params: Params, scale: str) -> tuple[int, tuple[Column, ...]]:
    """The length for which the needles are tabulated, and its columns: the paper's or else the longest."""
    lengths = params.scales[scale].evaluation.niah_lengths
    length = NEEDLES_LENGTH if NEEDLES_LENGTH in lengths else max(lengths)
    return length, tuple(
        Column(task, title, f"{task}_{length}", "recall", "niah") for task, title in NEEDLES.items()
    )


def tables(params: Params, scale: str, active: Iterable[str], published: dict[str, set[str]]) -> list[Table]:
    """The tables worth printing at a scale.

    active: models that are asked for or have a run folder. published: by table, the columns for which the
    paper gives values at this scale. A table appears if it has either; a system of Table 2 is not enough.
    """
    active = set(active)
    own = heldout(params, scale)
    ran = tuple(name for name in params.models if name in active)
    others = tuple(name for name in ran if name not in {*SYSTEMS, *ABLATIONS, *BOUNDS, *HYBRIDS})

    def build(key: str, title: str, rows: tuple[str, ...]) -> Table:
        retrieval = [column for column in RETRIEVAL if column.key in published.get(key, ())]
        tasks = (WIKITEXT_PPL, LAMBADA_PPL, *ACCURACIES, LM_AVERAGE)
        known = tuple(name for name in rows if name in params.models)
        return Table(key, title, known, (*own[:1], *tasks, *retrieval, RETRIEVAL_AVERAGE))

    found = []
    if active & set(SYSTEMS) or "table2" in published:
        found.append(build("table2", "Table 2: main results", SYSTEMS))
    for key, title, rows in (
        ("table4-ablations", "Table 4: ablations", ABLATIONS),
        ("table4-bounds", "Table 4: lower bound of log μ (MDN: −2)", BOUNDS),
        ("table4-hybrids", "Table 4: hybrids with attention layers", HYBRIDS),
        ("others", "Variants that the paper does not print", ("mdn", *others)),
    ):
        if active & (set(rows) - set(SYSTEMS)) or key in published:
            found.append(build(key, title, rows))
    wanted = active if "niah" in params.suites else set()
    wanted |= set(SYSTEMS) if "niah" in published else set()
    if wanted:
        length, columns = needles(params, scale)
        title = f"RULER's needles at {length} tokens, recall"
        title = f"Fig. 5 in numbers: {title}" if "niah" in published else title
        found.append(Table("niah", title, tuple(name for name in params.models if name in wanted), columns))
    if active and own:
        found.append(Table("heldout", "Held-out perplexity, not in the paper", ran, own))
    return found
