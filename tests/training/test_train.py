"""One training as the stage runs it: what it leaves, what it resumes, what it refuses to mix."""

import errno
import json
import os
import pickle
import resource
import signal
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from statistics import median

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mdn.config import ConfigError, Machine
from mdn.data import loader
from mdn.data.gpt2 import EOT
from mdn.data.shards import TOKEN, Shard, ShardWriter, read_index, write_index
from mdn.models.cost import flops_per_token
from mdn.tracking.record import LOCK
from mdn.training import callbacks, checkpoint, lit
from mdn.training import train as module
from mdn.training.datamodule import TokenData
from mdn.training.launch import SIGNALS, Stopped, StopRequest
from mdn.training.train import train

MACHINE = Machine(micro_batch=4, checkpoint_every=5)
KERNELS = "mdn_kernels.common.swiglu_triton"


@pytest.fixture
def tokens(tmp_path, count_tokens):
    count_tokens(tmp_path / "tokens" / "smoke")
    return tmp_path / "tokens"


@pytest.fixture
def fit(tmp_path, tokens, tiny_run):
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def call(run=tiny_run, runs="runs", machine=MACHINE):
        stop = StopRequest()
        stop.listen()  # as pipeline/train_model.py does
        return train(run, machine, runs=tmp_path / runs, tokens=tokens, uri=None, stop=stop)

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def losses(record):
    return {line["step"]: line["train/loss"] for line in record.log() if "train/loss" in line}


def stop_after(monkeypatch, step, error):
    """Makes training raise `error` once, at the end of an optimizer step."""
    original = lit.LitLanguageModel.configure_gradient_clipping

    def hook(self, *arguments, **keywords):
        original(self, *arguments, **keywords)
        if self.global_step == step:
            monkeypatch.setattr(lit.LitLanguageModel, "configure_gradient_clipping", original)
            raise error

    monkeypatch.setattr(lit.LitLanguageModel, "configure_gradient_clipping", hook)


def test_a_training_leaves_its_whole_record(fit, tiny_run):
    record = fit()
    assert record.finished
    assert record.config == tiny_run
    assert sorted(losses(record)) == list(range(1, 13))
    assert [line["step"] for line in record.log() if "validation/loss" in line] == [4, 8, 12]
    metrics = record.metrics
    assert metrics["steps"] == 12
    assert metrics["tokens"] == tiny_run.training.tokens
    assert metrics["train_loss"] < losses(record)[1]
    manifest = record.manifest
    assert manifest["kernels"]["momentum_delta_rule"]
    assert manifest["fingerprint"] == tiny_run.fingerprint()
    assert manifest["earlier"] == []
    assert manifest["parameters"] == sum(t.numel() for t in load_file(record.weights).values())
    curve = (record.folder / "curve.csv").read_text().splitlines()
    assert curve[0] == "step,train_loss"
    assert len(curve) == 13


def test_two_interruptions_change_nothing(fit, monkeypatch):
    whole = fit(runs="whole")
    stop_after(monkeypatch, 6, RuntimeError("power cut"))
    with pytest.raises(RuntimeError, match="power cut"):
        fit()
    stop_after(monkeypatch, 8, RuntimeError("again"))
    with pytest.raises(RuntimeError, match="again"):
        fit()
    resumed = fit()
    assert losses(resumed) == losses(whole)
    first, second = load_file(whole.weights), load_file(resumed.weights)
    assert all(torch.equal(first[name], second[name]) for name in first)
    rates = [[line["train/lr"] for line in r.log() if "train/lr" in line] for r in (whole, resumed)]
    assert rates[0] == rates[1]


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_that_would_run_code_is_refused(fit, monkeypatch, tmp_path):
    stop_after(monkeypatch, 7, RuntimeError("power cut"))
    with pytest.raises(RuntimeError, match="power cut"):
        fit()
    folder = tmp_path / "runs" / "smoke" / "mdn" / "checkpoints"
    checkpoint.save(
        folder, 6, lambda path: torch.save({"state_dict": Hostile(tmp_path / "run")}, path), keep=2
    )
    with pytest.raises(pickle.UnpicklingError):
        fit()
    assert not (tmp_path / "run").exists()


