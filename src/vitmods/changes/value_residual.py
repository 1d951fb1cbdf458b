"""Value residual: later blocks mix the values of the first block into theirs."""

import math
from dataclasses import dataclass

from vitmods.changes.base import Change, Preserves, Weights
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class ValueResidual(Change):
    """``softmax(q_n k_n^T / sqrt(D)) (a_n v_1 + b_n v_n)`` in all blocks n but the first, v_1 the values of the first
    block and a_n, b_n two learned factors of a block (Zhou et al., 2025, ResFormer).

    ``first`` is where a starts, and b starts at ``1 - first``: 0 keeps the function.
    """

    name = "valueresidual"
    title = "Value residual"
    paper = "Zhou et al.: Value Residual Learning. ACL 2025"
    url = "https://arxiv.org/abs/2410.17897"
    summary = "Mixes the values of the first block's attention into those of every other block."
    cost = "2 parameters a block, and width^2 multiply-adds a token once"
    published = (
        "none for ViTs; language models reach the same loss with 16.11 % fewer parameters, or 20.3 % less data "
        "(abstract)"
    )
    words = ("resformer", "value_residual")
    fills = frozenset({Slot.VALUE_MIX})

    first: float = 0.5

    def __post_init__(self) -> None:
        if not math.isfinite(self.first):
            raise UserError(f"valueresidual(first=...) is a number, got {self.first}.")

    @property
    def preserves(self) -> Preserves:
        return "function" if self.first == 0 else "weights"

    def edit(self, config: ViTConfig) -> ViTConfig:
        if config.depth == 1:
            raise UserError("valueresidual needs a second block: take a deeper model.")
        norm = config.branches(0)[0].before
        if norm is not None and norm.kind in ("batch", "power", "switchable"):
            raise UserError(
                f"valueresidual computes the first norm twice, so a {norm.kind} norm counts each batch twice: use a "
                "norm without running statistics."
            )
        return config.with_(value_mix=True)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        like = next(iter(weights.values()))
        start = like.new_tensor([self.first, 1 - self.first])
        mixes = {f"blocks.{i}.attn.value_mix.weight": start.clone() for i in range(1, new.depth)}
        return {**weights, **mixes}
