"""The command `mdn` as a user types it."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from mdn.cli import main
from mdn.models.cost import parameters
from mdn.models.lm import LanguageModel
from mdn.scaling.cells import plan

SHIPPED = ["--params", "params.yaml"]


@pytest.fixture(autouse=True)
def _in_the_root(root, monkeypatch):
    monkeypatch.chdir(root)


def test_check_counts_the_cells(capsys, params):
    assert main(["check", *SHIPPED]) == 0
    assert f"{len(params.runs['smoke'])} models at smoke" in capsys.readouterr().out


def test_a_kernel_that_does_not_exist_is_refused_by_check(capsys, root, tmp_path):
    path = tmp_path / "params.yaml"
    text = (root / "params.yaml").read_text().replace("kernel: auto #", "kernel: v9 #")
    path.write_text(text)
    assert main(["check", "--params", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "models.mdn.kernel: momentum_delta_rule has no version 'v9'; use one of recurrent, " in error


def test_a_mistake_is_one_line_and_status_2(capsys, tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("sed: 42\n")
    assert main(["check", "--params", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "sed: unknown key" in error


@pytest.mark.parametrize("scale", ["smoke", "400m", "1b3"])
def test_plan_prints_the_models_that_a_scale_lists_or_else_those_it_has_shapes_for(capsys, params, scale):
    assert main(["plan", "--scale", scale]) in (0, 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    names = list(params.runs[scale] or params.shapes[scale])
    assert [line.split()[1] for line in lines] == names * 2
    for name, row in zip(names, lines, strict=False):
        assert f"{parameters(params.run(scale, name))['total'] / 1e6:,.1f} M" in row


def test_plan_counts_gpu_hours_and_disk_at_a_given_throughput(capsys, params):
    main(["plan", "--scale", "1b3", "--nodes", "2", "--throughput", "10000"])
    printed = capsys.readouterr().out
    hours = params.scales["1b3"].training.tokens / 10000 / 3600
    assert "2 × 8 GPUs of 79 GiB" in printed
    assert f"{hours:,.0f}" in printed
    assert f"{hours / 16 / 24:,.1f}" in printed
    assert "tokens on disk: 186 GiB" in printed


def test_plan_counts_gpu_hours_at_the_throughput_that_scaling_measured(capsys, params, tmp_path):
    machine = params.scales["1b3"].machine
    made = [
        (cell, 8 * (8000 + n))
        for n, cell in enumerate(plan(params, ["1b3"], ["mdn"], [4, 8]))
        if cell.tokens == "shards" and not cell.machine.compile
    ]
    for cell, speed in made:
        folder = tmp_path / cell.scale / cell.name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"cell": cell.about()}))
        (folder / "metrics.json").write_text(json.dumps({"tokens_per_second": speed}))
    (used,) = (speed / 8 for cell, speed in made if cell.name == "mdn-n8-ddp-b32-shards")
    assert (machine.devices, machine.strategy) == (8, "ddp")
    main(["plan", "--scale", "1b3", "--runs", str(tmp_path)])
    row = [line for line in capsys.readouterr().out.splitlines() if " mdn " in line][1]
    assert f"{params.scales['1b3'].training.tokens / used / 3600:,.0f}" in row


def test_plan_takes_a_measured_step_and_tells_its_memory_beside_the_estimate(capsys, params, tmp_path):
    for campaign, speed in (("2026-11-29-h200", 20000.0), ("2026-11-30-h200", 25000.0)):
        folder = tmp_path / "results" / campaign / "efficiency-1b3" / "mdn"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"gpu": "NVIDIA H200"}')
        figures = {"tokens_per_second": speed, "peak_gib": 61.26, "estimated_gib": 64.0}
        steps = {f"train/4x4096/{name}": value for name, value in figures.items()}
        other = {f"train/8x2048/{name}": 1.0 for name in figures}  # not this scale's context
        (folder / "metrics.json").write_text(json.dumps(steps | other))
    main(["plan", "--scale", "1b3", "--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")])
    printed = capsys.readouterr().out
    hours = params.scales["1b3"].training.tokens / 25000 / 3600
    assert f"{hours:,.0f}" in next(line for line in printed.splitlines() if " mdn " in line and "yes" in line)
    line = "measured: mdn, 4 × 4096 on NVIDIA H200: 25,000 tokens/s, 61.3 GiB (estimated 64.0)"
    assert line in printed


def test_plan_refuses_what_cannot_fit_and_says_what_would(capsys):
    assert main(["plan", "--scale", "1b3", "--memory", "24"]) == 1
    assert "use strategy: zero2" in capsys.readouterr().out
    assert main(["plan", "--scale", "1b3", "--memory", "300"]) == 0
    assert "does not fit" not in capsys.readouterr().out
    assert main(["plan", "--scale", "1b3", "--nodes", "3"]) == 2
    assert "2 × 24 devices does not divide" in capsys.readouterr().err


def test_submit_prints_the_job_array_that_tokenizes_a_set(capsys):
    assert main(["submit", *SHIPPED, "prepare@slimpajama", "--tasks", "64", "--print"]) == 0
    script = capsys.readouterr().out
    assert "\n#SBATCH --array=0-63\n" in script
    command = script.strip().splitlines()[-1]
    assert command.endswith("prepare_data.py slimpajama --params params.yaml --task $SLURM_ARRAY_TASK_ID/64")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["prepare@slimpajama"], "prepare@slimpajama: --tasks is missing; write for example --tasks 64"),
        (
            ["prepare@slim", "--tasks", "2"],
            "prepare@slim: cannot be a job array; write one of prepare@smoke,",
        ),
        (["400m/mdn", "--tasks", "2"], "400m/mdn: cannot be a job array; write one of prepare@smoke,"),
        (["--tasks", "2"], "nothing: cannot be a job array; write one of prepare@smoke,"),
    ],
)
def test_a_job_array_of_anything_else_is_refused(capsys, words, error):
    assert main(["submit", *SHIPPED, *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"mdn: {error}")
    assert told.count("\n") == 1


def test_plan_names_an_unknown_scale(capsys):
    assert main(["plan", "--scale", "7b"]) == 2
    assert "'7b' is unknown; use smoke" in capsys.readouterr().err


@pytest.fixture
def trained(tmp_path, tiny_run):
    folder = tmp_path / "runs" / "smoke" / "mdn"
    folder.mkdir(parents=True)
    tiny_run.to_yaml(folder / "config.yaml")
    torch.manual_seed(0)
    save_file(LanguageModel(tiny_run).state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def characters(monkeypatch):
    """A tokenizer of bytes in place of GPT-2's, which has to be fetched."""

    class Bytes:
        def encode(self, text):
            return type("Encoding", (), {"ids": list(text.encode())})()

        def decode(self, ids):
            return " ".join(map(str, ids))

    monkeypatch.setattr("mdn.data.tokenization.tokenizer", lambda folder: Bytes())