def test_a_crash_says_so_and_the_next_start_clears_it(fit, monkeypatch, tmp_path):
    stop_after(monkeypatch, 7, RuntimeError("disk\nfull"))
    with pytest.raises(RuntimeError):
        fit()
    failed = tmp_path / "runs" / "smoke" / "mdn" / "failed.json"
    assert json.loads(failed.read_text()) == {"error": "RuntimeError: disk full", "step": 7}
    assert fit().finished
    assert not failed.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("at", [6, 7])  # the second is a step after which a validation is due
def test_a_signal_saves_the_step_at_hand_and_asks_for_a_restart(fit, monkeypatch, number, at):
    whole = fit(runs="whole")
    original = lit.LitLanguageModel.training_step

    def step(self, batch, index):
        if self.global_step == at:
            signal.raise_signal(number)
        return original(self, batch, index)

    with monkeypatch.context() as patch:
        patch.setattr(lit.LitLanguageModel, "training_step", step)
        with pytest.raises(Stopped) as stopped:
            fit()
    assert stopped.value.code == 75
    record = fit(runs="runs")
    assert record.finished
    assert [(line["step"], loss_of(line)) for line in record.log()] == [
        (line["step"], loss_of(line)) for line in whole.log()
    ]
    first, second = load_file(whole.weights), load_file(record.weights)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("owner", "name", "call", "done"),
    [
        (TokenData, "train_dataloader", 1, False),  # Lightning has begun, no step yet
        (lit.LitLanguageModel, "validation_step", 2, False),
        (checkpoint, "save", 1, False),
        (lit.LitLanguageModel, "validation_step", 10, True),  # of the last validation, after the last step
        (module, "save_file", 1, True),
    ],
)
def test_a_signal_outside_a_step_loses_nothing(fit, monkeypatch, tiny_run, owner, name, call, done):
    run = replace(tiny_run, training=replace(tiny_run.training, validate_every=5, validation_tokens=256))
    whole = fit(run, runs="whole")
    original, calls = getattr(owner, name), []

    def interrupted(*arguments, **keywords):
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, interrupted)
    with nullcontext() if done else pytest.raises(Stopped):
        fit(run)
    record = fit(run)
    assert record.finished
    assert [(line["step"], loss_of(line)) for line in record.log()] == [
        (line["step"], loss_of(line)) for line in whole.log()
    ]


def loss_of(line):
    return line.get("train/loss", line.get("validation/loss"))


def test_the_manifest_says_what_made_each_part(fit, monkeypatch, tmp_path):
    machine = replace(MACHINE, checkpoint_every=3)

    def parts(manifest):
        return [(part["until"], part["code"]) for part in manifest["earlier"]]

    for code, stop in (("a", 4), ("b", 5), ("c", 11)):  # b goes no further than the checkpoint of a
        monkeypatch.setattr(module, "code_digest", lambda code=code: code)
        stop_after(monkeypatch, stop, RuntimeError("power cut"))
        with pytest.raises(RuntimeError, match="power cut"):
            fit(machine=machine)
    folder = tmp_path / "runs" / "smoke" / "mdn"
    (folder / "checkpoints" / "step-00000009.ckpt").write_bytes(b"damaged")
    monkeypatch.setattr(module, "code_digest", lambda: "d")
    stop_after(monkeypatch, 10, RuntimeError("power cut"))
    with pytest.warns(UserWarning, match="step-00000009"), pytest.raises(RuntimeError, match="power cut"):
        fit(machine=machine)
    assert parts(json.loads((folder / "manifest.json").read_text())) == [(3, "a"), (6, "c")]
    monkeypatch.setattr(module, "code_digest", lambda: "e")
    manifest = fit(machine=machine).manifest
    assert parts(manifest) == [(3, "a"), (6, "c"), (9, "d")]
    assert manifest["code"] == "e"


