"""One training from configuration to record: adopt, resume or begin; train; write the results."""

import csv
import logging
import sys
import warnings
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from mdn.config import ConfigError, Machine, RunConfig
from mdn.data.shards import read_index
from mdn.files import locked, replacing
from mdn.models.lm import LanguageModel, build
from mdn.tracking.manifest import code_digest, environment, file_digest
from mdn.tracking.mlflow import Mirror
from mdn.tracking.record import LOCK, Record, forced, identity, open_record, write_json
from mdn.training import checkpoint, launch
from mdn.training.callbacks import WARM_UP, Bar, Checkpointer, Recorder
from mdn.training.datamodule import TokenData
from mdn.training.launch import Stopped, StopRequest
from mdn.training.lit import Diverged, LitLanguageModel
from mdn.training.sharded import WHOLE, Sharded
from mdn_kernels.registry import loaded

PART = ("started", "commit", "dirty", "code", "kernels", "host", "gpu", "ranks")  # may change at a resume
CURVE_POINTS = 1000  # rows of curve.csv, whatever the number of steps


def train(
    run: RunConfig,
    machine: Machine,
    *,
    runs: Path,
    tokens: Path,
    uri: str | None,
    stop: StopRequest | None = None,
) -> Record:
    """Trains one cell and returns its record. Every rank calls it, after `launch.enter`.

    runs, tokens: the folders runs/ and data/tokens/. uri: MLflow's store, or None.

    A training that diverges is a result: it ends with failed.json and its last finite weights. Anything else
    that goes wrong is raised, after failed.json has been written; the next call resumes.

    Raises:
        Stopped: after `stop` was requested and the step at hand saved.
        Busy: on the leader, before anything is written, if another process trains this run.
    """
    with launch.group(), ExitStack() as held:
        lock = locked(runs / run.scale / run.name / LOCK, wait=False)
        launch.share(lambda: held.enter_context(lock))
        return _train(run, machine, runs, tokens, uri, stop or StopRequest())


def _train(
    run: RunConfig, machine: Machine, runs: Path, tokens: Path, uri: str | None, stop: StopRequest
) -> Record:
    quiet()
    index = read_index(tokens / run.data)
    data = TokenData(run, machine, tokens)
    data.check()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    L.seed_everything(run.seed, verbose=False)
    model = build(run, device)
    rehearse(model, run, machine, device)
    record = Record(runs / run.scale / run.name)
    finished, path = launch.share(lambda: _open(record, runs, run, machine, model, index))
    if finished:
        return record
    module = LitLanguageModel(model, run, machine, stop)
    trainer = trainer_for(
        run,
        machine,
        [Recorder(record, run), Checkpointer(record, run, machine), Bar(run.name, run.training.steps)],
    )
    mirror = Mirror(record, uri if launch.leads() else None)
    mirror.start()
    failed = record.folder / "failed.json"
    try:
        try:
            trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
            if not launch.share(lambda: _validated(record, run.training.steps)):
                trainer.validate(module, datamodule=data, verbose=False)
        except Diverged as error:  # on all ranks in the same step
            if launch.leads():
                last = checkpoint.newest(record.checkpoints)
                told = f"{error}; {last[1].name if last else 'none'} is the last checkpoint before them"
                write_json(failed, {"error": told, "step": trainer.global_step})
                print(f"{record.folder}: diverged: {told}")
        weights = get_model_state_dict(model, options=WHOLE)
        if launch.leads():
            _finish(record, module, weights)
    except Exception as error:
        # The first rank to say so is the one that failed; the others fail because it has left, or hang.
        if not failed.exists():
            rank = f"rank {launch.rank()}: " if launch.grouped() else ""
            error_line = rank + " ".join(f"{type(error).__name__}: {error}".split())
            with suppress(OSError):  # the disk may be what failed
                write_json(failed, {"error": error_line, "step": trainer.global_step})
        mirror.stop()
        raise
    except BaseException as error:
        mirror.stop("KILLED")
        if isinstance(error, Stopped):  # all ranks are; srun ends a step whose first rank has left
            if launch.leads():
                saved = trainer.global_step
                print(f"{record.folder}: told to stop; step {saved} is saved, the next start resumes")
            launch.wait()
        raise
    mirror.stop()
    launch.wait()
    return record


