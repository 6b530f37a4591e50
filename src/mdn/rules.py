"""How each mixer updates its memory, as Table 1 prints it. The mixers take it from here, and reports, which
import no torch, read it here too.

S memory of a head [K, V] · M its momentum · H heads · K, V key and value channels · d model width · T tokens
"""

from dataclasses import dataclass

from mdn.config import Shape


@dataclass(frozen=True)
class Rule:
    """One mixer's rule in LaTeX; update and transition are an equation a line."""

    update: tuple[str, ...]
    gates: str  # what of the update depends on the token, beside q, k and v
    transition: tuple[str, ...]  # what becomes of the state without an input
    matrices: tuple[str, ...] = ("S",)  # of a head, each K × V; (): every key and value is kept

    @property
    def state(self) -> str:
        """Elements of one layer's state, in LaTeX."""
        return rf"{len(self.matrices) if len(self.matrices) > 1 else ''}HKV" if self.matrices else "2dT"

    def state_size(self, d_model: int, shape: Shape, context: int) -> int:
        """Elements of one layer's state of one sequence after `context` tokens, short convolutions aside."""
        if not self.matrices:
            return 2 * d_model * context
        return len(self.matrices) * shape.heads * shape.head_k * shape.head_v


RULES = {
    "attention": Rule(
        update=(r"S_t = S_{t-1} \cup \{(k_t, v_t)\}",),
        gates=r"\mathrm{none}",
        transition=(r"\mathrm{keeps\ all}",),
        matrices=(),
    ),
    "mamba2": Rule(
        update=(r"S_t = \alpha_t S_{t-1} + k_t v_t^\top",),
        gates=r"\alpha_t",
        transition=(r"\alpha_t I",),
    ),
    "gdn": Rule(
        update=(r"S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top",),
        gates=r"\alpha_t, \beta_t",
        transition=(r"\alpha_t (I - \beta_t k_t k_t^\top)",),
    ),
    "comba": Rule(
        update=(r"S_t = \alpha_t S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top p_t)^\top",),
        gates=r"\alpha_t, \beta_t",
        transition=(r"\alpha_t I - \beta_t k_t p_t^\top",),
    ),
    "kda": Rule(
        update=(
            r"S_t = (I - \beta_t k_t k_t^\top)\,\mathrm{diag}(\boldsymbol{\alpha}_t) S_{t-1} "
            r"+ \beta_t k_t v_t^\top",
        ),
        gates=r"\boldsymbol{\alpha}_t, \beta_t",
        transition=(r"(I - \beta_t k_t k_t^\top)\,\mathrm{diag}(\boldsymbol{\alpha}_t)",),
    ),
    "mdn": Rule(
        update=(
            r"M_t = \mu_t M_{t-1} - \eta_t k_t (v_t - \alpha_t S_{t-1}^\top k_t)^\top",
            r"S_t = \alpha_t S_{t-1} - \beta_t M_t",
        ),
        gates=r"\alpha_t, \beta_t, \mu_t, \eta_t",
        transition=(
            r"S \mapsto \alpha_t (I - \beta_t \eta_t k_t k_t^\top) S - \beta_t \mu_t M",
            r"M \mapsto \alpha_t \eta_t k_t k_t^\top S + \mu_t M",
        ),
        matrices=("S", "M"),
    ),
}
