"""Softmax attention with rotary position embedding, the Transformer's and the hybrids'. Per head of R = D/H:

    o_t = Σ_{s≤t} softmax_s(q_tᵀ k_s / √R) v_s        q_t ← R_t q_t, k_s ← R_s k_s, the rotations of RoPE

Its memory is every key and value so far. To stay in one place it can be given room for more (`with_room`);
`length` then says how much of it is filled.

B batch · T tokens · P tokens before these · D model width · H heads · R head size · N packed sequences
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdn_kernels
from mdn.config import Shape
from mdn.mixers.base import Mixer, State
from mdn.options import AttentionOptions
from mdn.rules import RULES
from mdn_kernels.common.sequences import pack, unpack


class Attention(Mixer):
    rule = RULES["attention"]

    def __init__(self, d_model: int, shape: Shape, options: AttentionOptions, kernel: str | None = None):
        super().__init__(d_model, shape, options, kernel)
        heads = shape.attention_heads or shape.heads
        self.heads, self.head_size, self.theta = heads, d_model // heads, options.rope_theta
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def init_state(
        self, batch: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> State:
        empty = torch.zeros(batch, 0, self.heads, self.head_size, device=device, dtype=dtype)
        return {"k": empty, "v": empty}

    def with_room(self, state: State, tokens: int) -> State:
        k_BPHR, v_BPHR = state["k"], state["v"]
        length = state.get("length")
        if length is None:
            length = torch.tensor([k_BPHR.shape[1]], device=k_BPHR.device)
        return {
            "k": F.pad(k_BPHR, (0, 0, 0, 0, 0, tokens)),
            "v": F.pad(v_BPHR, (0, 0, 0, 0, 0, tokens)),
            "length": length,
        }

    def forward(
        self, x_BTD: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x_BTD).chunk(3, -1))
        if cu_seqlens is not None:
            if state is not None:
                raise ValueError("attention: packed sequences have no state; decode them as a batch")
            position = positions(cu_seqlens.to(q.device), q.shape[1])
        elif state is not None and "length" in state:
            o_B1HR, state = self.decode(q, k, v, state)
            return self.out(o_B1HR.flatten(-2)), state
        else:
            before = 0 if state is None else state["k"].shape[1]
            position = before + torch.arange(q.shape[1], device=q.device)
        cos, sin = rotations(position, self.head_size, self.theta)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cu_seqlens is not None:
            return self.out(attend_packed(q, k, v, cu_seqlens).flatten(-2)), None
        if state is not None:
            k, v = torch.cat([state["k"].to(k.dtype), k], 1), torch.cat([state["v"].to(v.dtype), v], 1)
            state = {"k": k, "v": v}
        o_BHTR = attend(*(y.transpose(1, 2) for y in (q, k, v)))
        return self.out(o_BHTR.transpose(1, 2).flatten(-2)), state

    def decode(self, q_B1HR: Tensor, k_B1HR: Tensor, v_B1HR: Tensor, state: State) -> tuple[Tensor, State]:
        """One token from a state with room."""
        length = state["length"]
        cos, sin = rotations(length, self.head_size, self.theta)
        caches = []
        for name, x_B1HR in (("k", rotate(k_B1HR, cos, sin)), ("v", v_B1HR)):
            cache = state[name] if mdn_kernels.OVERWRITE_STATES else state[name].clone()
            caches.append(cache.index_copy_(1, length, x_B1HR.to(cache.dtype)))
        filled_P = torch.arange(caches[0].shape[1], device=length.device) <= length
        q, k, v = (x.transpose(1, 2).to(q_B1HR.dtype) for x in (rotate(q_B1HR, cos, sin), *caches))
        o_BH1R = F.scaled_dot_product_attention(q, k, v, attn_mask=filled_P[None])
        return o_BH1R.transpose(1, 2), {"k": caches[0], "v": caches[1], "length": length + 1}


def attend(q_BHTR: Tensor, k_BHSR: Tensor, v_BHSR: Tensor) -> Tensor:
    """Causal attention of the last T of S tokens, [B, H, T, R]."""
    T, S = q_BHTR.shape[2], k_BHSR.shape[2]
    if T in (1, S):
        return F.scaled_dot_product_attention(q_BHTR, k_BHSR, v_BHSR, is_causal=T > 1)
    mask_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTR.device).tril(S - T)
    return F.scaled_dot_product_attention(q_BHTR, k_BHSR, v_BHSR, attn_mask=mask_TS)


def attend_packed(q_BTHR: Tensor, k_BTHR: Tensor, v_BTHR: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Causal attention inside each of the packed sequences, [1, T, H, R]."""
    if q_BTHR.is_cuda and q_BTHR.dtype in (torch.float16, torch.bfloat16):  # all that it takes
        from torch.nn.attention.varlen import varlen_attn  # takes seconds: it imports torch's compiler

        longest = int(cu_seqlens.diff().max())
        offsets = cu_seqlens.to(q_BTHR.device, torch.int32)
        o_THR = varlen_attn(
            q_BTHR[0], k_BTHR[0], v_BTHR[0], offsets, offsets, longest, longest, window_size=(-1, 0)
        )
        return o_THR.unsqueeze(0)  # type: ignore[union-attr]  # a tuple only if asked for
    # One sequence a row: causal order hides the padding behind the shorter ones without a mask.
    rows = (unpack(x, cu_seqlens).transpose(1, 2) for x in (q_BTHR, k_BTHR, v_BTHR))
    return pack(attend(*rows).transpose(1, 2), cu_seqlens)


def positions(cu_seqlens: Tensor, T: int) -> Tensor:
    """Each token's place in its packed sequence, [T]."""
    token_T = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence_T = torch.searchsorted(cu_seqlens, token_T, right=True) - 1
    return token_T - cu_seqlens[sequence_T]


def rotations(position_T: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position · θ^(−2i/R), [T, 1, R/2], in float64, as positions grow large."""
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float64, device=position_T.device) / size)
    angle = position_T.double()[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x_BTHR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + R/2) of each head's channels."""
    exact = torch.promote_types(x_BTHR.dtype, torch.float32)
    cos, sin = cos.to(exact), sin.to(exact)
    left, right = x_BTHR.to(exact).chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x_BTHR.dtype)
