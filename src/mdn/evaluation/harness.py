"""Our language model as lm-eval sees it: scoring and decoding with token budgets instead of batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from mdn.data.gpt2 import EOT
from mdn.evaluation.decoding import write
from mdn.evaluation.scoring import Progress, quiet, score

if TYPE_CHECKING:
    from mdn.models.lm import LanguageModel

MAX_NEW_TOKENS = 256  # lm-eval's default where a task names none


class Harness(TemplateLM):
    """One task's view of a model; use a fresh one for each task.

    Args:
        window: longest input in tokens. Longer prompts lose their left part; `cut` holds the numbers of the
            requests to which that happened.
        batch_tokens: tokens that a forward pass takes at once. It changes no result.
        prefix: put the end-of-text token in front of every prompt. Rolling likelihoods and empty contexts
            have it in any case.
        progress: called with the requests done and all requests.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        window: int,
        batch_tokens: int,
        prefix: bool = False,
        progress: Progress = quiet,
    ) -> None:
        super().__init__()
        self.model = model
        self.text_tokenizer = tokenizer
        self.window = window
        self.batch_tokens = batch_tokens
        self.prefix = prefix
        self.progress = progress
        self.cut: set[int] = set()

    @property
    def eot_token_id(self) -> int:
        return EOT

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.text_tokenizer.encode(string, add_special_tokens=False).ids
        wanted = self.prefix if add_special_tokens is None else add_special_tokens
        return [EOT, *ids] if wanted else ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        self.cut |= {
            number
            for number, (context, continuation) in enumerate(pairs)
            if len(context) + len(continuation) - 1 > self.window
        }
        return score(
            self.model, pairs, window=self.window, batch_tokens=self.batch_tokens, progress=self.progress
        )

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts in disjoint windows: the first begins with end-of-text, the others
        with the last token of the one before, and the last one is filled up with the text before it."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.window,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                pairs.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            totals[number] += value
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to a stop string, which is left out, end-of-text or `max_gen_toks`.

        Raises:
            ValueError: if a task asks for sampling or for an option that we do not know.
        """
        prompts, limits, stops = [], [], []
        for number, request in enumerate(requests):
            context, options = request.args
            until, limit = _generation(options)
            room = self.window - limit
            if room < 1:
                raise ValueError(
                    f"max_gen_toks: {limit} leaves no room for a prompt in a window of {self.window}; "
                    f"set evaluation.window to more than {limit}"
                )
            ids = self.tok_encode(context) or [EOT]
            if len(ids) > room:
                self.cut.add(number)
            prompts.append(ids[-room:])
            limits.append(limit)
            stops.append(until)

        texts = write(
            self.model,
            self.text_tokenizer,
            prompts,
            limits,
            lambda number, text: any(stop in text for stop in stops[number]),
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )
        for number, until in enumerate(stops):
            for stop in until:
                texts[number] = texts[number].split(stop)[0]
        return texts


def _generation(options: dict[str, Any]) -> tuple[list[str], int]:
    """Stop strings and longest answer of a task's generation options."""
    known = {"until", "max_gen_toks", "do_sample", "temperature"}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"generation option {unknown[0]!r} is unknown; use {', '.join(sorted(known))}")
    if options.get("do_sample") or options.get("temperature"):
        raise ValueError("do_sample: decoding here is greedy; set do_sample: false and temperature: 0")
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    return [stop for stop in stops if stop], int(options.get("max_gen_toks", MAX_NEW_TOKENS))
