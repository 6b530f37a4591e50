"""The tables as Markdown, LaTeX (booktabs) and CSV, from the frame of cells."""

import re
import unicodedata
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import polars as pl

from mdn.reports.frame import OK
from mdn.reports.layout import Column, Table

CSV_FIELDS = ("value", "stderr", "n", "published", "gap", "status")


def number(value: float) -> str:
    """Two decimals, halves away from zero as on paper: 0.125 is 0.13. What two decimals would turn into zero
    keeps two significant digits, thousands are whole numbers, and millions become powers of ten."""
    exact = Decimal(repr(value))
    if abs(exact) >= 10**6:
        mantissa, exponent = f"{exact:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if exact and abs(exact) < Decimal("0.005"):
        return f"{exact:.1e}"
    return str(exact.quantize(Decimal(1 if abs(exact) >= 1000 else "0.01"), ROUND_HALF_UP))


def fixed(value: float, places: int) -> str:
    """So many decimals, halves away from zero; from a million on as `number`."""
    exact = Decimal(repr(value))
    return (
        number(value)
        if abs(exact) >= 10**6
        else str(exact.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))
    )


def error(stderr: float, value: float) -> str:
    """The standard error of a value, to the digits in which `number` writes the value."""
    return fixed(stderr, 0) if abs(value) >= 1000 and stderr >= 10 else number(stderr)


def signed(value: float) -> str:
    """A difference with its sign; the minus is the typographic one."""
    text = number(value)
    return "−" + text[1:] if text.startswith("-") else f"+{text}"


