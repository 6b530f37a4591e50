"""The kernel report: how exact and how fast the versions of the momentum delta rule are.

From a record `{"accuracy": …, "timings": [{"file": …, …}]}`: what `mdn_kernels.accuracy` measured on this
machine, and what `mdn_kernels.bench` left in benchmarks/results, on whatever card it ran.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdn.reports.figures import kernels
from mdn.reports.figures.style import Drawing
from mdn.reports.tables import markdown_line

MEANING = {
    "recurrent": "the equations, token by token",
    "v1_logspace": "the paper's coefficient, as printed",
    "v2_segsum": "the stable one, Γ = L_α diag(β) L_μ",
}
TABLE6 = {"no mu bound": "w/o μ bound: NaN at step 70", "alpha_max=1": "α_max = 1: NaN at the first step"}


@dataclass(frozen=True)
class Plain:
    """A table of texts, of which the first `words` columns are words and the others numbers."""

    title: str
    head: list[str]
    rows: list[list[str]]
    words: int = 1

    def markdown(self) -> list[str]:
        rule = ["---"] * self.words + ["---:"] * (len(self.head) - self.words)
        lines = [self.head, rule, *self.rows]
        return [f"## {self.title}", "", *map(markdown_line, lines), ""]


@dataclass(frozen=True)
class Report:
    said: list[str]  # paragraphs
    tables: list[Plain]
    drawings: list[Drawing]

    def markdown(self, title: str = "Kernels", pictures: str | None = "kernels") -> str:
        """pictures: the folder where they lie, None without them."""
        lines = [f"# {title}", "", *(text for paragraph in self.said for text in (paragraph, ""))]
        for drawing in self.drawings if pictures is not None else ():
            lines += [f"![{drawing.title}]({'/'.join(filter(None, (pictures, drawing.name)))}.svg)", ""]
        return "\n".join([*lines, *(line for table in self.tables for line in table.markdown())])


def timings(folder: Path) -> list[dict[str, Any]]:
    """The records of `mdn_kernels.bench` in a folder, by name: those with timed versions."""
    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if any("forward_backward_ms_p50" in row for row in record.get("results", [])):
            found.append({"file": path.name, **record})
    return found


def report(record: dict[str, Any], only: list[str] | None = None) -> Report:
    """Tables and pictures of a record. only: these versions, all by default."""
    accuracy = record["accuracy"]
    names = [version["name"] for version in accuracy["versions"]]
    tables: list[Plain] = []
    drawings: list[Drawing] = []
    if accuracy["rows"]:
        tables, drawings = [errors(accuracy), paper_rows(accuracy)], [kernels.errors(accuracy)]
    for bench in record["timings"]:
        rows = [row for row in bench["results"] if only is None or row["name"] in only]
        if found := card_errors(bench, only):
            tables.append(found)
        if rows:
            tables.append(timing({**bench, "results": rows}))
            if bench.get("lengths"):
                tables.append(lengths(bench))
            if drawing := kernels.speed({**bench, "results": rows}, names):
                drawings.append(drawing)
    tables.insert(0 if only else len(tables), registered(accuracy, only))  # what was changed comes first
    shape = accuracy["shape"]
    said = [
        "The paper writes its coefficient as a difference of prefix sums in log space (`v1_logspace`). "
        "Where momentum decays faster than memory, the difference cancels to nothing while its factor "
        "exp(−U_j) grows without bound: the result is wrong, and NaN once exp overflows. The same number "
        "as a product of three non-negative matrices (`v2_segsum` and newer) subtracts nothing and has no "
        "positive exponent.",
        f"Errors are relative, the largest over outputs and final states and over all gradients, in "
        f"{accuracy['dtype']} on {accuracy['device']} with torch {accuracy['torch']}; {shape['T']} tokens, "
        f"K = {shape['K']}, V = {shape['V']}; the reference is the step recurrence in float64.",
    ]
    if record["timings"]:
        said.append(
            "Times are medians; to FLA: divided by the time of flash-linear-attention's gated delta rule on "
            "the same shape. Kept: for the backward, inputs included; peak: above what was there before."
        )
    return Report(said, tables, drawings)


def errors(accuracy: dict[str, Any]) -> Plain:
    """A line for each range of gates, outputs and gradients of each version."""
    at = {(row["gates"], row["version"]): row for row in accuracy["rows"]}
    shown = list(dict.fromkeys(row["version"] for row in accuracy["rows"]))
    told = {row["gates"]: row["ranges"] for row in accuracy["rows"]}
    head = ["gates", *(f"{name} {what}" for name in shown for what in ("outputs", "gradients"))]
    rows = [
        [text if gates != "typical" else f"typical: {text}"]
        + [error(at[gates, name][what]) for name in shown for what in ("outputs", "gradients")]
        for gates, text in told.items()
    ]
    return Plain("Errors against the float64 recurrence", head, rows)


def paper_rows(accuracy: dict[str, Any]) -> Plain:
    """The rows of the paper's Table 6 that ended in NaN: the gates that they allow, through each version."""
    found = [row for row in accuracy["rows"] if row["gates"] in TABLE6]
    rows = [
        [
            TABLE6[row["gates"]],
            row["ranges"],
            row["version"] + (f": {MEANING[row['version']]}" if row["version"] in MEANING else ""),
            error(row["outputs"]),
            error(row["gradients"]),
        ]
        for row in found
    ]
    head = ["paper's row", "gates that it allows", "version", "outputs", "gradients"]
    return Plain("The two NaN rows of the paper's Table 6", head, rows, words=3)


