"""Fig. 2: where eigenvalues of a token's transition can lie; beyond the paper, where trained models' do."""

from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Circle

from mdn.analysis.spectrum import CELL, least_trace, roots, trace
from mdn.config import Params
from mdn.reports.figures.style import COLOURS, INK, Drawing, line_style, look, margins, written
from mdn.reports.layout import SYSTEMS
from mdn.reports.runs import Run, active

LAYERS = 6  # most columns of a figure; of more layers, some evenly spaced ones are shown
SCANS = ((0.9, 0.95), (0.8, 0.5), (0.5, 0.3))  # (α, μ) of the dotted paths


def drawings(params: Params, runs: dict[tuple[str, str], Run]) -> list[Drawing]:
    """One of theory; at a scale where models have been followed, one of systems and one of variants."""
    found = [_theory()]
    for scale in params.scales:
        layers = {
            name: [row for row in runs[scale, name].samples("dynamics") if "along" in row]
            for name in active(params, runs, scale)
        }
        for suffix, is_system in (("", True), ("-variants", False)):
            rows = {name: own for name, own in layers.items() if own and (name in SYSTEMS) == is_system}
            if rows:
                found.append(_trained(params, scale, suffix, rows))
    return found


def _theory() -> Drawing:
    with look():
        figure = Figure(figsize=(8.4, 3.2))
        gdn, free, bounded = figure.subplots(1, 3, sharey=True)
        margins(figure, left=0.5, right=0.1, bottom=0.45, top=0.3, wspace=0.08)
        _plane(gdn, "GDN: α (1 − β)")
        gdn.set_ylabel("imaginary part")
        gdn.plot([0, 1], [0, 0], color=COLOURS["gdn"], label="GDN", linewidth=4, solid_capstyle="butt")
        _plane(free, "Momentum, β ≤ 1: any μ")
        _region(free, None, False, 0.35)
        _plane(bounded, "MDN, β ≤ 1 − α: log μ ≥ −2, −1 (darker)")
        for log_mu_min, alpha in ((-2.0, 0.3), (-1.0, 0.3)):
            _region(bounded, log_mu_min, True, alpha)
        for panel, most in ((free, lambda alpha: 2.0), (bounded, lambda alpha: 2 * (1 - alpha))):
            for alpha, mu in SCANS:
                pull = np.linspace(0, most(alpha), 15)  # βη
                r = trace(np.array(alpha), pull, np.array(mu), np.array(1.0))
                path = roots(r, np.full_like(pull, alpha * mu)).ravel()
                label = f"α = {alpha}, μ = {mu}"
                panel.plot(path.real, path.imag, ".", color=COLOURS["mdn"], label=label, markersize=3)
        note = (
            "No model is involved. Dots: βη grows from 0 to its bound at fixed α and μ; two real eigenvalues "
            "meet and become a pair of modulus √(αμ). This is about single steps: a product of steps that "
            "are stable each may grow."
        )
        return written(figure, "spectrum", "", "Fig. 2: eigenvalues along the key that the gates allow", note)


def _region(panel: Axes, log_mu_min: float | None, bounded: bool, opacity: float) -> None:
    """Fills where complex pairs can lie, and draws the real ones as a line."""
    modulus = np.linspace(0, 1, 400)
    left = np.maximum(least_trace(modulus, log_mu_min, bounded) / 2, -modulus)
    above = np.sqrt(np.maximum(modulus**2 - left**2, 0))
    angle = np.linspace(np.arctan2(above[-1], left[-1]), 0, 100)
    x, y = np.concatenate([left, np.cos(angle)]), np.concatenate([above, np.sin(angle)])
    colour = COLOURS["mdn"]
    panel.fill(
        np.concatenate([x, x[::-1]]), np.concatenate([y, -y[::-1]]), color=colour, alpha=opacity, linewidth=0
    )
    panel.plot(
        [0 if bounded else -1, 1], [0, 0], color=colour, label="real", linewidth=2, solid_capstyle="butt"
    )


def _plane(panel: Axes, title: str) -> None:
    panel.add_patch(Circle((0, 0), 1, fill=False, edgecolor=INK, linewidth=0.8))
    panel.set(title=title, aspect="equal", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), xlabel="real part")
    panel.set_xticks([-1, 0, 1])
    panel.set_yticks([-1, 0, 1])


def _trained(params: Params, scale: str, suffix: str, rows: dict[str, list[dict]]) -> Drawing:
    columns = min(LAYERS, max(len(layers) for layers in rows.values()))
    with look():
        figure = Figure(figsize=(8.4, 0.6 + 1.4 * len(rows)))
        panels = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey=True)
        margins(figure, left=0.75, right=0.1, bottom=0.35, top=0.25, wspace=0.12, hspace=0.25)
        for row, (name, layers) in zip(panels, rows.items(), strict=True):
            colour = line_style(params, name)[0]
            shown = {round(n * (len(layers) - 1) / max(columns - 1, 1)) for n in range(columns)}
            for panel, layer in zip(row, (layers[n] for n in sorted(shown)), strict=False):
                _layer(panel, layer, colour, params.models[name].title or name)
            for panel in row[len(shown) :]:
                panel.set_axis_off()
            row[0].set_ylabel(fill(params.models[name].title or name, 14))
        title = f"Eigenvalues along the key, at {params.scales[scale].title} scale"
        title += ": variants" if suffix else ""
        note = (
            "Over the tokens of a held-out text and the heads of a layer. Above the axis: complex pairs. "
            "Bars below it: shares of real ones, all together 1 where there are no pairs."
        )
        return written(figure, f"spectrum-{scale}{suffix}", scale, title, note)


def _layer(panel: Axes, layer: dict, colour: str, model: str) -> None:
    """The upper half of the complex plane, a square a cell, larger where there are more; the shares of real
    eigenvalues as bars that hang from the axis, all of them together at most 1 long."""
    panel.add_patch(Arc((0, 0), 2, 2, theta2=180, edgecolor=INK, linewidth=0.6))
    panel.axhline(0, color=INK, linewidth=0.6)
    real, pairs = layer["along"]["real"], layer["along"]["complex"]
    total = sum(count for *_, count in real) + 2 * sum(count for *_, count in pairs)
    if real:
        x, count = np.transpose(real)
        panel.bar(x, -count / total, CELL, color=colour, label=f"{model}, real", linewidth=0)
    if pairs:
        x, y, count = np.transpose(pairs)
        size = 3 + 9 * count / count.max()
        panel.scatter(x, y, s=size, color=colour, label=f"{model}, pairs", marker="s", linewidth=0)
    panel.set(aspect="equal", xlim=(-1.1, 1.1), ylim=(-1, 1.1), xticks=[-1, 0, 1], yticks=[0, 1])
    panel.set_title(f"layer {layer['layer'] + 1}", fontsize=8)
    panel.grid(False)
