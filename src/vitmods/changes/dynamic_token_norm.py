"""Dynamic Token Normalization in the first blocks: statistics within and across tokens."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from vitmods.changes.base import Change, Weights
from vitmods.changes.insertions import Insertion, Parts, Swap
from vitmods.changes.prefix_tokens import carry_positions, dropped_positions, first_blocks, join_late
from vitmods.model.config import ViTConfig
from vitmods.model.slots import FirstBlocks, NormConfig, Slot
from vitmods.ops.token_mixing import TokenMixing
from vitmods.util.errors import UserError
from vitmods.util.text import plural


@dataclass(frozen=True)
class DynamicTokenNorm(Change, TokenMixing):
    """The norm before attention (or both norms) of the first ``blocks`` blocks becomes a DynamicTokenNorm (DTN).

    As published, class and register tokens join the patch tokens after these blocks and are without positions: the
    positions that they had are added to the tokens. ``blocks`` is ten twelfths of the depth if it is not given.
    FLOPs in the paper fit ``norms="attn"``; its released code replaces both.

    The other fields are those of ``vitmods.layers.DynamicTokenNorm``. Table 5: ``trade_off=0, kernel="uniform"`` is
    IN; ``trade_off=0`` row (c); ``trade_off=0.5`` row (d); ``init="noise"`` its last line. On a trained model
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
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks is not None and self.blocks < 1:
            raise UserError(f"dtn(blocks=...) is a whole number, at least 1, got {self.blocks}.")

    @property
    def fills(self) -> frozenset[Slot]:
        slots = {"attn": {Slot.ATTN_BEFORE}, "both": {Slot.ATTN_BEFORE, Slot.MLP_BEFORE}}
        return frozenset(slots[self.norms] | {Slot.PREFIX_POSITION})

    def edit(self, config: ViTConfig) -> ViTConfig:
        blocks = first_blocks(self.name, self.blocks, config)
        if not isinstance(self.pool, int):
            raise UserError(f"'{self}' sets pool for each stage, and a ViT does not have stages: give one number.")
        if any(side % self.pool for side in config.grid):
            rows, columns = config.grid
            raise UserError(f"dtn(pool={self.pool}) does not divide the grid of {rows} x {columns} tokens.")
        edited = [replace(b, before=self.edit_norm(b.before or NormConfig())) for b in (config.attn, config.mlp)]
        attn, mlp = edited if self.norms == "both" else (edited[0], config.mlp)
        return join_late(config.with_(first_blocks=FirstBlocks(blocks, attn, mlp)))

    def edit_norm(self, norm: NormConfig, stage: int | None = None) -> NormConfig:
        """Return the new norm, wherever it is; in a stage of a pyramid with that stage's ``pool``."""
        options = {field.name: getattr(self, field.name) for field in fields(TokenMixing)}
        if len(self.pools) > 1:
            options["pool"] = self.pools[stage] if stage is not None else 1
        return NormConfig("dynamic_token", self.eps, norm.affine, options=tuple(options.items()))

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        return carry_positions(weights, old)

    def advice(self, config: ViTConfig) -> str:
        if config.num_heads >= 4 or self.kernel == "uniform" or self.trade_off == 1:
            return ""
        return (
            f"with {plural(config.num_heads, 'head')} its kernels begin at a single offset; the paper's models have "
            "four heads or more, 2 x 2 kernels and more: T*/P is as large as Ti/P and has four (--base T*/P)."
        )

    def insertions(self, parts: Parts) -> list[Insertion]:
        return [Swap()]

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return dropped_positions(old)
