"""What a training needs of a GPU's memory, from configuration and machine alone; an estimate, erring upwards.

Under autocast: float32 weights, gradients and AdamW's two moments; bfloat16 copies of the weights for the
products; what each block keeps for its gradients; one operator's workspace; the loss.

D model width · C channels of q, k and v · W MLP width · N tokens that a device takes at once
"""

from dataclasses import replace

from mdn.config import STRATEGIES, Machine, RunConfig
from mdn.mixers import mixer_class
from mdn.models.block import mlp_width
from mdn.models.cost import parameters
from mdn.models.lm import GPT2_VOCABULARY
from mdn.models.loss import CHUNK_BYTES
from mdn.pattern import expand

CONTEXT = 3 * 2**29  # CUDA's and NCCL's own
SLACK = 1.05  # what the allocator loses to fragments
CHUNK = 64  # tokens between two states that an operator keeps in its backward pass
# The momentum rule's backward goes through its tokens in spans (mdn_kernels.momentum_delta_rule.chunked):
SPAN_ELEMENTS, SPAN_TOKENS = 8192 * 6 * 256 * 512, 1024
PROJECTIONS = {"kda": 4, "mamba2": 1}  # each keeps its input in bfloat16; the others: qkv and gate


def training_bytes(run: RunConfig, machine: Machine) -> dict[str, int]:
    """Bytes on each device by part, and in total."""
    N, D = machine.micro_batch * run.training.context, run.d_model
    sizes = parameters(run)
    P, vocabulary = sizes["total"], sizes["embedding"] + sizes["head"]
    mixers = expand(run.pattern, run.shape.layers)
    ranks = machine.devices * machine.nodes
    share = ranks if machine.strategy != "ddp" else 1
    blocks = [kept_bytes(run, name) * N for name in mixers]
    block = (P - vocabulary) // len(mixers)
    whole = 0  # weights and gradients that are whole at once, beside the shares
    if share > 1:  # embedding, head and two blocks, and one block's gradient; or all weights
        whole = vocabulary + 3 * block if machine.strategy == "fsdp" else P + vocabulary + block
    if machine.activation_checkpointing:
        activations, copied = len(mixers) * 4 * D * N + max(blocks), block
    else:
        activations, copied = sum(blocks), P - vocabulary
    parts = {
        "weights": 4 * P // share + 4 * whole,
        "gradients": 4 * P // share,
        "optimizer": 8 * P // share,
        "copies": 2 * copied,
        "activations": activations,
        "operator": max(workspace_bytes(run, name, machine.micro_batch) for name in mixers),
        # logits; the head in bfloat16, its gradient and that of a chunk; gradient of the hidden states
        "loss": CHUNK_BYTES["cuda"] + GPT2_VOCABULARY * D * 8 + 6 * D * N,
    }
    return parts | {"total": int(sum(parts.values()) * SLACK) + CONTEXT}


def fitting(run: RunConfig, machine: Machine, available: int) -> Machine | None:
    """The machine itself or the nearest change of it with which the training fits; None: there is none.

    First fewer sequences at once, which costs nothing as long as there are tokens enough; then activation
    checkpointing, a third more time; then spreading over the ranks, which costs messages.
    """
    ranks = machine.devices * machine.nodes
    sizes = [
        size
        for size in range(machine.micro_batch, 0, -1)
        if run.training.batch % (size * ranks) == 0 and size <= run.training.batch // ranks
    ]
    strategies = STRATEGIES[STRATEGIES.index(machine.strategy) :] if ranks > 1 else (machine.strategy,)
    for strategy in strategies:
        for again in sorted({machine.activation_checkpointing, True}):
            for size in sizes:
                changed = replace(
                    machine, micro_batch=size, activation_checkpointing=again, strategy=strategy
                )
                if training_bytes(run, changed)["total"] <= available:
                    return changed
    return None


def kept_bytes(run: RunConfig, name: str) -> int:
    """Bytes a token that one block keeps from its forward to its backward pass."""
    D, shape = run.d_model, run.shape
    mlp = 10 * D + 8 * mlp_width(D) if run.mlp else 0
    if name == "attention":
        return mlp + 24 * D  # norm 10; q, k and v 6; rotated q and k 4; output and what it is made of 4
    inner = shape.heads * shape.head_v
    C = _channels(run, name)
    # norm 8, float32 input of the gates 4; 2 each before, in and after the convolution; gated norm in float32
    return mlp + 12 * D + 2 * D * PROJECTIONS.get(name, 2) + 6 * C + 18 * inner + saved_bytes(run, name)


def saved_bytes(run: RunConfig, name: str) -> int:
    """Bytes a token that an operator keeps beside its inputs: normalised q and k, residuals, two squares of
    each chunk, in bfloat16."""
    return 0 if name == "attention" else 2 * _channels(run, name) + 4 * CHUNK * run.shape.heads


def workspace_bytes(run: RunConfig, name: str, sequences: int) -> int:
    """Bytes that an operator takes while it runs on so many sequences: states of each chunk and their
    gradients, gradients of inputs."""
    tokens = sequences * run.training.context
    if name == "attention":
        return 8 * run.d_model * tokens
    matrix = run.shape.heads * run.shape.head_k * run.shape.head_v
    at_once = tokens
    if name == "mdn":
        at_once = min(tokens, max(sequences * SPAN_TOKENS, SPAN_ELEMENTS // matrix))
    states = 4 * len(mixer_class(name).rule.matrices) * matrix // CHUNK
    return states * at_once + 5 * _channels(run, name) * tokens


def _channels(run: RunConfig, name: str) -> int:
    H, K, V = run.shape.heads, run.shape.head_k, run.shape.head_v
    return H * V + 2 * K if name == "mamba2" else H * (2 * K + V)
