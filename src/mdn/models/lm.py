"""The language model: embedding, a stack of blocks after a pattern, norm, head.

Notable: pre-norm, RMSNorm, no biases beside KDA's gate and Mamba2's convolution, embedding and head not tied;
one function holds all initial values; vectors take no weight decay; the loss never holds the logits of all
tokens; decoding carries a state a layer, of fixed size unless it is attention.

B batch · T tokens · D model width · V vocabulary
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mdn.config import ConfigError, RunConfig
from mdn.mixers import Mixer, State, mixer_class
from mdn.mixers.base import EPS, ShortConvolution, precise
from mdn.models.block import Block
from mdn.models.decoder import Decoder
from mdn.models.loss import cross_entropy
from mdn.pattern import expand
from mdn_kernels.common.check import check_cu_seqlens

GPT2_VOCABULARY = 50257
PREFILL = 4096  # tokens of each prompt that a pass reads, so that a longer one takes no more memory


class LanguageModel(nn.Module):
    """The model of a run, with initial values from torch's global generator: seed it before.

    Raises:
        ValueError: if the pattern does not divide the layers, a mixer or a kernel version does not exist, or
            a mixer's shape does not fit the model width.
    """

    def __init__(self, run: RunConfig, vocabulary: int = GPT2_VOCABULARY):
        super().__init__()
        self.run = run
        kernel = None if run.kernel == "auto" else run.kernel
        self.mixers = expand(run.pattern, run.shape.layers)
        # Without values: torch would draw its own, and import its compiler for that on the meta device.
        empty = torch.empty(vocabulary, run.d_model)
        self.embedding = nn.Embedding.from_pretrained(empty, freeze=False)
        self.blocks = nn.ModuleList()
        for name in self.mixers:
            mixer = mixer_class(name)(run.d_model, run.shape, run.mixer_options(name), kernel)
            self.blocks.append(Block(run.d_model, mixer, run.mlp))
        self.norm = nn.RMSNorm(run.d_model, eps=EPS)
        self.head = nn.Linear(run.d_model, vocabulary, bias=False)
        initialize(self)

    def hidden(
        self, ids_BT: Tensor, states: Sequence[State] | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, list[State] | None]:
        """Hidden states after the last norm, [B, T, D], and the next states if `states` were given.

        cu_seqlens [N + 1]: offsets of sequences packed along T in a batch of one.

        Raises:
            ValueError: for offsets that do not divide the T tokens into sequences.
        """
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, *ids_BT.shape)
        x_BTD = self.embedding(ids_BT)
        following: list[State] = []
        for layer, block in enumerate(self.blocks):
            x_BTD, state = block(x_BTD, states[layer] if states is not None else None, cu_seqlens)
            if state is not None:
                following.append(state)
        return self.norm(x_BTD), following if states is not None else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] in float32 (float64 of a float64 model)."""
        return precise(self.head(hidden))

    def forward(
        self, ids_BT: Tensor, states: Sequence[State] | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, list[State] | None]:
        """Logits of the next token after each, [B, T, V], and the next states if `states` were given."""
        hidden_BTD, following = self.hidden(ids_BT, states, cu_seqlens)
        return self.logits(hidden_BTD), following

    def loss(
        self, ids_BT: Tensor, labels_BT: Tensor, cu_seqlens: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Cross-entropy in nats; labels are the next tokens or −100. See `loss.cross_entropy`."""
        hidden_BTD, _ = self.hidden(ids_BT, None, cu_seqlens)
        return cross_entropy(hidden_BTD, self.head.weight, labels_BT, reduction)

    def init_states(
        self, batch: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> list[State]:
        """Each layer's state before the first token; None: the device and the dtype of the parameters."""
        weight = self.head.weight
        device, dtype = torch.device(device or weight.device), dtype or weight.dtype
        return [self.mixer(layer).init_state(batch, device, dtype) for layer in range(len(self.blocks))]

    def recompute(self, wanted: bool) -> None:
        """Whether training keeps of a block its input only and computes it again for the gradients."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.recompute = wanted

    def compile_blocks(self) -> None:
        """torch.compile for each block by itself: blocks of one kind share what was compiled, and gradients,
        FSDP's weights and activation checkpointing stay outside, between the blocks."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.compiled = torch.compile(block._forward, dynamic=False)

    def prefill(self, ids_BT: Tensor) -> tuple[Tensor, list[State]]:
        """Hidden states of the last tokens read, [B, ≤ PREFILL, D], and the states after the prompts."""
        states: list[State] | None = self.init_states(ids_BT.shape[0], ids_BT.device)
        for part_BT in ids_BT.split(PREFILL, dim=1):
            hidden_BTD, states = self.hidden(part_BT, states)
        assert states is not None
        return hidden_BTD, states

    def mixer(self, layer: int) -> Mixer:
        mixer = self.blocks[layer].get_submodule("mixer")
        assert isinstance(mixer, Mixer)
        return mixer

    @torch.no_grad()
    def generate(
        self,
        ids_BT: Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        eot: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues prompts of equal length: they are read, then written a token at a time from the states.

        Args:
            ids_BT: the prompts, T ≥ 1.
            max_new_tokens: how many tokens to add at most.
            temperature: 0 takes the most likely token, else samples from softmax(logits / temperature).
            eot: a sequence that reaches this token is filled up with it; all of them: generation ends.
            generator: of the samples.

        Returns:
            [B, T + n], the prompts with what follows, n ≤ max_new_tokens.

        Raises:
            ValueError: for an empty prompt or a negative temperature.
        """
        if ids_BT.dim() != 2 or ids_BT.shape[1] == 0:
            raise ValueError(f"ids: shape {list(ids_BT.shape)} holds no prompt; start from end of text")
        if temperature < 0:
            raise ValueError(f"temperature: {temperature} is negative; use 0 for the most likely token")
        if max_new_tokens < 1:
            return ids_BT
        hidden_BTD, states = self.prefill(ids_BT)
        decoder = Decoder(self, states)
        ended_B = torch.zeros(ids_BT.shape[0], dtype=torch.bool, device=ids_BT.device)
        sequence = [ids_BT]
        while True:
            logits_BV = self.logits(hidden_BTD[:, -1])
            if temperature == 0:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            else:
                chances_BV = torch.softmax(logits_BV / temperature, -1)
                next_B1 = torch.multinomial(chances_BV, 1, generator=generator)
            if eot is not None:
                next_B1 = next_B1.masked_fill(ended_B[:, None], eot)
                ended_B = next_B1[:, 0] == eot
            sequence.append(next_B1)
            if len(sequence) > max_new_tokens or (eot is not None and bool(ended_B.all())):
                return torch.cat(sequence, 1)
            hidden_BTD = decoder(next_B1)

    def parameter_groups(self) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
        """(with weight decay, without), each a list of (name, parameter).

        Matrices decay, vectors do not: norms, biases, A_log, Mu_log, log_factor, D_log, dt_bias, mu_bias, D
        and Comba's decay set scales and time constants, which a pull to zero would bias. Embedding and head
        decay like the other matrices, as in the GPT recipe that the paper's optimizer settings follow.
        """
        named = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        return [x for x in named if x[1].dim() >= 2], [x for x in named if x[1].dim() < 2]


@torch.no_grad()
def initialize(model: LanguageModel) -> None:
    """Every initial value, from torch's global generator.

    Matrices, embedding and convolutions are normal with deviation 0.02, norms 1, biases 0. The gates' own
    parameters start as in Mamba2 and FLA's layers: rates exp(A_log) uniform, time steps softplus(dt_bias)
    log-uniform. MDN's mu_bias starts as its dt_bias. On the meta device there are no values: nothing happens.
    """
    if model.head.weight.is_meta:
        return
    for module in model.modules():
        match module:
            case nn.Linear() | nn.Embedding() | ShortConvolution():
                nn.init.normal_(module.weight, std=0.02)
                bias = getattr(module, "bias", None)
                if isinstance(bias, Tensor):
                    nn.init.zeros_(bias)
            case nn.RMSNorm():
                nn.init.ones_(module.weight)
    for layer, name in enumerate(model.mixers):
        own = dict(model.mixer(layer).named_parameters(recurse=False))
        if "A_log" in own:
            from_one = name == "mamba2" or (name == "kda" and model.run.mixer_options(name).init == "kda")
            _log_uniform(own["A_log"], 1 if from_one else 0, 16)
        if "dt_bias" in own:
            step = own["dt_bias"].uniform_(math.log(1e-3), math.log(0.1)).exp_().clamp_(min=1e-4)
            step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus
        if "Mu_log" in own:
            _log_uniform(own["Mu_log"], 0, 16)
            own["mu_bias"].copy_(own["dt_bias"])
        if "log_factor" in own:
            _log_uniform(own["log_factor"], 0, 4)
        if "D_log" in own:
            _log_uniform(own["D_log"], 0, 1)
        for ones in own.keys() & {"D", "decay"}:
            own[ones].fill_(1.0)
        if name == "mamba2":
            # Mamba's own rule for what writes to the residual stream: less of it the more layers there are
            out = model.mixer(layer).get_parameter("out.weight")
            bound = 1 / math.sqrt(out.shape[1] * len(model.mixers))
            out.uniform_(-bound, bound)


def _log_uniform(parameter: Tensor, low: float, high: float) -> None:
    """The logarithm of a uniform number; the floor keeps a draw of exactly 0 finite."""
    parameter.uniform_(low, high).clamp_(min=1e-6).log_()


def build(run: RunConfig, device: torch.device | str = "cpu") -> LanguageModel:
    """A new model on `device`. Initial values are drawn on the CPU, so that no device changes them."""
    return LanguageModel(run).to(device)


def load(folder: Path | str, device: torch.device | str = "cpu") -> LanguageModel:
    """The trained model of a run folder (config.yaml, model.safetensors), ready for evaluation.

    Raises:
        ConfigError: if one of the two files is missing.
    """
    from safetensors.torch import load_file  # a machine that only trains need not have it

    folder = Path(folder)
    for name in ("config.yaml", "model.safetensors"):
        if not (folder / name).exists():
            raise ConfigError(f"{folder}: no {name}; train this model first (dvc repro)")
    weights = load_file(folder / "model.safetensors", device=str(device))
    with torch.device("meta"):
        model = LanguageModel(RunConfig.from_yaml(folder / "config.yaml"), weights["head.weight"].shape[0])
    model.load_state_dict(weights, assign=True)
    return model.eval()
