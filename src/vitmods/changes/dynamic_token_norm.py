"""Dynamic Token Normalization in the first blocks: statistics within and across tokens."""

from dataclasses import dataclass, replace
from typing import Literal

from vitmods.changes.base import Change, Weights
from vitmods.changes.prefix_tokens import carry_positions, dropped_positions, first_blocks, join_late
from vitmods.model.config import FirstBlocks, NormConfig, ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError, nearest

# As in the layer, which is not imported: to describe a change needs no torch.
_CHOICES = {
    "norms": ("attn", "both"),
    "variant": ("paper", "released"),
    "init": ("local", "noise"),
    "kernel": ("learned", "uniform"),
    "statistics": ("both", "mean", "variance"),
}


@dataclass(frozen=True)
class DynamicTokenNorm(Change):
    """The norm before attention (or both norms) of the first ``blocks`` blocks becomes a DynamicTokenNorm (DTN).

    As published, class and register tokens join the patch tokens after these blocks and have no positions: the
    positions that they had are added to the tokens. ``blocks`` is ten twelfths of the depth if it is not given.
    FLOPs in the paper fit ``norms="attn"``; its released code replaces both.

    Fields are those of ``vitmods.layers.DynamicTokenNorm``. Table 5: ``trade_off=0, kernel="uniform"`` is IN;
    ``trade_off=0`` row (c); ``trade_off=0.5`` row (d); ``init="noise"`` its last line. On a trained model
    ``lambda_init=0.99`` starts close to LayerNorm.
    """

    name = "dtn"
    title = "Dynamic Token Normalization"
    paper = "Shao et al.: Dynamic Token Normalization Improves Vision Transformers. ICLR 2022"
    url = "https://arxiv.org/abs/2112.02624"
    summary = "Mixes each token's own mean and variance with its neighborhood's, by learned weights, before attention."
    cost = "5 heads parameters a norm; 2 T (rows + columns) width multiply-adds a norm (the paper's form: 2 T^2 width)"
    published = "ImageNet-1k top-1: T*/16 72.3 to 73.2, S/16 79.9 to 80.6, S*/16 80.6 to 81.7, B/16 81.8 to 82.3"

    blocks: int | None = None
    norms: Literal["attn", "both"] = "attn"
    variant: Literal["paper", "released"] = "paper"
    init: Literal["local", "noise"] = "local"
    trade_off: float | None = None
    kernel: Literal["learned", "uniform"] = "learned"
    statistics: Literal["both", "mean", "variance"] = "both"
    lambda_init: float = 0.5
    pool: int = 1
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise UserError(
                    f"dtn({name}=...) cannot be '{getattr(self, name)}'. {nearest(getattr(self, name), known)}"
                )
        for name in ("blocks", "pool"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"dtn({name}=...) is a whole number, at least 1, got {getattr(self, name)}.")
        if self.trade_off is not None and not 0 <= self.trade_off <= 1:
            raise UserError(f"dtn(trade_off=...) is a fraction between 0 and 1, got {self.trade_off}.")
        if not 0 < self.lambda_init < 1:
            raise UserError(f"dtn(lambda_init=...) lies between 0 and 1, got {self.lambda_init}.")
        if self.trade_off is not None and self.lambda_init != 0.5:
            raise UserError("dtn(trade_off=...) fixes lambda, so that lambda_init has no effect: give one of them.")

    @property
    def fills(self) -> frozenset[Slot]:
        slots = {"attn": {Slot.ATTN_BEFORE}, "both": {Slot.ATTN_BEFORE, Slot.MLP_BEFORE}}
        return frozenset(slots[self.norms] | {Slot.PREFIX_POSITION})

    def edit(self, config: ViTConfig) -> ViTConfig:
        blocks = first_blocks(self.name, self.blocks, config)
        if any(side % self.pool for side in config.grid):
            rows, columns = config.grid
            raise UserError(f"dtn(pool={self.pool}) does not divide the grid of {rows} x {columns} tokens.")
        norm = self.edit_norm(NormConfig())
        attn = replace(config.attn, before=norm)
        mlp = replace(config.mlp, before=norm) if self.norms == "both" else config.mlp
        return join_late(config.with_(first_blocks=FirstBlocks(blocks, attn, mlp)))

    def edit_norm(self, norm: NormConfig) -> NormConfig:
        """What a norm becomes, wherever it is."""
        options = {
            k: getattr(self, k) for k in ("variant", "init", "trade_off", "kernel", "statistics", "lambda_init", "pool")
        }
        return NormConfig("dynamic_token", self.eps, norm.affine, options=tuple(options.items()))

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        return carry_positions(weights, old)

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return dropped_positions(old)
