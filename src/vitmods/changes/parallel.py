"""Parallel branches: blocks side by side instead of one after another."""

from dataclasses import dataclass

from vitmods.changes.base import Change
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError

_DEEP, _DEEP_IF_WIDE, _WIDE = 36, 24, 768  # blocks, and from this width on


@dataclass(frozen=True)
class Parallel(Change):
    """``branches`` consecutive blocks become one, in which all attention branches read the same tokens, and then all
    MLP branches:

    ``x = x + A_1(x) + A_2(x)``, then ``x = x + M_1(x) + M_2(x)``, each A and M with a separate norm, LayerScale and
    drop path (section 3). Every weight finds its place again, so a trained model can be converted and trained on, and
    back: ``branches=1`` puts the blocks one after another, in their order in the block.

    Raises UserError where the blocks cannot be divided so, and for norms after the residual sum.
    """

    name = "parallel"
    title = "Parallel branches"
    paper = "Touvron et al.: Three things everyone should know about Vision Transformers. ECCV 2022, section 3"
    url = "https://arxiv.org/abs/2203.09795"
    summary = "Puts the branches of every two blocks side by side: half the depth with the same weights."
    cost = "no parameters and no multiply-adds; half the calls"
    published = (
        "ImageNet-1k top-1, ViT-B of 36 blocks to 18 x 2: at 300 epochs 82.9 to 83.3, with LayerScale 83.9 to 83.8; at "
        "400 epochs 83.4 to 83.4, with LayerScale 84.1 to 84.1 (Table 2). Of 24 blocks Ti and S are better in "
        "sequence, of 12 nothing is stated (Figure 2)"
    )
    short_forms = {"sequential": {"branches": 1}}  # noqa: RUF012
    fills = frozenset({Slot.PARALLEL})

    branches: int = 2

    def __post_init__(self) -> None:
        if self.branches < 1:
            raise UserError(f"parallel(branches=...) is a whole number, at least 1, got {self.branches}.")

    def edit(self, config: ViTConfig) -> ViTConfig:
        flat = config.unrolled
        for name, count in flat.counts.items():
            self._check(count, "the model has" if name == "depth" else f"{name} counts")
        return flat.rolled(self.branches)

    def advice(self, config: ViTConfig) -> str:
        blocks = config.unrolled.depth
        if config.parallel == 1 or blocks >= _DEEP or (blocks >= _DEEP_IF_WIDE and config.embed_dim >= _WIDE):
            return ""
        return (
            "its paper has gains in deep models, of 36 and 60 blocks, and from ViT-L on of 24; with 24 it finds "
            f"ViT-Ti and ViT-S better in sequence. Here are {blocks} blocks of width {config.embed_dim}."
        )

    def _check(self, blocks: int, what: str) -> None:
        if blocks % self.branches == 0:
            return
        fitting = [str(k) for k in range(2, blocks + 1) if blocks % k == 0]
        remedy = f"give branches={' or '.join(fitting)}, or another depth" if fitting else "give it another depth"
        raise UserError(
            f"'{self}' makes one block of {self.branches}, and {what} {blocks}, which {self.branches} does not divide: "
            f"{remedy}."
        )