def test_a_moved_checkout_resumes(fit, monkeypatch, tmp_path):
    stop_after(monkeypatch, 7, RuntimeError("power cut"))
    with pytest.raises(RuntimeError, match="power cut"):
        fit()
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    seen = []
    original = lit.LitLanguageModel.training_step

    def step(self, batch, index):
        seen.append(self.global_step)
        return original(self, batch, index)

    monkeypatch.setattr(lit.LitLanguageModel, "training_step", step)
    assert fit(runs="elsewhere").finished
    assert seen[0] == 5


def test_a_finished_run_is_adopted(fit, monkeypatch):
    before = fit().weights.stat().st_mtime_ns
    monkeypatch.setattr(module, "trainer_for", None)  # any training would fail
    assert fit().weights.stat().st_mtime_ns == before


def test_a_machine_without_its_gpu_adopts_a_run_by_kernels_that_only_launches_import(
    fit, tmp_path, tiny_run, tokens, monkeypatch
):
    pytest.importorskip("triton")
    import_module(KERNELS)  # as the first launch on a GPU does
    assert fit().finished
    monkeypatch.delitem(sys.modules, KERNELS)
    assert module.adopted(tiny_run, runs=tmp_path / "runs", tokens=tokens)
    monkeypatch.delitem(sys.modules, KERNELS)

    def gone(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(module, "import_module", gone)  # the code is another by now
    assert not module.adopted(tiny_run, runs=tmp_path / "runs", tokens=tokens)


def test_a_machine_that_lacks_what_the_kernels_need_says_so(fit, tmp_path, tiny_run, tokens, monkeypatch):
    fit()

    def lacking(name):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(module, "import_module", lacking)
    with pytest.raises(ConfigError, match=r"mdn_kernels\S* cannot be loaded here \(No module named 'triton'"):
        module.adopted(tiny_run, runs=tmp_path / "runs", tokens=tokens)


def test_a_changed_configuration_starts_anew_and_going_back_restores(fit, tiny_run, monkeypatch):
    first = losses(fit())
    other = losses(fit(replace(tiny_run, lr=1e-3)))
    assert sorted(other) == sorted(first)
    assert other != first
    monkeypatch.setattr(module, "trainer_for", None)
    assert losses(fit()) == first


def test_micro_batches_change_the_loss_by_rounding_only(fit):
    whole = losses(fit(runs="whole"))
    pieces = losses(fit(runs="pieces", machine=replace(MACHINE, micro_batch=1)))
    assert pieces == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("every", [4, 5])  # 12 steps: the last validation is one of these, or follows them
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (lit.LitLanguageModel, "validation_step", 2),
        (lit.LitLanguageModel, "validation_step", 10),
        (module, "_finish", 1),
    ],
)
def test_no_validation_is_lost_or_repeated_when_a_kill_comes_around_it(
    fit, monkeypatch, tiny_run, every, owner, name, call
):
    run = replace(tiny_run, training=replace(tiny_run.training, validate_every=every, validation_tokens=256))
    machine = replace(MACHINE, checkpoint_every=every if every == 4 else 12)
    whole, original, calls = fit(run, runs="whole", machine=machine), getattr(owner, name), []

    def killed(*arguments, **keywords):
        calls.append(None)
        if len(calls) == call:
            raise RuntimeError("power cut")
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(RuntimeError, match="power cut"):
        fit(run, machine=machine)
    record = fit(run, machine=machine)
    assert [(line["step"], loss_of(line)) for line in record.log()] == [
        (line["step"], loss_of(line)) for line in whole.log()
    ]
    assert record.metrics["validation_loss"] == whole.metrics["validation_loss"]


