"""Tables of plain text, for what is not models by evaluation tasks, as Markdown, LaTeX and CSV."""

import re
from dataclasses import dataclass

import polars as pl

from mdn.reports.tables import markdown_line, markdown_list, tex, tex_line


@dataclass(frozen=True)
class Sheet:
    """name: of its files. Best cells are set in bold."""

    name: str
    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str]
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column)
    sortable: bool = True

    @property
    def words(self) -> set[int]:
        """Columns that hold more than numbers."""
        return {m for row in self.rows for m, cell in enumerate(row) if re.search("[A-Za-z]{2}|_", cell)}

    def markdown(self) -> str:
        lines = [markdown_line(self.head), markdown_line(["---"] * len(self.head))]
        for n, row in enumerate(self.rows):
            cells = [f"**{cell}**" if (n, m) in self.best else cell for m, cell in enumerate(row)]
            lines.append(markdown_line(cells))
        return "\n".join([f"# {self.title}", "", *lines, "", *markdown_list(self.notes), ""])

    def latex(self) -> str:
        """A `table` environment, shrunk to the line; needs booktabs and graphicx."""
        rows = []
        for n, row in enumerate(self.rows):
            cells = [tex(cell) for cell in row]
            for m, cell in enumerate(cells):
                if (n, m) in self.best:
                    cells[m] = f"\\textbf{{{cell}}}"
            rows.append(tex_line(cells))
        notes = " \\\\\n".join(tex(note) for note in self.notes)
        return "\n".join(
            [
                "% \\usepackage{booktabs,graphicx}",
                "\\begin{table}[p]",
                "\\centering\\footnotesize\\setlength{\\tabcolsep}{3pt}",
                f"\\caption{{{tex(self.title)}}}",
                f"\\label{{tab:{self.name}}}",
                "\\resizebox{\\linewidth}{!}{%",
                f"\\begin{{tabular}}{{@{{}}*{{{len(self.head)}}}{{l}}@{{}}}}",
                "\\toprule",
                tex_line([tex(cell) for cell in self.head]),
                "\\midrule",
                *rows,
                "\\bottomrule",
                "\\end{tabular}}",
                *(["", "\\medskip", f"\\parbox{{\\linewidth}}{{\\raggedright {notes}}}"] if notes else []),
                "\\end{table}",
                "",
            ]
        )

    def csv(self) -> str:
        columns = [[row[m] for row in self.rows] for m in range(len(self.head))]
        return pl.DataFrame(dict(zip(self.head, columns, strict=True)), strict=False).write_csv()


@dataclass(frozen=True)
class Chapter:
    """An experiment beside the tables of the language models: its figures (those whose scale is `name`) and
    its tables."""

    name: str
    title: str
    text: str
    sheets: list[Sheet]
