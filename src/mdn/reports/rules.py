"""Table 1: the rule by which each system updates its memory, from mdn.rules and the shapes of params.yaml."""

from dataclasses import dataclass
from functools import cache

from markupsafe import Markup
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from mdn.config import Params
from mdn.pattern import parse
from mdn.reports.departures import quantity
from mdn.reports.layout import SYSTEMS
from mdn.reports.tables import tex
from mdn.rules import RULES, Rule

NAME, TITLE = "table1", "Table 1: update rules"
LEGEND = (
    "Per head, with memory S of K × V, momentum M, H heads, model width d and T tokens read. "
    "Transition: what becomes of the state without an input. Sizes: elements of all layers, for one sequence "
    "of the training context."
)
SIZE = 10  # points of an em


@dataclass(frozen=True)
class Row:
    system: str
    title: str
    rule: Rule
    sizes: list[str]  # by scale, in the order of `scales`


def scales(params: Params) -> list[str]:
    """The paper's scales, whose state sizes the table gives."""
    return [scale for scale, at in params.scales.items() if at.paper]


def rows(params: Params) -> list[Row]:
    found = []
    for system in SYSTEMS:
        if system not in params.models:
            continue
        model = params.models[system]
        rule, sizes = RULES[parse(model.pattern)[0]], []
        for scale in scales(params):
            run = params.run(scale, system)
            layer = rule.state_size(run.d_model, run.shape, run.training.context)
            sizes.append(quantity(run.shape.layers * layer))
        found.append(Row(system, model.title or system, rule, sizes))
    return found


def heads(params: Params) -> list[str]:
    sizes = [f"State, {params.scales[scale].title}" for scale in scales(params)]
    return ["Update", "Gates", "Transition", "State a layer", *sizes]


def markdown(params: Params) -> str:
    """Formulas between $` and `$, which code hosts take for mathematics without touching the backslashes."""

    def formulas(*lines: str) -> str:
        return "<br>".join(f"$`{line}`$" for line in lines)

    lines = [["", *heads(params)], ["---"] * (1 + len(heads(params)))]
    for row in rows(params):
        rule = row.rule
        cells = [
            formulas(*rule.update),
            formulas(rule.gates),
            formulas(*rule.transition),
            formulas(rule.state),
        ]
        lines.append([row.title, *cells, *row.sizes])
    table = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([f"# {TITLE}", "", *table, "", LEGEND, ""])


def latex(params: Params) -> str:
    """A `table` environment, shrunk to the line; needs amsmath, booktabs and graphicx."""

    def formulas(*lines: str) -> str:
        if len(lines) == 1:
            return f"${lines[0]}$"
        return "$\\begin{aligned}[t]" + " \\\\ ".join(f"&{line}" for line in lines) + "\\end{aligned}$"

    body = []
    for row in rows(params):
        rule = row.rule
        cells = [
            formulas(*rule.update),
            formulas(rule.gates),
            formulas(*rule.transition),
            formulas(rule.state),
        ]
        body.append(" & ".join([tex(row.title), *cells, *map(tex, row.sizes)]) + " \\\\")
    return "\n".join(
        [
            "% \\usepackage{amsmath,booktabs,graphicx}",
            "\\begin{table}[p]",
            "\\centering",
            f"\\caption{{{tex(TITLE)}. {tex(LEGEND)}}}",
            f"\\label{{tab:{NAME}}}",
            "\\resizebox{\\linewidth}{!}{%",
            f"\\begin{{tabular}}{{@{{}}lllll{'r' * len(scales(params))}@{{}}}}",
            "\\toprule",
            " & ".join(["", *map(tex, heads(params))]) + " \\\\",
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}}",
            "\\end{table}",
            "",
        ]
    )


@cache
def formula(latex: str) -> Markup:
    """A formula as inline SVG in the colour and size of the text around it."""
    path = TextPath((0, 0), f"${latex}$", prop=FontProperties(math_fontfamily="cm", size=SIZE))
    commands = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}
    drawn = ""
    for points, code in path.iter_segments():
        drawn += commands[code]
        if code != Path.CLOSEPOLY:
            drawn += " ".join(f"{round(float(value), 2):g}" for value in points)
    (left, bottom), (right, top) = path.get_extents().get_points().round(2).tolist()
    width, height = right - left, top - bottom
    box = f"{left:.2f} {-top:.2f} {width:.2f} {height:.2f}"
    size = f"width:{width / SIZE:.3f}em;height:{height / SIZE:.3f}em;vertical-align:{bottom / SIZE:.3f}em"
    return Markup(
        '<svg class="formula" role="img" aria-label="{}" viewBox="{}" style="{}">'
        '<path transform="scale(1,-1)" d="{}"/></svg>'
    ).format(latex, box, size, drawn)
