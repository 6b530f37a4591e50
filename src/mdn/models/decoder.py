"""Token by token from given states; on a GPU each token is one CUDA graph, so no layer waits for the host.

B batch · D model width
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mdn.mixers import Mixer, State
from mdn_kernels import overwriting_states

ROOM = 256  # tokens, for states that grow


class Decodable(Protocol):
    """What a decoder asks of a model (`LanguageModel`)."""

    def hidden(
        self, ids_BT: Tensor, states: Sequence[State] | None = None
    ) -> tuple[Tensor, list[State] | None]: ...

    def mixer(self, layer: int) -> Mixer: ...


class Decoder:
    """Reads one token of each sequence a call and gives the hidden states after it, [B, 1, D].

    On a GPU the states, which the decoder makes its own, stay in one place, and every token is a replay of
    one graph, but for the first, which compiles and loads what there is. States that grow (attention's) get
    room for ROOM tokens at a time, and a new graph with it. Use a decoder without autograd and within one
    autocast region, whose casts of the weights the graph goes on reading; a call overwrites what the one
    before returned.
    """

    def __init__(self, model: Decodable, states: Sequence[State]):
        self.model, self.states = model, list(states)
        self.room = 0.0  # tokens that the states have a place for
        self.graph: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None  # with its input and output

    def __call__(self, ids_B1: Tensor) -> Tensor:
        if not ids_B1.is_cuda:
            return self.anew(ids_B1)
        if self.room == 0:
            return self.in_place(ids_B1)
        if self.graph is None:
            self.graph = self.capture(ids_B1)
        self.room -= 1
        graph, input_B1, hidden_B1D = self.graph
        input_B1.copy_(ids_B1)
        graph.replay()
        return hidden_B1D

    def capture(self, ids_B1: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        graph, input_B1 = torch.cuda.CUDAGraph(), ids_B1.clone()
        with torch.cuda.graph(graph):
            hidden_B1D = self.overwrite(input_B1)
        return graph, input_B1, hidden_B1D

    def anew(self, ids_B1: Tensor) -> Tensor:
        """One token, its states in new tensors."""
        hidden_B1D, states = self.model.hidden(ids_B1, self.states)
        assert states is not None
        self.states = states
        return hidden_B1D

    def in_place(self, ids_B1: Tensor) -> Tensor:
        """One token, its states where the ones before were, after making room if there is none."""
        if self.room == 0:
            self.graph = None
            roomy = [self.model.mixer(n).with_room(state, ROOM) for n, state in enumerate(self.states)]
            fixed = all(new is old for new, old in zip(roomy, self.states, strict=True))
            self.states, self.room = roomy, math.inf if fixed else ROOM
        self.room -= 1
        return self.overwrite(ids_B1)

    def overwrite(self, ids_B1: Tensor) -> Tensor:
        with overwriting_states():
            hidden_B1D, states = self.model.hidden(ids_B1, self.states)
        assert states is not None
        for mine, new in zip(self.states, states, strict=True):
            for name, x in new.items():
                if x.data_ptr() != mine[name].data_ptr():
                    mine[name].copy_(x)
        return hidden_B1D
