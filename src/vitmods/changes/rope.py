"""Rotary positions: queries and keys turn by angles that grow with their place."""

from dataclasses import dataclass
from typing import Literal

from vitmods.changes.base import Change, Weights
from vitmods.changes.prefix_tokens import carry_positions
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.ops.rotary import RopeConfig


@dataclass(frozen=True)
class RoPE(Change):
    """``q_i k_j = (R_i q)(R_j k)``: the rotation R of a token depends on its row and column, so that products depend on
    the offset of two tokens (Heo et al., 2024). After norms of queries and keys; class tokens do not turn.

    ``axial``: half of a head's channels turn with the row, half with the column, by angles ``place / base^(4i/D)``.
    ``mixed``: each pair of channels turns with both by two learned frequencies for each head and block. ``base`` is 100
    for axial and 10 for mixed ones, if it is not given. ``pairs`` are neighboring channels or channels of both halves.
    ``coordinates``: "index" counts tokens, and another grid later is stretched to this one unless ``stretch`` is False;
    "centered" has [-1, 1] on any grid, times 2 pi, as DINOv3.

    ``absolute=False`` leaves the learned positions out; class and register tokens keep theirs. ``register_base`` lets
    register tokens turn as a separate square grid (ViT-5: 100, with a base of 10000).
    """

    name = "rope"
    title = "Rotary positions"
    paper = "Heo et al.: Rotary Position Embedding for Vision Transformer. ECCV 2024"
    url = "https://arxiv.org/abs/2403.13298"
    summary = "Turns pairs of channels of queries and keys by angles that grow with the row and column."
    cost = "no parameters (mixed: one width a block) and no multiply-adds of matrices"
    published = (
        "ImageNet-1k top-1, DeiT III with 400 epochs: S/16 80.4 to 80.9 (axial and mixed; with absolute positions "
        "80.7 and 80.9), B/16 83.4 to 83.6 and 83.8 (with them 83.7 and 83.8) (tables of the code's repository)"
    )
    words = ("rotary", "rotary_positions", "axial")

    frequencies: Literal["axial", "mixed"] = "axial"
    base: float | None = None
    pairs: Literal["interleaved", "halved"] = "interleaved"
    coordinates: Literal["index", "centered"] = "index"
    stretch: bool = True
    register_base: float | None = None
    absolute: bool = True

    def __post_init__(self) -> None:
        self._rope((1, 1))  # checks the settings

    def _rope(self, grid: tuple[int, int]) -> RopeConfig:
        base = self.base if self.base is not None else {"axial": 100.0, "mixed": 10.0}[self.frequencies]
        return RopeConfig(
            self.frequencies,
            base,
            self.pairs,
            self.coordinates,
            reference=grid if self.coordinates == "index" and self.stretch else None,
            register_base=self.register_base,
        )

    @property
    def fills(self) -> frozenset[Slot]:
        return frozenset({Slot.ROPE} if self.absolute else {Slot.ROPE, Slot.POSITION})

    def edit(self, config: ViTConfig) -> ViTConfig:
        config = config.with_(rope=self._rope(config.grid))
        return config if self.absolute else config.with_(position="none", position_on_prefix=False)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        if self.absolute:
            return weights
        return {name: value for name, value in carry_positions(weights, old).items() if name != "pos_embed"}

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        frequencies = ("blocks.*.attn.rope.freqs",) if old.rope is not None else ()
        return frequencies if self.absolute else (*frequencies, "pos_embed", "cls_token", "reg_token")
