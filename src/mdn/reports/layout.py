"""Which tables there are: their rows and columns, in the paper's order."""

from collections.abc import Iterable
from dataclasses import dataclass

from mdn.config import Params


@dataclass(frozen=True)
class Column:
    """One measurement: a metric of a task of a suite."""

    key: str
    title: str
    task: str = ""
    metric: str = ""
    suite: str = ""
    unit: str = "%"  # "%" or "ppl"
    note: str = ""  # what to know about the measurement, printed with the table

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
WIKITEXT_PPL = Column("wikitext_ppl", "WikiText ppl", "wikitext", "word_perplexity", "lm", "ppl")
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
# In-context retrieval at 2K; an output that contains an answer is right.
RETRIEVAL = tuple(
    Column(task, title, task, "contains", "retrieval")
    for task, title in (
        ("fda", "FDA"),
        ("swde", "SWDE"),
        ("squad", "SQuAD"),
        ("nq", "NQ"),
        ("triviaqa", "TQA"),
        ("drop", "DROP"),
    )
)
RETRIEVAL_AVERAGE = Column("retrieval_average", "Retrieval average", suite="retrieval")
LONGBENCH = tuple(
    Column(f"longbench_{task}", title, task, metric, "longbench")
    for task, title, metric in (
        ("narrativeqa", "NarrativeQA", "qa_f1"),
        ("qasper", "Qasper", "qa_f1"),
        ("multifieldqa_en", "MultiFieldQA", "qa_f1"),
        ("hotpotqa", "HotpotQA", "qa_f1"),
        ("2wikimqa", "2WikiMQA", "qa_f1"),
        ("musique", "MuSiQue", "qa_f1"),
        ("gov_report", "GovReport", "rouge_l"),
        ("qmsum", "QMSum", "rouge_l"),
        ("multi_news", "MultiNews", "rouge_l"),
        ("trec", "TREC", "classification"),
        ("triviaqa", "TriviaQA", "qa_f1"),
        ("samsum", "SAMSum", "rouge_l"),
        ("lcc", "LCC", "code_similarity"),
        ("repobench-p", "RepoBench-P", "code_similarity"),
    )
)
LONGBENCH_AVERAGE = Column("longbench_average", "LongBench average", suite="longbench")
# Metrics that are shares of one, and shown in per cent.
SHARES = {"recall", *(column.metric for column in (*ACCURACIES, *RETRIEVAL, *LONGBENCH))}
AVERAGES = {  # by key, what is averaged
    LM_AVERAGE.key: ACCURACIES,
    RETRIEVAL_AVERAGE.key: RETRIEVAL,
    LONGBENCH_AVERAGE.key: LONGBENCH,
}
STAND_INS = (
    Column(
        "standin_squad",
        "SQuAD questions",
        "retrieval_squad",
        "contains",
        "retrieval",
        note="1000 real items of SQuAD, with their questions; the paper's set has them as text to continue",
    ),
    Column(
        "standin_drop",
        "DROP questions",
        "retrieval_drop",
        "contains",
        "retrieval",
        note="1000 real items of DROP, with their questions; the paper's set has them as text to continue",
    ),
    Column(
        "standin_numbers",
        "Held-out numbers",
        "retrieval_numbers",
        "contains",
        "retrieval",
        note="the shape of FDA and SWDE: the number that follows three words in a held-out document of the "
        "model's own text",
    ),
    Column(
        "standin_qasper",
        "Qasper yes/no F1",
        "longbench_qasper",
        "qa_f1",
        "longbench",
        note="real yes/no questions of Qasper, asked as LongBench asks; its own 200 questions are others",
    ),
    Column(
        "standin_code",
        "Standard library",
        "longbench_code",
        "code_similarity",
        "longbench",
        note="the shape of LCC: the next line of a module of Python's standard library, code similarity",
    ),
)

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
TEXTS = {
    "wiki": "Wikipedia",
    "c4": "C4",
    "speeches": "Speeches",
    "linux": "Linux documentation",
    "slimpajama": "SlimPajama",
}


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
        retrieval = RETRIEVAL if key == "table2" else ()  # of the others the paper prints the average only
        tasks = (WIKITEXT_PPL, LAMBADA_PPL, *ACCURACIES, LM_AVERAGE)
        known = tuple(name for name in rows if name in params.models)
        return Table(key, title, known, (*own[:1], *tasks, *retrieval, RETRIEVAL_AVERAGE))

    found = []
    if active & set(SYSTEMS) or "table2" in published:
        found.append(build("table2", "Table 2: main results", SYSTEMS))
    if active & set(SYSTEMS) or "table3" in published:
        systems = tuple(name for name in SYSTEMS if name in params.models)
        window = params.scales[scale].evaluation.longbench_window
        size = "at 16K" if window == 16384 else f"in windows of {window} tokens"
        found.append(Table("table3", f"Table 3: LongBench {size}", systems, (*LONGBENCH, LONGBENCH_AVERAGE)))
    wanted = (active if "niah" in params.suites else set()) | (set(SYSTEMS) if "niah" in published else set())
    if wanted:
        length, columns = needles(params, scale)
        title = f"RULER's needles at {length} tokens, recall"
        title = f"Fig. 5 in numbers: {title}" if "niah" in published else title
        found.append(Table("niah", title, tuple(name for name in params.models if name in wanted), columns))
    for key, title, rows in (
        ("table4-ablations", "Table 4: ablations", ABLATIONS),
        ("table4-bounds", "Table 4: lower bound of log μ (MDN: −2)", BOUNDS),
        ("table4-hybrids", "Table 4: hybrids with attention layers", HYBRIDS),
        ("others", "Variants that the paper does not print", ("mdn", *others)),
    ):
        if active & (set(rows) - set(SYSTEMS)) or key in published:
            found.append(build(key, title, rows))
    if active and own:
        found.append(Table("heldout", "Held-out perplexity, not in the paper", ran, own))
    if active:
        found.append(Table("standins", "Stand-ins, not in the paper", ran, STAND_INS))
    return found
