"""Small models with the interface of ours, and byte-level tokenizers."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

VOCABULARY, EOT = 50257, 50256


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """Byte-level BPE as GPT-2's, with a few merges. Special tokens, if wanted: end-of-text first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    vocabulary["<|endoftext|>"] = EOT
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", EOT)]
    )
    return tokenizer


class Recurrent(nn.Module):
    """A GRU: like our mixers' its state depends on every token it has read, padding too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def init_states(self, batch: int, device=None, dtype=None) -> list[dict[str, Tensor]]:
        return [{"h": torch.zeros(batch, self.gru.hidden_size, device=device)}]

    def hidden(self, ids_BT: Tensor, states=None, cu_seqlens=None):
        y_BTD, h_1BD = self.gru(self.embedding(ids_BT), states[0]["h"][None] if states else None)
        return y_BTD, [{"h": h_1BD[0]}] if states else None

    def logits(self, h: Tensor) -> Tensor:
        return self.head(h).float()


class Knowing(nn.Module):
    """Is sure of the next token in the texts that it knows, and of "!" (token 0) everywhere else."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.next = {tuple(ids[:stop]): ids[stop] for ids in texts for stop in range(1, len(ids))}
        self.somewhere = nn.Parameter(torch.zeros(()))

    def init_states(self, batch: int, device=None, dtype=None) -> list[dict[str, Tensor]]:
        return [{"read": torch.zeros(batch, 0, dtype=torch.long)}]

    def hidden(self, ids_BT: Tensor, states=None, cu_seqlens=None):
        read = torch.cat([states[0]["read"], ids_BT], dim=1) if states else ids_BT
        first = read.shape[1] - ids_BT.shape[1] + 1
        guesses = [
            [self.next.get(tuple(row[:n]), 0) for n in range(first, len(row) + 1)] for row in read.tolist()
        ]
        return torch.tensor(guesses)[..., None], [{"read": read}] if states else None

    def logits(self, h: Tensor) -> Tensor:
        return torch.zeros(*h.shape[:-1], VOCABULARY).scatter_(-1, h, 30.0)


class Echo(nn.Module):
    """Writes the last token that it has read, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.somewhere = nn.Parameter(torch.zeros(()))

    def init_states(self, batch: int, device=None, dtype=None) -> list[dict[str, Tensor]]:
        return [{}]

    def hidden(self, ids_BT: Tensor, states=None, cu_seqlens=None):
        return ids_BT[..., None], states

    def logits(self, h: Tensor) -> Tensor:
        return torch.zeros(*h.shape[:-1], VOCABULARY).scatter_(-1, h, 1.0)


class Constant(nn.Module):
    """Every token is as likely as any other."""

    def __init__(self, logit: float = 0.0) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(logit))

    def init_states(self, batch: int, device=None, dtype=None) -> list[dict[str, Tensor]]:
        return []

    def hidden(self, ids_BT: Tensor, states=None, cu_seqlens=None):
        return torch.zeros(*ids_BT.shape, 1), None

    def logits(self, h: Tensor) -> Tensor:
        return self.logit.expand(*h.shape[:-1], VOCABULARY)