def test_the_micro_batch_may_change_between_a_kill_and_the_resume(fit, monkeypatch):
    whole = fit(runs="whole")
    for stop, micro in ((6, 2), (10, 4), (None, 1)):
        machine = replace(MACHINE, micro_batch=micro)
        if stop is None:
            record = fit(machine=machine)
            break
        stop_after(monkeypatch, stop, RuntimeError("power cut"))
        with pytest.raises(RuntimeError, match="power cut"):
            fit(machine=machine)
    assert [line["step"] for line in record.log()] == [line["step"] for line in whole.log()]
    assert losses(record) == pytest.approx(losses(whole), rel=1e-5)


def test_validation_counts_optimizer_steps_under_accumulation(fit):
    record = fit(machine=replace(MACHINE, micro_batch=1))
    assert [line["step"] for line in record.log() if "validation/loss" in line] == [4, 8, 12]


@pytest.mark.parametrize("micro", [4, 1])
def test_throughput_is_of_whole_steps_with_their_data_and_without_validation_and_checkpoints(
    fit, monkeypatch, micro, tiny_run
):
    """Each micro-batch takes 1 s and its data 0.5 s; a validation and a checkpoint take minutes."""
    now = 0.0

    def costs(owner, name, seconds):
        original = getattr(owner, name)

        def spend(*arguments, **keywords):
            nonlocal now
            now += seconds
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, spend)

    costs(lit.LitLanguageModel, "training_step", 1)
    costs(lit.LitLanguageModel, "validation_step", 100)
    costs(checkpoint, "save", 300)
    costs(loader.Future, "result", 0.5 * 4 / micro)
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now)
    monkeypatch.setattr(callbacks, "peak_flops", lambda device: 1e9)
    record = fit(machine=replace(MACHINE, micro_batch=micro))
    lines = [line for line in record.log() if "train/loss" in line]
    # Data is read one batch ahead, and right after a pause the step begins with its batch at hand.
    steady = lines[2]
    assert steady["train/tokens_per_second"] == pytest.approx(64 / (1.5 * 4 / micro))
    assert steady["train/data_wait"] == pytest.approx(1 / 3)
    flops = 64 * flops_per_token(tiny_run, 16)
    assert steady["train/mfu"] == pytest.approx(flops / (1.5 * 4 / micro) / 1e9)
    assert record.metrics["mfu"] == median(line["train/mfu"] for line in lines[3:])
    assert min(line["train/tokens_per_second"] for line in lines) > 64 / 100


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Unknown 1", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert callbacks.peak_flops(torch.device("cuda")) == peak
    assert callbacks.peak_flops(torch.device("cpu")) is None


def test_packing_without_an_end_of_text_changes_nothing_and_with_one_something(fit, tiny_run, tokens):
    budget = replace(tiny_run.training, packing=True)
    apart = losses(fit(replace(tiny_run, training=budget), runs="apart"))
    assert apart == pytest.approx(losses(fit()), rel=1e-4)
    shard = tokens / "smoke" / "train-00000.bin"
    text = np.fromfile(shard, dtype=TOKEN)
    text[::7] = EOT
    text.tofile(shard)
    ended = losses(fit(runs="ended"))
    assert losses(fit(replace(tiny_run, training=budget), runs="ended apart")) != pytest.approx(
        ended, rel=1e-4
    )


def test_the_number_of_readers_changes_nothing(fit):
    assert losses(fit(runs="five", machine=replace(MACHINE, readers=5))) == losses(fit())


def test_activation_checkpointing_changes_nothing(fit):
    assert losses(fit(runs="again", machine=replace(MACHINE, activation_checkpointing=True))) == losses(fit())


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_compiled_blocks_train_what_others_do(fit, monkeypatch, again):
    """The graph that is traced, run as it is: what Inductor makes of it would round otherwise."""
    asked = []

    def compiled(function, **options):
        asked.append(function)
        return original(function, backend="aot_eager", **options)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compiled)
    record = fit(runs="compiled", machine=replace(MACHINE, compile=True, activation_checkpointing=again))
    assert len(asked) == 1
    assert record.manifest["compile"]
    assert losses(record) == pytest.approx(losses(fit()), rel=1e-6)


