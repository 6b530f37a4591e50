"""The versions of the momentum delta rule in pictures: errors over ranges of gates, and time on a GPU."""

from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mdn.reports.figures.style import Drawing, look, written

COLOURS = ("#7f7f7f", "#cc79a7", "#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9")
GREYS = ("#9a9a9a", "#c4c4c4", "#6b6b6b")  # of other operators
MARKERS = "osD^vPX"
NAMED = {
    "typical": "typical",
    "wide": "wide",
    "no mu bound": "no μ bound: {}",
    "alpha_max=1": "α_max = 1: {}",
}
TOP = 1e11  # where "not finite" and anything beyond is drawn


def colour(names: list[str], name: str) -> str:
    """Of a version, by its age among all there are."""
    return COLOURS[names.index(name) % len(COLOURS)]


def errors(record: dict[str, Any]) -> Drawing:
    """Largest relative error of outputs and of gradients, a line for each range of gates. record: of
    `mdn_kernels.accuracy`."""
    rows, names = record["rows"], [version["name"] for version in record["versions"]]
    gates = list(dict.fromkeys(row["gates"] for row in rows))
    shown = list(dict.fromkeys(row["version"] for row in rows))
    with look():
        figure = Figure(figsize=(8.4, 0.26 * len(gates) + 1.5), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, what in zip(panels, ("outputs", "gradients"), strict=True):
            for n, name in enumerate(shown):
                of = [row for row in rows if row["version"] == name]
                at = [gates.index(row["gates"]) for row in of]
                values = [min(row[what] or TOP, TOP) for row in of]
                panel.plot(
                    values, at, MARKERS[names.index(name) % len(MARKERS)],
                    color=colour(names, name), label=name, markersize=5, zorder=3 - 0.1 * n, clip_on=False,
                )  # fmt: skip
            panel.axvline(1, color="#888888", linewidth=0.8, linestyle=(0, (2, 2)))
            panel.set(xscale="log", xlim=(2e-8, TOP), title=f"Relative error of {what} (float32)")
            panel.set_xticks([*(10.0**n for n in range(-7, 9, 2)), TOP])
            labels = [f"1e{n}".replace("-", "−") for n in range(-7, 9, 2)]
            panel.set_xticklabels([*labels, "not finite"], fontsize=7)
            panel.minorticks_off()
        told = {row["gates"]: row["ranges"] for row in rows}
        panels[0].set_yticks(range(len(gates)), [NAMED.get(key, "{}").format(told[key]) for key in gates])
        panels[0].invert_yaxis()
        handles = [
            Line2D([], [], linestyle="none", marker=MARKERS[names.index(name) % len(MARKERS)],
                   color=colour(names, name), label=name)
            for name in shown
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        return written(
            figure,
            "errors",
            "",
            "Errors against the float64 recurrence; beyond the dotted line nothing is right",
        )


def speed(record: dict[str, Any], names: list[str]) -> Drawing | None:
    """Forward and backward, a panel for each size of the heads. record: of `mdn_kernels.bench`; names: all
    versions, oldest first."""
    rows = [row for row in record["results"] if row.get("forward_backward_ms_p50")]
    if not rows:
        return None
    heads = list(dict.fromkeys(row["heads"] for row in rows))
    shown = list(dict.fromkeys(row["name"] for row in rows))
    colours = dict(zip([name for name in shown if name not in names], cycle(GREYS), strict=False))
    colours |= {name: colour(names, name) for name in shown if name in names}
    with look():
        figure = Figure(figsize=(8.4, 2.9), layout="constrained")
        panels = figure.subplots(1, len(heads), squeeze=False)[0]
        for panel, size in zip(panels, heads, strict=True):
            of = [row for row in rows if row["heads"] == size]
            shapes = list(dict.fromkeys(f"{row['B']}×{row['T']}" for row in of))
            wide = 0.8 / len(shown)
            for n, name in enumerate(shown):
                own = [row for row in of if row["name"] == name]
                at = [
                    shapes.index(f"{row['B']}×{row['T']}") + (n - (len(shown) - 1) / 2) * wide for row in own
                ]
                values = [row["forward_backward_ms_p50"] for row in own]
                if values:
                    panel.bar(at, values, 0.92 * wide, color=colours[name], label=name)
            panel.set_xticks(range(len(shapes)), shapes)
            size_text = "{H} heads of {K} × {V}".format(**of[0])
            panel.set(title=f"Forward and backward, ms ({size}: {size_text})", xlabel="batch × tokens")
            panel.grid(visible=False, axis="x")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return written(
            figure,
            f"speed-{Path(record['file']).stem}",
            "",
            f"Training step of the operator on {record['device']}",
        )
