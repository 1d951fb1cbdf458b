"""QK-norm: queries and keys are normalized before they meet."""

from dataclasses import dataclass

from vitmods.changes.base import Change
from vitmods.changes.insertions import Heads, Insertion, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig, Slot
from vitmods.util.errors import UserError, nearest


@dataclass(frozen=True)
class QKNorm(Change):
    """``softmax(LN(q) LN(k)^T / sqrt(D))``: a norm over the channels of each head's queries and keys, in all blocks
    (Dehghani et al., 2023, section 2). It bounds the logits of attention, which grow in large models until training
    diverges.

    ``norm`` is a kind that treats each token by itself: LayerNorm as published, ``rms`` as in later models.
    """

    name = "qknorm"
    title = "QK-norm"
    paper = "Dehghani et al.: Scaling Vision Transformers to 22 Billion Parameters. ICML 2023"
    url = "https://arxiv.org/abs/2302.05442"
    summary = "Normalizes the queries and keys of each head before their products."
    cost = "4 head-width parameters a block (rms: 2); no multiply-adds"
    published = "no gain in accuracy is stated: it lets ViTs of 8 billion parameters and more train without diverging"
    words = ("qk_norm", "query-key normalization")
    fills = frozenset({Slot.QK_NORM})

    norm: str = "layer"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        from vitmods.changes.norm import kinds

        token_wise_kinds = () if self.norm == "layer" else [name for name, kind in kinds().items() if kind.token_wise]
        if self.norm != "layer" and self.norm not in token_wise_kinds:
            raise UserError(
                f"qknorm(norm=...) is a kind that treats each token by itself, not '{self.norm}'. "
                f"{nearest(self.norm, token_wise_kinds)}"
            )

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(qk_norm=NormConfig(self.norm, self.eps))

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return ("blocks.*.attn.[qk]_norm.*",) if old.qk_norm is not None else ()

    def insertions(self, parts: Parts) -> list[Insertion]:
        return [Heads(parts.attentions, NormConfig(self.norm, self.eps))]