def test_the_first_call_of_all_kernels_is_of_a_micro_batch(fit, monkeypatch):
    sizes, original = [], module.LanguageModel.loss

    def loss(self, ids, *others):
        sizes.append(tuple(ids.shape))
        return original(self, ids, *others)

    monkeypatch.setattr(module.LanguageModel, "loss", loss)
    fit()
    assert sizes[0] == sizes[1]  # the second is the first of the training


def test_steps_that_do_not_end_on_a_validation_are_validated_at_the_end(fit, tiny_run):
    budget = replace(tiny_run.training, validate_every=5)
    record = fit(replace(tiny_run, training=budget))
    assert [line["step"] for line in record.log() if "validation/loss" in line] == [5, 10, 12]
    assert "validation_loss" in record.metrics


@pytest.mark.parametrize(
    "spoil", [lambda loss: loss * float("nan"), lambda loss: loss + float("inf")], ids=["gradient", "loss"]
)
def test_a_step_that_is_not_finite_is_skipped(fit, monkeypatch, spoil):
    original = lit.LitLanguageModel.training_step

    def step(self, batch, index):
        loss = original(self, batch, index)
        if self.global_step not in (3, 4):
            return loss
        self._losses[-1] = spoil(self._losses[-1])
        return spoil(loss)

    monkeypatch.setattr(lit.LitLanguageModel, "training_step", step)
    record = fit()
    assert record.metrics["skipped_steps"] == 2
    assert record.metrics["steps"] == 12
    assert all(torch.isfinite(t).all() for t in load_file(record.weights).values())


def test_divergence_is_a_result_with_its_reason(fit, monkeypatch, tiny_run):
    monkeypatch.setattr(lit, "MAX_SKIPPED", 3)
    original = lit.LitLanguageModel.training_step

    def step(self, batch, index):
        loss = original(self, batch, index)
        return loss * float("nan") if self.global_step >= 5 else loss

    monkeypatch.setattr(lit.LitLanguageModel, "training_step", step)
    record = fit()
    failed = json.loads((record.folder / "failed.json").read_text())
    assert "3 steps in a row, up to step 8" in failed["error"]
    assert failed["error"].endswith("step-00000005.ckpt is the last checkpoint before them")
    assert record.finished
    assert all(torch.isfinite(t).all() for t in load_file(record.weights).values())


def test_a_budget_larger_than_the_text_goes_round_again(fit, tiny_run):
    budget = replace(tiny_run.training, tokens=14 * 256, batch_tokens=256)  # 187 windows, 16 a step
    record = fit(replace(tiny_run, training=budget))
    assert record.metrics["steps"] == 14
    assert record.metrics["validation_loss"] < losses(record)[1] - 1  # counting is easy


def test_a_full_disk_stops_with_its_reason_and_the_next_start_resumes(fit, monkeypatch, tmp_path):
    """The system itself refuses to write on, as on a full disk, in the middle of a checkpoint."""
    whole = losses(fit(runs="whole"))
    save, limits = checkpoint.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(folder, step, *arguments):
        if step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        return save(folder, step, *arguments)

    folder = tmp_path / "runs" / "smoke" / "mdn"
    monkeypatch.setattr(checkpoint, "save", full)
    try:
        with pytest.raises(OSError, match="make room and start again, it resumes from step-00000005"):
            fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "make room and start again" in json.loads((folder / "failed.json").read_text())["error"]
    assert not list(folder.rglob("*.tmp"))
    monkeypatch.setattr(checkpoint, "save", save)
    assert losses(fit()) == whole


