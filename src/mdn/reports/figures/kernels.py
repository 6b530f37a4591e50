"""The versions of the momentum delta rule in pictures: errors over ranges of gates, and time on a GPU."""

from pathlib import Path
from typing import Any

from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from mdn.reports.figures.style import COLOURS as MODELS
from mdn.reports.figures.style import Drawing, look, written

# Of the versions by age, none of them the colour of another model; the fastest has MDN's.
COLOURS = ("#9a8c80", "#0072b2", "#8a3d00", "#f0a868", MODELS["mdn"], "#b5713f", "#c9b000")
OTHERS = {
    "gated_delta_rule": "gdn",
    "comba": "comba",
    "kda": "kda",
    "ssd": "mamba2",
}  # operators, their models
MARKERS = "osD^vPX"
NAMED = {
    "typical": "typical",
    "wide": "wide",
    "no mu bound": "no μ bound: {}",
    "alpha_max=1": "α_max = 1: {}",
}
TOP = 1e11  # where "not finite" and anything beyond is drawn


def colour(names: list[str], name: str) -> str:
    """Of a version by its age, of another operator its model's, pale if it is FLA's; of any other grey."""
    if name in names:
        return COLOURS[names.index(name) % len(COLOURS)]
    library, _, operator = name.rpartition(".")
    red, green, blue = to_rgb(MODELS.get(OTHERS.get(operator, ""), "#7f7f7f"))
    return to_hex(
        ((1 + red) / 2, (1 + green) / 2, (1 + blue) / 2) if library == "fla" else (red, green, blue)
    )


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
                    panel.bar(at, values, 0.92 * wide, color=colour(names, name), label=name)
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
