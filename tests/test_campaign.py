"""benchmarks/campaign.sh, in a folder of its own: what a machine that is lent for minutes has to leave."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

COMMAND = "import packed; print(packed.WHERE)"
STAGES = """
import sys
sys.modules |= dict.fromkeys(("dvc", "mlflow", "polars", "zstandard"))
from mdn.evaluation.suites import module
from mdn.evaluation.suites.run import run_suite
from mdn.training.train import train
for suite in "niah lm commonsense dynamics retrieval positions".split():
    module(suite)
"""


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the files with an archive as pack.sh makes it, and records of a training."""
    (tmp_path / "packed.py").write_text("WHERE = 'from the archive'\n")
    (tmp_path / "build").mkdir()
    with tarfile.open(tmp_path / "build/site.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "packed.py", "packed.py")
    (tmp_path / "packed.py").unlink()
    for name in (
        "metrics.json",
        "model.safetensors",
        "checkpoints/step-4.ckpt",
        "evaluation/lm.partial/a.json",
    ):
        path = tmp_path / "runs/small/mdn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    shutil.copy(root / "benchmarks/campaign.sh", tmp_path)
    return tmp_path


def campaign(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    arguments = ["./campaign.sh", "out", *command]
    return subprocess.run(arguments, cwd=copy, env=environment, capture_output=True, text=True)


def test_a_command_finds_what_was_packed_and_its_output_is_kept(copy: Path):
    done = campaign(copy, "python3", "-c", COMMAND)
    assert done.stdout == "from the archive\n", done.stderr
    assert done.returncode == 0
    log = (copy / "out/log.txt").read_text().splitlines()
    assert log[1] == "from the archive"
    assert log[2].endswith("status 0")


def test_a_failure_keeps_its_status_and_leaves_the_records_without_weights(copy: Path):
    assert campaign(copy, "bash", "-c", "exit 3").returncode == 3
    with tarfile.open(copy / "out/records.tar.gz") as archive:
        assert [m.name for m in archive if m.isfile()] == ["small/mdn/metrics.json"]
    assert {path.name for path in (copy / "out").iterdir()} == {"log.txt", "records.tar.gz"}


def test_training_and_evaluation_import_no_package_that_is_not_packed():
    done = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