def test_generate_continues_the_prompt_and_repeats_itself(capsys, trained, characters):
    command = ["generate", "--run", str(trained), "--prompt", "ab", "--tokens", "3", "--temperature", "1"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.split()[:2] == ["97", "98"]
    assert len(first.split()) == 5
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert main([*command, "--seed", "1"]) == 0
    assert capsys.readouterr().out != first


def test_generate_from_nothing_starts_at_end_of_text(capsys, trained, characters):
    assert main(["generate", "--run", str(trained), "--prompt", "", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.split()[0] == "50256"


def test_generate_says_what_is_missing(capsys, tmp_path):
    assert main(["generate", "--run", str(tmp_path), "--prompt", "a"]) == 2
    assert "dvc repro" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan --nodes 0", "generate --run x --prompt y --tokens -1"])
def test_a_number_below_one_is_refused(capsys, command):
    with pytest.raises(SystemExit):
        main(command.split())
    assert f"'{command.split()[-1]}' cannot work; use 1 or more" in capsys.readouterr().err


def test_ui_prints_the_exact_command(capsys, root):
    assert main(["ui", "--print"]) == 0
    assert f"--backend-store-uri sqlite:///{root}/mlflow.db" in capsys.readouterr().out


def test_a_checkout_that_is_not_installed_has_the_command_too(root):
    done = subprocess.run([sys.executable, "-m", "mdn", "check"], cwd=root, capture_output=True, text=True)
    assert done.stdout.startswith("params.yaml: in order"), done.stderr