def test_a_checkpoint_is_written_where_it_stays(fit, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert len(list(fit().checkpoints.glob("*.ckpt"))) == 2


def test_a_disk_too_full_for_failed_json_still_raises_the_reason(fit, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stop_after(monkeypatch, 7, RuntimeError("the reason"))
    with monkeypatch.context() as patch:
        patch.setattr(
            callbacks.Recorder, "on_train_start", lambda *_: patch.setattr(module, "write_json", full)
        )
        with pytest.raises(RuntimeError, match="the reason"):
            fit()


def test_weights_that_cannot_be_written_leave_nothing_half(fit, monkeypatch, tmp_path):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", full)
        with pytest.raises(OSError, match="No space"):
            fit()
    folder = tmp_path / "runs" / "smoke" / "mdn"
    assert not list(folder.rglob("*.tmp"))
    assert not (folder / "metrics.json").exists()
    assert fit().finished


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_shard_is_named_before_the_record_is_touched(fit, tokens, tmp_path, tiny_run, damage):
    before = fit()
    shard = tokens / "smoke" / "train-00001.bin"
    if damage == "truncated":
        os.truncate(shard, 100)
    else:
        shard.unlink()
    with pytest.raises(
        (ValueError, FileNotFoundError), match=r"train-00001\.bin.*dvc repro -f prepare@smoke"
    ):
        fit(replace(tiny_run, lr=1e-3))
    assert before.finished
    assert before.config == tiny_run


@pytest.mark.slow
def test_a_lost_tracking_server_costs_a_warning(tmp_path, tokens, tiny_run, capfd):
    record = train(tiny_run, MACHINE, runs=tmp_path / "runs", tokens=tokens, uri="http://127.0.0.1:9")
    assert record.finished
    assert "not mirrored to http://127.0.0.1:9" in capfd.readouterr().err


def test_missing_tokens_are_named(fit, tiny_run):
    with pytest.raises(FileNotFoundError, match="prepare@nowhere"):
        fit(replace(tiny_run, data="nowhere"))


def hold_out(folder, *lengths):
    """Gives a set held-out splits of so many tokens in place of its own."""
    splits = {"train": [Shard(**shard) for shard in read_index(folder)["splits"]["train"]["shards"]]}
    for number, length in enumerate(lengths):
        writer = ShardWriter(folder, f"heldout_{number}", 100)
        writer.write(np.zeros(length, dtype=np.uint16))
        splits[f"heldout_{number}"] = writer.close()
    write_index(folder, splits, [])


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([], "no held-out split; give a part a holdout"),
        (
            [40, 16],
            "heldout_1 has 16 tokens, fewer than the 17 of a window .* raise its holdout, or set it to 0",
        ),
    ],
)
def test_a_set_that_cannot_be_validated_on_is_refused_before_any_work(
    fit, tiny_run, tokens, tmp_path, lengths, told
):
    hold_out(tokens / tiny_run.data, *lengths)
    with pytest.raises(ValueError, match=f"{tokens / tiny_run.data}: {told}"):
        fit()
    assert [path.name for path in (tmp_path / "runs" / "smoke" / "mdn").iterdir()] == [LOCK]


def test_a_text_of_less_than_a_step_is_refused_before_any_work(fit, tiny_run, tokens, tmp_path):
    folder = tokens / tiny_run.data
    count = read_index(folder)["splits"]["train"]["tokens"]
    budget = replace(tiny_run.training, batch_tokens=16 * count, tokens=64 * count, warmup_tokens=16 * count)
    told = f"{folder}: train has {count} tokens, .* windows of 16, fewer than the {count} of a step"
    with pytest.raises(ValueError, match=told):
        fit(replace(tiny_run, training=budget))
    assert [path.name for path in (tmp_path / "runs" / "smoke" / "mdn").iterdir()] == [LOCK]


def test_a_held_out_split_of_one_window_is_enough(fit, tiny_run, tokens):
    hold_out(tokens / tiny_run.data, 17)  # a context of 16 and the last label
    assert [line["step"] for line in fit().log() if "validation/loss" in line] == [4, 8, 12]


def test_an_unknown_kernel_stops_before_any_work(fit, tiny_run, tmp_path):
    with pytest.raises(ValueError, match="v9"):
        fit(replace(tiny_run, kernel="v9"))
    assert [path.name for path in (tmp_path / "runs" / "smoke" / "mdn").iterdir()] == [LOCK]