@dataclass(frozen=True)
class Cell:
    """One cell, formatted. `row` is its line of the frame."""

    row: dict[str, Any]
    best: bool

    @property
    def ok(self) -> bool:
        return self.row["status"] == OK

    @property
    def value(self) -> str:
        """The number, or in its place the status; † marks a remark."""
        if not self.ok:
            return self.row["status"]
        return number(self.row["value"]) + ("†" if self.row["note"] else "")

    @property
    def stderr(self) -> str:
        if not self.ok or self.row["stderr"] is None:
            return ""
        return "± " + error(self.row["stderr"], self.row["value"])

    @property
    def n(self) -> str:
        return f"n = {self.row['n']}" if self.ok and self.row["n"] is not None else ""

    @property
    def published(self) -> str:
        number_there = self.row["published"]
        return number(number_there) if number_there is not None else self.row["published_text"] or ""

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, exactly."""
        if not self.ok or self.row["published"] is None:
            return None
        return float(Decimal(repr(self.row["value"])) - Decimal(repr(self.row["published"])))

    @property
    def gap(self) -> str:
        return signed(self.difference) if self.difference is not None else ""


@dataclass(frozen=True)
class Grid:
    """One table at one scale, formatted."""

    table: Table
    scale: str
    scale_title: str
    comparable: bool  # may these numbers be set beside the paper's?
    rows: list[tuple[str, list[Cell]]]  # title, cells in the order of table.columns

    @property
    def name(self) -> str:
        return f"{self.table.key}-{self.scale}"

    @property
    def title(self) -> str:
        return f"{self.table.title} ({self.scale_title} scale)"

    def common_n(self, position: int) -> int | None:
        """The number of items of a column if all its values share it."""
        found = {cells[position].row["n"] for _, cells in self.rows if cells[position].ok}
        return found.pop() if len(found) == 1 else None

    def notes(self) -> list[str]:
        """Why cells are empty and what to know about the others, said once for all cells it is true of."""
        told: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for title, cells in self.rows:
            for column, cell in zip(self.table.columns, cells, strict=True):
                if cell.row["note"]:
                    mark = "†" if cell.ok else cell.row["status"]
                    told.setdefault((mark, cell.row["note"]), []).append((title, column.title))
        lines = []
        for (mark, note), where in told.items():
            rows = list(dict.fromkeys(row for row, _ in where))
            columns = list(dict.fromkeys(column for _, column in where))
            place = [] if len(rows) == len(self.rows) else [", ".join(rows)]
            if len(columns) < len(self.table.columns) and len(rows) * len(columns) == len(where):
                place += [", ".join(columns)] if len(columns) < 6 or not place else []
            lines.append(f"{mark} ({'; '.join(place) or 'everywhere'}): {note}")
        lines += [f"{column.title}: {column.note}" for column in self.table.columns if column.note]
        sources = [cell.row["published_source"] for _, cells in self.rows for cell in cells if cell.published]
        lines += [f"paper: {'; '.join(dict.fromkeys(sources))}"] if sources else []
        lines += self.windows()
        most = ", ".join(map(str, self.limits()))
        return (
            [*lines, f"n: items evaluated, at most {most} a task (of our own texts: tokens)"]
            if most
            else lines
        )

    def windows(self) -> list[str]:
        """The windows that values were made in, and of which columns prompts were cut to fit."""
        within: dict[int, list[str]] = {}
        cut = []
        for position, column in enumerate(self.table.columns):
            there = [cells[position].row for _, cells in self.rows if cells[position].ok]
            for window in sorted({row["window"] for row in there} - {None}):
                within.setdefault(window, []).append(column.title)
            counts = {f"{row['truncated']} of {row['n']}" for row in there if row["truncated"]}
            if counts:
                cut.append(f"{column.title} {', '.join(sorted(counts))}")
        lines = []
        if within:
            shares = [
                f"{size} ({', '.join(names)})" if len(within) > 1 else f"{size}"
                for size, names in within.items()
            ]
            lines.append(f"window, tokens: {'; '.join(shares)}")
        return [*lines, f"cut to fit into it: {'; '.join(cut)}"] if cut else lines

    def limits(self) -> list[int]:
        """Limits on the items of a task that any value was made under."""
        found = {
            cell.row["limit"]
            for _, cells in self.rows
            for cell in cells
            if cell.ok and not cell.row["column"].startswith("heldout_")  # those count tokens
        }
        return sorted(found - {None})

    def legend(self) -> str:
        return "Best of ours in bold; ± is one standard error; accuracies in per cent. " + (
            "Gap: ours minus the paper's."
            if self.comparable
            else f"Not comparable with the paper: {self.scale_title} is not one of its scales."
        )


def grids(frame: pl.DataFrame, layout: dict[str, list[Table]], scales: dict[str, Any]) -> list[Grid]:
    """The tables of every scale, in order. scales: `Params.scales`."""
    found = []
    for scale, tables in layout.items():
        for table in tables:
            part = frame.filter((pl.col("table") == table.key) & (pl.col("scale") == scale))
            at = {(line["row"], line["column"]): line for line in part.to_dicts()}
            best = {
                column.key: best_of(column, [at[row, column.key] for row in table.rows])
                for column in table.columns
            }
            rows = [
                (
                    at[row, table.columns[0].key]["title"],
                    [
                        Cell(line := at[row, column.key], printed(line) == best[column.key] is not None)
                        for column in table.columns
                    ],
                )
                for row in table.rows
            ]
            found.append(Grid(table, scale, scales[scale].title, scales[scale].paper, rows))
    return found


def printed(line: dict[str, Any]) -> str | None:
    return number(line["value"]) if line["status"] == OK else None


def best_of(column: Column, lines: list[dict[str, Any]]) -> str | None:
    """The best value as it is printed, so that what looks equal is treated so; None if all look equal."""
    values = [line["value"] for line in lines if line["status"] == OK]
    if len({number(value) for value in values}) < 2:
        return None
    return number(min(values) if column.lower_is_better else max(values))


def markdown(grid: Grid) -> str:
    """The table with ours, the paper's and the gap as lines below each other."""
    heads = []
    for position, column in enumerate(grid.table.columns):
        n = grid.common_n(position)
        heads.append(f"{column.title} {column.arrow}" + (f" (n = {n})" if n else ""))
    lines = [
        f"# {grid.title}",
        "",
        markdown_line(["", *heads]),
        markdown_line(["---"] + ["---:"] * len(heads)),
    ]
    for title, cells in grid.rows:
        ours = []
        for position, cell in enumerate(cells):
            value = f"**{cell.value}**" if cell.best else cell.value
            items = f"({cell.n})" if cell.n and not grid.common_n(position) else ""
            ours.append(" ".join(part for part in (value, cell.stderr, items) if part))
        lines.append(markdown_line([title, *ours]))
        if any(cell.published for cell in cells):
            lines.append(markdown_line([f"{title}, paper", *(cell.published for cell in cells)]))
        if any(cell.gap for cell in cells):
            lines.append(markdown_line([f"{title}, gap", *(cell.gap for cell in cells)]))
    return "\n".join([*lines, "", grid.legend(), "", *markdown_list(grid.notes()), ""])