def timing(bench: dict[str, Any]) -> Plain:
    """Times and memory of a bench record."""

    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    rows = [
        [
            f"{row['B']}×{row['T']}, {row['H']} × {row['K']} × {row['V']}",
            row["name"],
            shown(row["forward_ms_p50"], ".3f"),
            shown(row.get("forward_ratio"), ".2f"),
            shown(row["forward_backward_ms_p50"], ".3f"),
            shown(row.get("forward_backward_ratio"), ".2f"),
            shown(row["saved_mib"], ",.0f"),
            shown(row["peak_mib"], ",.0f"),
        ]
        for row in bench["results"]
    ]
    versions = ", ".join(f"{name} {bench[name]}" for name in ("torch", "triton", "fla") if bench.get(name))
    title = f"Time and memory on {bench['device']} ({versions}; {bench['date'][:10]})"
    if first := bench.get("first_call"):
        empty, warm = first["empty_cache_s"], first["warm_cache_s"]
        title += f"; first call {empty:.1f} s, {warm:.1f} s with compiled kernels"
    head = [
        "B×T, H × K × V",
        "version",
        "forward ms",
        "to FLA",
        "forward + backward ms",
        "to FLA",
        "kept MiB",
    ]
    return Plain(title, [*head, "peak MiB"], rows, words=2)


def lengths(bench: dict[str, Any]) -> Plain:
    """One sequence of many lengths: whether its cost is linear."""
    rows = []
    for row in bench["lengths"]:
        of_heads = [x for x in bench["lengths"] if x["heads"] == row["heads"]]
        per_token = [
            x["forward_backward_ms_p50"] / x["T"] for x in (row, max(of_heads, key=lambda x: x["T"]))
        ]
        rows.append(
            [
                f"{row['H']} × {row['K']} × {row['V']}",
                row["name"],
                f"{row['T']:,}",
                f"{row['forward_backward_ms_p50']:.3f}",
                f"{1e6 * per_token[0]:.1f}",
                f"{per_token[0] / per_token[1]:.2f}",
            ]
        )
    head = ["H × K × V", "version", "tokens", "forward + backward ms", "ns a token", "to the longest"]
    return Plain(f"One sequence on {bench['device']}, as a CUDA graph", head, rows, words=2)


def card_errors(bench: dict[str, Any], only: list[str] | None = None) -> Plain | None:
    """What a bench record says of its versions' errors on its card, in its type; None if it says nothing."""
    rows = []
    for line in bench.get("errors", []):
        if only is not None and line["name"] not in only:
            continue
        found = {key: line[key] for key in line if key not in ("name", "heads", "right")}
        largest = []
        for gradient in (False, True):
            values = [value for key, value in found.items() if key.startswith("d") is gradient]
            largest.append(error(None if None in values else max(values, default=None)))
        rows.append([line["name"], line["heads"], *largest, "right" if line["right"] else "refused"])
    if not rows:
        return None
    dtype = next((row["dtype"] for row in bench["results"] if "dtype" in row), "bfloat16")
    head = ["version", "heads of", "outputs", "gradients", "verdict"]
    return Plain(f"Errors on {bench['device']} ({dtype})", head, rows, words=2)


def registered(accuracy: dict[str, Any], only: list[str] | None = None) -> Plain:
    """What the registry says of each version."""
    rows = [
        [v["name"], ", ".join(v["devices"]), "yes" if v["automatic"] else "never", v["note"]]
        for v in accuracy["versions"]
        if only is None or v["name"] in only
    ]
    return Plain("Versions", ["version", "devices", "chosen by itself", "note"], rows, words=4)


def error(value: float | None) -> str:
    """A relative error: two digits are more than it means."""
    if value is None:
        return "not finite"
    return "wrong: 0 expected" if value > 1e30 else f"{value:.0e}".replace("e-0", "e−").replace("e+0", "e+")
