import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mdn.config import Params, load
from mdn.reports.render import render

ROOT = Path(__file__).parents[2]
SCRIPT, PARAMS = ROOT / "pipeline" / "render_reports.py", ROOT / "params.yaml"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rendering_again_and_elsewhere_gives_the_same_bytes(params: Params, rendered: Path, tmp_path: Path):
    shutil.copytree(rendered.parent / "runs", tmp_path / "moved" / "runs")
    render(params, tmp_path / "moved" / "runs", tmp_path / "moved" / "reports")
    first, second = contents(rendered), contents(tmp_path / "moved" / "reports")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    assert not any(str(tmp_path).encode() in content for content in second.values())


def test_all_outputs_are_there(rendered: Path):
    found = contents(rendered)
    assert {"index.html", "cells.csv", "figures/loss-smoke.svg", "figures/loss-smoke-variants.png"} <= set(
        found
    )
    tables = {name for name in found if name.startswith("tables/")}
    assert {"tables/table2-smoke.md", "tables/table4-bounds-400m.tex", "tables/table2-1b3.csv"} <= tables
    assert not any(name.endswith(".tmp") for name in found)


def test_the_benchmark_has_a_hundred_runs_of_the_projects_own_models_that_render(tmp_path: Path):
    bench = runpy.run_path(str(ROOT / "benchmarks" / "render.py"))
    params = bench["everywhere"](load(PARAMS), 100)
    cells = [(scale, name) for scale in params.scales for name in params.models]
    assert len(cells) >= 100
    for scale, name in cells:
        params.run(scale, name)  # raises where a shape fits no pattern
    bench["write"](tmp_path / "runs" / "1b3" / "mamba2-h-3to1", params, "1b3", "mamba2-h-3to1", 20)
    assert "1.3B scale" in render(params, tmp_path / "runs", tmp_path / "out").read_text()


def test_tables_of_an_earlier_render_go_and_other_files_stay(params: Params, tmp_path: Path):
    out = tmp_path / "reports"
    (out / "tables").mkdir(parents=True)
    (out / "tables" / "table2-gone.md").write_text("old")
    (out / "kernels.md").write_text("another stage's")
    path = render(params, tmp_path / "runs", out)
    assert path == out / "index.html"
    assert not (out / "tables" / "table2-gone.md").exists()
    assert (out / "kernels.md").exists()


def test_script_renders_without_torch(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('the report needs no torch')")
    command = [sys.executable, str(SCRIPT), "--params", str(PARAMS), "--runs", "runs", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "out/index.html\n"), done.stderr


def test_script_ends_in_one_line_on_a_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = tmp_path / "runs" / "smoke" / "mdn" / "manifest.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["render_reports.py", "--params", str(PARAMS)])
    with pytest.raises(
        SystemExit, match=r"render_reports: runs/smoke/mdn/manifest\.json: a mapping is wanted"
    ) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "\n" not in str(end.value)
    assert not (tmp_path / "reports").exists()


def test_latex_compiles_where_there_is_a_latex(rendered: Path, tmp_path: Path):
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed")
    inputs = "\n".join(f"\\input{{{path}}}" for path in sorted((rendered / "tables").glob("*.tex")))
    (tmp_path / "all.tex").write_text(
        "\\documentclass{article}\\usepackage{amsmath,booktabs,graphicx}\\begin{document}\n"
        + inputs
        + "\n\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "all.pdf").exists()
