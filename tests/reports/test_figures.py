import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mdn.config import Params
from mdn.reports.figures import drawings
from mdn.reports.figures.loss import smooth
from mdn.reports.figures.style import line_style, log_scale
from mdn.reports.runs import read_runs


def test_a_model_looks_the_same_in_every_figure_and_differs_from_all_others(params: Params):
    styles = {name: line_style(params, name) for name in params.models}
    assert len(set(styles.values())) == len(styles)
    assert styles["mdn"] == ("#d55e00", (0, ()))
    assert styles["mdn-no-momentum"][0] == styles["gdn"][0] == styles["gdn-h-3to1"][0]


@pytest.mark.parametrize(("half", "expected"), [(1, [1.5, 2.0, 3.0, 3.5]), (9, [2.5] * 4)])
def test_smoothing_is_a_centred_mean_that_shortens_at_the_ends(half, expected):
    assert smooth([1.0, 2.0, 3.0, 4.0], half) == pytest.approx(expected)


def test_a_long_training_does_not_make_a_large_figure(params: Params, runs: Path):
    log = runs / "smoke" / "mdn" / "log.jsonl"
    log.write_text(
        "".join(
            json.dumps({"step": step, "train/loss": 5 + step % 7, "train/lr": 1e-3, "train/grad_norm": 1.0})
            + "\n"
            for step in range(1, 20001)
        )
    )
    for scale, name in [("smoke", name) for name in params.models if name != "mdn"]:
        (runs / scale / name / "log.jsonl").unlink(missing_ok=True)
    drawing = next(d for d in drawings(params, read_runs(params, runs)) if d.name == "loss-smoke")
    assert len(drawing.svg) < 100_000


@pytest.mark.parametrize(
    ("values", "labels"),
    [([0.03, 0.002], ["0.002", "0.005", "0.01", "0.02"]), ([0.01, 150], ["0.01", "0.1", "1", "10", "100"])],
)
def test_labels_of_a_logarithmic_axis_have_room(values, labels):
    panel = Figure().subplots()
    panel.plot(values)
    log_scale(panel)
    low, high = panel.get_ylim()
    shown = [label.get_text() for label in panel.get_yticklabels()]
    at = panel.yaxis.get_major_formatter().format_ticks(panel.get_yticks())
    assert shown == at
    assert [text for text, y in zip(at, panel.get_yticks(), strict=True) if low <= y <= high] == labels


def test_scales_without_a_run_have_no_figure_and_theory_needs_none(params: Params, tmp_path: Path):
    assert [(d.name, d.scale) for d in drawings(params, read_runs(params, tmp_path))] == [
        ("dependency", ""),
        ("spectrum", ""),
    ]


def dynamics(params: Params, runs: Path) -> dict[str, str]:
    """SVG by name, of the figures that suite dynamics feeds."""
    found = [
        d for d in drawings(params, read_runs(params, runs)) if d.scale and not d.name.startswith("loss")
    ]
    return {d.name: d.svg for d in found}


def test_dynamics_are_drawn_where_they_were_followed(params: Params, runs: Path):
    found = dynamics(params, runs)
    names = ("state-change-smoke", "gates-smoke", "state-change-smoke-variants", "gates-smoke-variants")
    assert set(found) == {*names, "spectrum-smoke", "spectrum-smoke-variants"}
    svg = found["state-change-smoke"]
    assert ">MDN<" in svg
    assert ">GDN<" in svg
    assert ">Comba<" not in svg
    assert found["spectrum-smoke"].count(">layer 2<") == 2  # of two systems; the attention layer is left out
    assert ">layer 3<" not in found["spectrum-smoke"]


def test_without_followed_variants_theirs_are_not_drawn(params: Params, runs: Path):
    (runs / "smoke" / "mdn-no-correction" / "evaluation" / "dynamics.samples.jsonl.gz").unlink()
    assert set(dynamics(params, runs)) == {"state-change-smoke", "gates-smoke", "spectrum-smoke"}


def test_dynamics_of_another_training_are_not_drawn(params: Params, runs: Path):
    for name in ("mdn", "gdn", "mdn-no-correction"):
        path = runs / "smoke" / name / "evaluation" / "dynamics.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "fingerprint": "another"}))
    assert dynamics(params, runs) == {}


def test_a_damaged_file_of_samples_is_named(params: Params, runs: Path):
    path = runs / "smoke" / "mdn" / "evaluation" / "dynamics.samples.jsonl.gz"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"mdn/evaluation/dynamics\.samples\.jsonl\.gz: not readable"):
        drawings(params, read_runs(params, runs))


def test_many_layers_and_tokens_do_not_make_large_figures(params: Params, runs: Path, add_dynamics):
    add_dynamics(runs / "smoke" / "mdn", layers=49, tokens=4096)
    found = dynamics(params, runs)
    assert max(map(len, found.values())) < 150_000
    shown = {int(n) for n in re.findall(r">layer (\d+)<", found["spectrum-smoke"])}
    assert {1, 48} <= shown
    assert len(shown) <= 8


def test_every_figure_can_be_read_on_the_page(params: Params, runs: Path):
    drawn = drawings(params, read_runs(params, runs))
    assert drawn
    for drawing in drawn:
        series = [series for panel in drawing.readings.panels for series in panel.series]
        assert any(series.boxes for series in series), drawing.name
        assert {name for series in series for name in series.ids} <= set(
            re.findall(r'<g id="(\w+)"', drawing.svg)
        )
