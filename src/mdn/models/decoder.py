"""Token by token from given states; on a GPU each token is one CUDA graph, so no layer waits for the host.

B batch · D model width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mdn.mixers import State
from mdn_kernels import overwriting_states

if TYPE_CHECKING:
    from mdn.models.lm import LanguageModel


class Decoder:
    """Reads one token of each sequence a call and gives the hidden states after it, [B, 1, D].

    On a GPU the first token is computed as always, which compiles and loads what there is; from the second on
    a captured graph runs, on states that stay where they are. Models whose states grow (attention) have no
    such graph. Use one decoder without autograd and within one autocast region, whose casts of the weights
    the graph goes on reading; what a call returned is overwritten by the next.
    """

    def __init__(self, model: LanguageModel, states: Sequence[State]):
        self.model, self.states = model, list(states)
        self.fixed = False  # do the states keep their sizes?
        self.graph: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None  # with its input and output

    def __call__(self, ids_B1: Tensor) -> Tensor:
        if self.graph is None and self.fixed and ids_B1.is_cuda:
            self.graph = self.capture(ids_B1)
        if self.graph is None:
            return self.anew(ids_B1)
        graph, input_B1, hidden_B1D = self.graph
        input_B1.copy_(ids_B1)
        graph.replay()
        return hidden_B1D

    def capture(self, ids_B1: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        graph, input_B1 = torch.cuda.CUDAGraph(), ids_B1.clone()
        with torch.cuda.graph(graph):
            hidden_B1D = self.in_place(input_B1)
        return graph, input_B1, hidden_B1D

    def anew(self, ids_B1: Tensor) -> Tensor:
        """One token, its states in new tensors."""
        hidden_B1D, states = self.model.hidden(ids_B1, self.states)
        assert states is not None
        self.fixed = _shapes(states) == _shapes(self.states)
        self.states = states
        return hidden_B1D

    def in_place(self, ids_B1: Tensor) -> Tensor:
        """One token, its states where the ones before were."""
        with overwriting_states():
            hidden_B1D, states = self.model.hidden(ids_B1, self.states)
        assert states is not None
        for mine, new in zip(self.states, states, strict=True):
            for name, x in new.items():
                if x.data_ptr() != mine[name].data_ptr():
                    mine[name].copy_(x)
        return hidden_B1D


def _shapes(states: Sequence[State]) -> list[dict[str, torch.Size]]:
    return [{name: x.shape for name, x in state.items()} for state in states]
