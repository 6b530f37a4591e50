"""dvc.yaml names what a stage's result is made by."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

# Imports what the stage's script does, inside its functions too, and all of the packages that dvc.yaml names;
# prints those of our modules that are then there and change results. Of the configuration a stage depends on
# values.
PROGRAM = """
import ast, importlib, sys
from pathlib import Path
import mdn.config
from mdn.tracking.manifest import APART

configuration = set(sys.modules)
script, *folders = map(Path, sys.argv[1:])
for node in ast.walk(ast.parse(script.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module.startswith("mdn."):
        importlib.import_module(node.module)
for path in (path for folder in folders for path in folder.rglob("*.py")):
    importlib.import_module(".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__"))
for name in sorted(set(sys.modules) - configuration):
    if name.startswith(("mdn.", "mdn_kernels")) and not name.startswith(APART):
        print(Path(sys.modules[name].__file__).relative_to(Path.cwd()))
"""


@pytest.mark.parametrize("name", ["prepare", "train-smoke", "evaluate-smoke", "mqar-smoke"])
def test_a_stage_depends_on_every_module_that_its_result_is_made_by(root, name):
    stage = yaml.safe_load((root / "dvc.yaml").read_text())["stages"][name]
    listed = [path for path in stage.get("do", stage)["deps"] if "$" not in path]
    (script,) = (path for path in listed if path.startswith("pipeline/"))
    folders = [path for path in listed if path.startswith("src/") and not path.endswith(".py")]
    command = [sys.executable, "-c", PROGRAM, script, *folders]
    imported = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    assert imported
    missing = [
        path
        for path in imported
        if (root / path).read_text().strip() and not any(Path(path).is_relative_to(given) for given in listed)
    ]
    assert not missing, f"{name}: add to its deps in dvc.yaml: {', '.join(missing)}"


@pytest.mark.parametrize("name", ["hub", "debian"])
def test_a_folder_of_what_was_not_asked_for_says_what_belongs_there(root, tmp_path, name):
    """DVC would warn of an empty one in every stage that depends on it."""
    command = [sys.executable, f"pipeline/fetch_{name}.py", "--raw", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True)
    assert f"data.{name}" in (tmp_path / name / "README").read_text()


def test_a_training_without_its_tokens_is_one_line(root, tmp_path):
    command = [sys.executable, "pipeline/train_model.py", "--scale", "smoke", "--model", "mdn"]
    command += ["--tokens", str(tmp_path / "tokens"), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("smoke/mdn: ")
    assert "prepare@smoke" in last
    assert "Traceback" not in done.stderr
