"""FSDP2: each rank holds a share of every weight, its gradient and its optimizer state. With strategy: zero2
whole weights stay from their first use in a step to their last.

Checkpoints are the ones that DDP and a single device write (whole tensors, the optimizer's state by number):
the number of ranks and the strategy may change between a kill and the resume.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from mdn.models.lm import LanguageModel

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # collected on the first rank
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def shard(model: LanguageModel, mesh: DeviceMesh, weights: bool) -> None:
    """Spreads the model over the ranks of `mesh`, a block at a time.

    weights: a rank holds one whole block at once, and collects it again for the gradients.
    """
    if isinstance(model, FSDPModule):
        return
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=weights)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")


class Sharded(ModelParallelStrategy):
    """Lightning's strategy for FSDP2 over all ranks, with our form of the optimizer's state."""

    def __init__(self, ranks: int, weights: bool) -> None:
        self.weights = weights
        super().__init__(data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        optimizer = getattr(optimizer, "optimizer", optimizer)
        state: dict[str, Any] = get_optimizer_state_dict(self.model, optimizer, options=WHOLE)
        if not state:  # not the first rank
            return {}
        number = {name: n for n, name in enumerate(_names(self.model, optimizer))}
        groups = [group | {"params": [number[p] for p in group["params"]]} for group in state["param_groups"]]
        return {
            "state": {number[name]: values for name, values in state["state"].items()},
            "param_groups": groups,
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        checkpoint = torch.load(
            Path(checkpoint_path), map_location="cpu", mmap=True, weights_only=weights_only
        )
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=SPREAD)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            names = _names(self.model, optimizer)
            named: dict[str, Any] = {
                "state": {names[n]: values for n, values in state["state"].items()},
                "param_groups": [
                    group | {"params": [names[n] for n in group["params"]]} for group in state["param_groups"]
                ],
            }
            set_optimizer_state_dict(self.model, optimizer, named, options=SPREAD)
        return checkpoint


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters in the order of their numbers."""
    name = {parameter: name for name, parameter in model.named_parameters()}
    return [name[parameter] for group in optimizer.param_groups for parameter in group["params"]]
