"""Positions inside attention: gated positional self-attention in the first blocks."""

import math
from dataclasses import dataclass
from typing import Literal

from vitmods.changes.base import Change, Weights
from vitmods.changes.prefix_tokens import carry_positions, dropped_positions, first_blocks, join_late
from vitmods.model.config import ViTConfig
from vitmods.model.slots import PositionalConfig, Slot
from vitmods.util.errors import UserError, nearest


@dataclass(frozen=True)
class PositionalAttention(Change):
    """Each head of the first ``blocks`` blocks mixes its attention with a learned kernel over the grid:
    ``(1 - s) softmax(q k^T / sqrt(D)) + s P``, s = sigmoid(gate) (ConViT, equation 7).

    P is that of Dynamic Token Normalization, whose Table 10 asks by this model whether P helps in attention as it does
    in a norm. That paper does not say how P enters attention; the gate is ConViT's. As there, class and register tokens
    join the patch tokens after these blocks and are without positions; those that they had are added to them.

    ``blocks`` is ten twelfths of the depth if it is not given. ``gate`` is the logit with which each head starts: -5
    keeps a trained model near itself, except for its later class token. ``init="noise"`` starts with kernels without a
    place, nearly flat.
    """

    name = "gpsa"
    title = "Gated positional attention"
    paper = "d'Ascoli et al.: ConViT: Improving Vision Transformers with Soft Convolutional Inductive Biases. ICML 2021"
    url = "https://arxiv.org/abs/2103.10697"
    summary = "Mixes attention by content with a learned kernel of positions in each head of the first blocks."
    cost = "4 heads parameters a block; T (rows + columns) width multiply-adds a block"
    published = "ImageNet-1k top-1 (Dynamic Token Normalization, Table 10): S*/16 80.6 to 80.8, with dtn instead 81.7"
    fills = frozenset({Slot.ATTN_POSITIONS})

    blocks: int | None = None
    init: Literal["local", "noise"] = "local"
    gate: float = 1.0

    def __post_init__(self) -> None:
        if self.blocks is not None and self.blocks < 1:
            raise UserError(f"gpsa(blocks=...) is a whole number, at least 1, got {self.blocks}.")
        if self.init not in ("local", "noise"):
            raise UserError(f"gpsa(init=...) cannot be '{self.init}'. {nearest(self.init, ('local', 'noise'))}")
        if not math.isfinite(self.gate):
            raise UserError(f"gpsa(gate=...) is a number, got {self.gate}.")

    def edit(self, config: ViTConfig) -> ViTConfig:
        count = first_blocks(self.name, self.blocks, config)
        return join_late(config.with_(positional=PositionalConfig(count, self.init, self.gate)))

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        return carry_positions(weights, old)

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return dropped_positions(old)