def markdown_line(cells: list[str]) -> str:
    """A line of a table; neither a bar nor a tag of HTML gets out of its cell."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def markdown_list(texts: list[str]) -> list[str]:
    return ["- " + text.replace("<", "&lt;") for text in texts]


def latex(grid: Grid) -> str:
    """A `table` environment; in plain ASCII, shrunk to the line if wide; needs booktabs and graphicx."""
    columns = grid.table.columns
    wide, heads = len(columns) > 5, []
    for position, column in enumerate(columns):
        words = [*(tex(word) for word in column.title.split()), tex(column.arrow)]
        if n := grid.common_n(position):
            words.append(f"$n={n}$")
        heads.append("\\shortstack{" + " \\\\ ".join(words) + "}")
    lines = [
        "% \\usepackage{booktabs,graphicx}",
        "\\begin{table}[p]",
        "\\centering\\footnotesize\\setlength{\\tabcolsep}{3pt}",
        f"\\caption{{{tex(grid.title)}. {tex(grid.legend())}}}",
        f"\\label{{tab:{re.sub('[^A-Za-z0-9-]', '-', grid.name)}}}",
        "\\resizebox{\\linewidth}{!}{%" if wide else "{%",
        f"\\begin{{tabular}}{{@{{}}l*{{{len(columns)}}}{{r}}@{{}}}}",
        "\\toprule",
        tex_line(["", *heads]),
        "\\midrule",
    ]
    for title, cells in grid.rows:
        values = [f"\\textbf{{{tex(cell.value)}}}" if cell.best else tex(cell.value) for cell in cells]
        lines.append(tex_line([tex(title), *values]))
        if any(cell.stderr for cell in cells):
            lines.append(tex_line(["", *(tex(cell.stderr) for cell in cells)]))
        counts = ["" if grid.common_n(i) else cell.n.replace("n = ", "") for i, cell in enumerate(cells)]
        if any(counts):
            lines.append(tex_line(["\\quad $n$", *counts]))
        said = {cell.row["published_text"] for cell in cells} - {None}
        if said:
            text = f"\\multicolumn{{{len(columns)}}}{{c}}{{{tex('; '.join(sorted(said)))}}}"
            lines.append(tex_line(["\\quad paper", text]))
        elif any(cell.published for cell in cells):
            lines.append(tex_line(["\\quad paper", *(tex(cell.published) for cell in cells)]))
        if any(cell.gap for cell in cells):
            lines.append(tex_line(["\\quad gap", *(tex(cell.gap) for cell in cells)]))
    lines += ["\\bottomrule", "\\end{tabular}}"]
    if grid.notes():
        notes = " \\\\\n".join(tex(note) for note in grid.notes())
        lines += ["", "\\medskip", f"\\parbox{{\\linewidth}}{{\\raggedright {notes}}}"]
    return "\n".join([*lines, "\\end{table}", ""])


def tex_line(cells: list[str]) -> str:
    return " & ".join(cells) + " \\\\"


MATHEMATICS = {
    **{"−": "-", "±": r"\pm", "×": r"\times", "≥": r"\geq", "≤": r"\leq", "√": r"\surd", "∞": r"\infty"},
    **{"↓": r"\downarrow", "↑": r"\uparrow", "†": r"^\dagger", "<": "<", ">": ">", "|": "|"},
    **{"α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "δ": r"\delta", "η": r"\eta", "θ": r"\theta"},
    **{"κ": r"\kappa", "λ": r"\lambda", "μ": r"\mu", "ρ": r"\rho", "σ": r"\sigma", "τ": r"\tau"},
    **{"φ": r"\varphi", "ω": r"\omega", "Γ": r"\Gamma", "Δ": r"\Delta", "Ω": r"\Omega"},
}
SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"–": "--", "…": r"\dots{}", "“": "``", "”": "''", "’": "'"},
    **{character: f"${command}$" for character, command in MATHEMATICS.items()},
}


def tex(text: str) -> str:
    """Plain text as LaTeX source in ASCII: specials escaped, Greek and signs as mathematics."""
    found = []
    for character in unicodedata.normalize("NFC", text):
        if character in SPECIAL:
            found.append(SPECIAL[character])
        elif character.isascii():
            found.append(character)
        else:  # accents fall off; a letter without any ASCII relative becomes a question mark
            plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
            found.append(plain or "?")
    return "".join(found)


def csv(grid: Grid) -> str:
    """One line a row; for each column its value, error, items, published value, gap and status."""
    lines = []
    for name, (title, cells) in zip(grid.table.rows, grid.rows, strict=True):
        line: dict[str, Any] = {"row": name, "title": title}
        for column, cell in zip(grid.table.columns, cells, strict=True):
            told = {**cell.row, "gap": cell.difference}
            line |= {f"{column.key}_{field}": told[field] for field in CSV_FIELDS}
        lines.append(line)
    return pl.DataFrame(lines, infer_schema_length=None).write_csv()
