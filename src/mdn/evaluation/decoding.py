"""Greedy decoding of many prompts together, without padding.

A recurrent state cannot mask what it has read, so padding would change it. The prompts of a group therefore
advance in lockstep from their first token: the length they share is prefilled, and from there each prompt
reads its own remaining tokens while shorter ones already write. Every state sees exactly its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mdn.data.gpt2 import EOT
from mdn.evaluation.scoring import Progress, precision, quiet
from mdn.models.decoder import Decoder

if TYPE_CHECKING:
    from mdn.mixers import State
    from mdn.models.lm import LanguageModel

SPREAD = 64  # largest difference of lengths in a group: so many prompt tokens are read one at a time
STATE = 1024  # tokens whose keys and values take more memory than a recurrent state, in the paper's models

Finished = Callable[[int, list[int]], bool]  # (number of the prompt, tokens written): stop here?
Stop = Callable[[int, str], bool]  # (number of the prompt, text written): stop here?


def write(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop: Stop,
    *,
    batch_tokens: int,
    progress: Progress = quiet,
) -> list[str]:
    """The text that greedy decoding writes after each prompt: up to end-of-text, which is left out, to
    `limits[n]` tokens, or until `stop`, asked after every token; what made it stop is part of the text.

    Args:
        prompts, batch_tokens: as in `decode`.
    """

    def finished(number: int, written: list[int]) -> bool:
        if len(written) >= limits[number] or written[-1] == EOT:
            return True
        return stop(number, tokenizer.decode(written))

    outputs = decode(model, prompts, finished, batch_tokens=batch_tokens, progress=progress)
    return [tokenizer.decode([token for token in written if token != EOT]) for written in outputs]


@torch.inference_mode()
def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    finished: Finished,
    *,
    batch_tokens: int,
    progress: Progress = quiet,
) -> list[list[int]]:
    """The tokens that greedy decoding writes after each prompt until `finished`, asked after every token.

    Args:
        prompts: token ids, at least one each.
        batch_tokens: most tokens of a prefill pass, and most tokens whose keys and values a group keeps. A
            model without attention keeps none: its prompts count as STATE tokens each, however long.

    Raises:
        FloatingPointError: if the model gives logits that are not finite.
    """
    grows = any(part.numel() == 0 for state in model.init_states(1) for part in state.values())
    outputs: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda n: -len(prompts[n]))
    start = 0
    progress(start, len(order))
    while start < len(order):
        longest = len(prompts[order[start]])
        kept = longest if grows else min(longest, STATE)
        most = order[start : start + max(1, batch_tokens // kept)]
        group = [n for n in most if longest - len(prompts[n]) <= SPREAD]
        _decode_group(model, prompts, group, outputs, finished, batch_tokens)
        start += len(group)
        progress(start, len(order))
    return outputs


def _decode_group(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    group: Sequence[int],
    outputs: list[list[int]],
    finished: Finished,
    batch_tokens: int,
) -> None:
    device = next(model.parameters()).device
    read = min(len(prompts[n]) for n in group)  # tokens that every state has seen
    states: list[State] | None = model.init_states(len(group), device=device)
    shared_BT = torch.tensor([list(prompts[n][:read]) for n in group], device=device)
    with precision(device):
        for ids_BT in shared_BT.split(max(1, batch_tokens // len(group)), dim=1):
            h_BTD, states = model.hidden(ids_BT, states)
        assert states is not None
        decoder = Decoder(model, states)
        del states  # else keys and values would be kept twice
        going = set(group)
        while going:
            next_B = _greedy(model, h_BTD)
            for row, n in enumerate(group):
                if read < len(prompts[n]):
                    next_B[row] = prompts[n][read]
                elif n in going:
                    outputs[n].append(next_B[row])
                    if finished(n, outputs[n]):
                        going.remove(n)
            read += 1
            if going:
                h_BTD = decoder(torch.tensor(next_B, device=device)[:, None])


def _greedy(model: LanguageModel, h_BTD: Tensor) -> list[int]:
    logit_B, token_B = model.logits(h_BTD[:, -1]).max(-1)
    if not logit_B.isfinite().all():  # a NaN is the largest
        raise FloatingPointError("the model gives logits that are not finite")
    return token_B.tolist()
