"""The measurements: each builds a model once and gives samples at one shape after another.

A sample is a dict of numbers: `seconds` (of a training step, of a decoded token, of a prompt), what else the
measurement is about, and on a GPU `peak_gib`, the most memory that tensors took. Untimed calls come first:
they compile, tune and load kernels and take memory.

B sequences · T tokens
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mdn.config import Machine, RunConfig
from mdn.data.loader import training_batches
from mdn.data.shards import ShardWriter, write_index
from mdn.models.decoder import Decoder
from mdn.models.lm import GPT2_VOCABULARY, LanguageModel
from mdn.training.optim import build_optimizer

WARM_UP = 2
TOKENS_A_SAMPLE = 16  # of decoding
GENERATED = 32  # tokens, for the memory of a generation
SECONDS_TOKENWISE = 10.0  # at most, of reading a prompt token by token

Sample = dict[str, float]


class Measurement:
    def __init__(self, run: RunConfig, device: torch.device, vocabulary: int = GPT2_VOCABULARY):
        self.run, self.device = run, device
        torch.manual_seed(run.seed)
        with device:  # initial values are drawn where the model is: they change no time
            self.model = LanguageModel(run, vocabulary)
        self.vocabulary = vocabulary

    def samples(self, B: int, T: int, count: int) -> Iterator[Sample]:
        raise NotImplementedError

    def ids(self, B: int, T: int) -> Tensor:
        return torch.randint(self.vocabulary, (B, T), device=self.device)

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def forget_peak(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> Sample:
        return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if self.device.type == "cuda" else {}


class Train(Measurement):
    """Forward, backward, clipping and optimizer step as the trainer's, on tokens that are on the device."""

    def __init__(self, run: RunConfig, device: torch.device, vocabulary: int = GPT2_VOCABULARY):
        super().__init__(run, device, vocabulary)
        self.optimizer = build_optimizer(self.model, run)

    def step(self, ids_BT: Tensor, labels_BT: Tensor) -> None:
        with self.precision():
            loss = self.model.loss(ids_BT, labels_BT)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack([loss.detach(), norm]).tolist()  # the trainer's log waits here

    def samples(self, B: int, T: int, count: int) -> Iterator[Sample]:
        self.optimizer.zero_grad(set_to_none=True)  # of a step that failed
        self.forget_peak()
        ids_BT, labels_BT = self.ids(B, T), self.ids(B, T)
        for _ in range(WARM_UP):
            self.step(ids_BT, labels_BT)
        for _ in range(count):
            started = self.clock()
            self.step(ids_BT, labels_BT)
            yield {"seconds": self.clock() - started, **self.peak()}


class Compiled(Train):
    """The same with every block through torch.compile; `compile_seconds`: of the first step alone."""

    def samples(self, B: int, T: int, count: int) -> Iterator[Sample]:
        self.step(self.ids(B, T), self.ids(B, T))  # loads the operators: an import cannot be traced
        self.model.compile_blocks()
        started = self.clock()
        self.step(self.ids(B, T), self.ids(B, T))
        compiling = self.clock() - started
        for sample in super().samples(B, T, count):
            yield {**sample, "compile_seconds": compiling - sample["seconds"]}


class Loader(Train):
    """Training from shards on disk through the trainer's own loader; `wait_seconds`: how long a step waits
    for its batch to be on the device."""

    def samples(self, B: int, T: int, count: int) -> Iterator[Sample]:
        budget = replace(self.run.training, context=T, batch_tokens=B * T, tokens=B * T * (count + WARM_UP))
        run = replace(self.run, training=budget, data="random")
        with tempfile.TemporaryDirectory() as folder:
            tokens = Path(folder, run.data)
            tokens.mkdir()
            writer, rng = ShardWriter(tokens, "train", 10**8), np.random.default_rng(run.seed)
            for _ in range(count + WARM_UP + 1):
                writer.write(rng.integers(self.vocabulary, size=B * T).astype(np.uint16))
            write_index(tokens, {"train": writer.close()}, sources=[])
            batches = iter(training_batches(run, Machine(micro_batch=B), tokens))
            for n in range(count + WARM_UP):
                started = self.clock()
                batch = next(batches)
                ids_BT, labels_BT = (
                    batch[name].to(self.device, non_blocking=True) for name in ("ids", "labels")
                )
                waited = self.clock() - started
                self.step(ids_BT, labels_BT)
                if n >= WARM_UP:
                    yield {"seconds": self.clock() - started, "wait_seconds": waited}


class Decode(Measurement):
    """Token after token from the states after T tokens, as `generate` does, on a GPU a CUDA graph a token."""

    def __init__(self, run: RunConfig, device: torch.device, vocabulary: int = GPT2_VOCABULARY):
        super().__init__(run, device, vocabulary)
        self.model.eval()

    @torch.no_grad()
    def samples(self, B: int, T: int, count: int) -> Iterator[Sample]:
        with self.precision():
            hidden_B1D, states = self.model.prefill(self.ids(B, T))
            decoder = Decoder(self.model, states)
            del states
            self.forget_peak()
            token = self.writer(decoder, hidden_B1D)
            for _ in range(WARM_UP + 1):  # the first compiles, the second becomes a graph
                token()
            for _ in range(count):
                started = self.clock()
                for _ in range(TOKENS_A_SAMPLE):
                    token()
                yield {"seconds": (self.clock() - started) / TOKENS_A_SAMPLE, **self.peak()}

    def writer(self, decoder: Decoder, hidden_B1D: Tensor) -> Callable[[], None]:
        """Writes the most likely token after the last one, and reads it."""
        last = [hidden_B1D]

        def token() -> None:
            last[0] = decoder(self.model.logits(last[0][:, -1]).argmax(-1, keepdim=True))

        return token


class Prefill(Decode):
    """A prompt at once and, as long as SECONDS_TOKENWISE, token by token (`token_seconds` each, `tokens_read`
    of them); peak memory: of a generation of GENERATED tokens after it."""

    @torch.no_grad()
    def samples(self, B: int, T: int, count: int) -> Iterator[Sample]:
        ids_BT = self.ids(B, T)
        with self.precision():
            tokenwise = self.token_by_token(ids_BT)
        with self.precision():
            self.model.prefill(ids_BT)
            self.forget_peak()
            self.model.generate(ids_BT, GENERATED)
            peak = self.peak()
            for _ in range(count):
                started = self.clock()
                self.model.prefill(ids_BT)
                yield {"seconds": self.clock() - started, **tokenwise, **peak}

    def token_by_token(self, ids_BT: Tensor) -> Sample:
        decoder = Decoder(self.model, self.model.init_states(len(ids_BT)))
        tokens = ids_BT.split(1, dim=1)
        for ids_B1 in tokens[: WARM_UP + 1]:
            decoder(ids_B1)
        started, read = self.clock(), 0
        for ids_B1 in tokens[WARM_UP + 1 :]:
            decoder(ids_B1)
            read += 1
            if read % TOKENS_A_SAMPLE == 0 and self.clock() - started > SECONDS_TOKENWISE:
                break
        return {"token_seconds": (self.clock() - started) / read, "tokens_read": read}


MEASUREMENTS: dict[str, type[Measurement]] = {
    "train": Train,
    "decode": Decode,
    "prefill": Prefill,
    "loader": Loader,
    "compiled": Compiled,
}