def adopted(run: RunConfig, *, runs: Path, tokens: Path) -> bool:
    """Whether the run folder holds this very training, finished, wherever it was trained.

    Unlike `train` it needs neither its devices nor its ranks: it imports the kernels that the manifest names,
    not those that it would choose here.

    Raises:
        ConfigError: if one of them needs a package that is missing here.
    """
    record = Record(runs / run.scale / run.name)
    if not record.finished or not identity(record.folder) or forced():
        return False
    with torch.device("meta"):
        LanguageModel(run)
    for name in record.manifest.get("modules", ()):
        try:
            import_module(name)
        except ImportError as error:
            if error.name == name:
                return False  # the code has changed
            raise ConfigError(
                f"{record.folder}: {name} cannot be loaded here ({error}), so whether its code is "
                "still the same is unknown; install what it was trained with"
            ) from None
    data = read_index(tokens / run.data)["digest"][:12]
    return identity(record.folder) == f"{run.fingerprint()}-{data}-{code_digest()}"


def _open(
    record: Record,
    runs: Path,
    run: RunConfig,
    machine: Machine,
    model: LanguageModel,
    index: dict[str, Any],
) -> tuple[bool, Path | None]:
    """The leader's part before the first step: adopts, resumes or begins the record.

    Returns whether it is finished already, and the checkpoint to resume from.
    """
    code = code_digest()
    _, todo = open_record(runs, run, data=index["digest"][:12], code=code)
    if todo == "finished":
        print(f"{record.folder}: finished with the same configuration, data and code; adopted")
        return True, None
    (record.folder / "failed.json").unlink(missing_ok=True)
    step, path = checkpoint.newest(record.checkpoints) or (0, None)
    record.rewind(step)
    if path:
        print(f"{record.folder}: resuming after step {step} of {run.training.steps}")
    _describe(record, run, machine, model, index, code, step)
    return False, path


def trainer_for(run: RunConfig, machine: Machine, callbacks: list[Callback]) -> L.Trainer:
    """Counts everything in optimizer steps, leaves logs, checkpoints and progress to our callbacks."""
    ranks = machine.devices * machine.nodes
    accumulate = run.training.batch // (machine.micro_batch * ranks)
    strategy: Any = "auto"
    if launch.grouped():
        # Gradients stay in the buckets that are reduced: half the memory for them.
        ddp = DDPStrategy(gradient_as_bucket_view=True)
        strategy = ddp if machine.strategy == "ddp" else Sharded(ranks, weights=machine.strategy == "fsdp")
    trainer = L.Trainer(
        max_steps=run.training.steps,
        max_epochs=-1,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=machine.devices,
        num_nodes=machine.nodes,
        strategy=strategy,
        # Named, lest Lightning look for a launcher itself.
        plugins=[TorchElasticEnvironment() if launch.grouped() else LightningEnvironment(), Straight()],
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        accumulate_grad_batches=accumulate,
        val_check_interval=run.training.validate_every * accumulate,  # Lightning counts micro-batches here
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    # Signals are for StopRequest alone. Lightning's handler ends a training with status 0 and without a
    # checkpoint, and on several ranks every micro-batch would wait for a broadcast of whether it ran.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


class Straight(TorchCheckpointIO):
    """Writes a checkpoint into its file. Lightning's own way holds it in memory twice and leads through /tmp,
    which may be smaller than it and keeps what a kill leaves."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with Path(path).open("wb") as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch says that its archive is not complete, not why
                raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def rehearse(model: LanguageModel, run: RunConfig, machine: Machine, device: torch.device) -> None:
    """The forward pass of a micro-batch: what cannot run fails here, in seconds, and the operators' modules
    are loaded, so that the code digest covers them. No fewer tokens: on its first call a kernel of FLA
    settles on what is fastest for it, once for all lengths."""
    shape = machine.micro_batch, run.training.context
    ids = torch.zeros(shape, dtype=torch.long, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        model.loss(ids, ids)


def _describe(
    record: Record,
    run: RunConfig,
    machine: Machine,
    model: LanguageModel,
    index: dict[str, Any],
    code: str,
    step: int,
) -> None:
    """config.yaml and manifest.json, before the first step after `step`. Its `earlier` says what made the
    steps until there, a part for each start that left any."""
    earlier: list[dict[str, Any]] = []
    if step:
        before = record.manifest
        last = {"until": run.training.steps} | {key: before.get(key) for key in PART}
        for part in (*before.get("earlier", ()), last):
            earlier.append(part | {"until": min(part["until"], step)})
            if part["until"] >= step:
                break
    run.to_yaml(record.folder / "config.yaml")
    write_json(
        record.folder / "manifest.json",
        {
            "fingerprint": run.fingerprint(),
            "data": index["digest"][:12],
            "code": code,
            "tokenizer": index["tokenizer"]["sha256"][:12],
            "kernels": {version.op: version.name for version in loaded()},
            "modules": sorted(name for name in sys.modules if name.startswith("mdn_kernels.")),
            "parameters": sum(p.numel() for p in model.parameters()),
            "ranks": machine.devices * machine.nodes,
            "compile": machine.compile,
            "started": _now(),
            "earlier": earlier,
            **environment(),
        },
    )


def _validated(record: Record, step: int) -> bool:
    return any("validation/loss" in line for line in record.log(first=step))


def _finish(record: Record, module: LitLanguageModel, weights: dict[str, Any]) -> None:
    """Weights, curve, and last of all metrics.json, which marks the record as finished."""
    log = record.log()
    steps = [line for line in log if "train/loss" in line]
    validations = [line for line in log if "validation/loss" in line]
    speeds = [line["train/tokens_per_second"] for line in steps]
    step_tokens = module.run.training.batch_tokens
    losses = [line["train/loss"] for line in steps[-max(1, len(steps) // 10) :]]
    metrics = {
        "steps": len(steps),
        "tokens": len(steps) * step_tokens,
        "skipped_steps": module.skipped,
        "tokens_per_second": median(speeds[WARM_UP:] or speeds),
    }
    waits = [line["train/data_wait"] for line in steps if "train/data_wait" in line]
    if waits:
        metrics["data_wait"] = mean(waits[WARM_UP:] or waits)
    utilisation = [line["train/mfu"] for line in steps if "train/mfu" in line]
    if utilisation:
        metrics["mfu"] = median(utilisation[WARM_UP:] or utilisation)
    if all(isinstance(loss, float) for loss in losses):  # a loss that is not finite is logged as its name
        metrics["train_loss"] = mean(losses)
    if validations and isinstance(validations[-1]["validation/loss"], float):
        metrics["validation_loss"] = validations[-1]["validation/loss"]

    with replacing(record.weights) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary)
    with replacing(record.folder / "curve.csv") as temporary, temporary.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "train_loss"])
        stride = max(1, len(steps) // CURVE_POINTS)
        rows.writerows([line["step"], line["train/loss"]] for line in steps[::stride])
    write_json(
        record.folder / "manifest.json",
        record.manifest
        | {
            "finished": _now(),
            "seconds": round(sum(step_tokens / speed for speed in speeds), 3),
            "tokens_per_second": round(metrics["tokens_per_second"], 1),
            "weights": file_digest(record.weights),
        },
    )
    record.finish(metrics)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def quiet() -> None:
    """Lightning's remarks about loggers, workers and hardware, none of which a user can act on here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
