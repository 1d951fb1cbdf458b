"""LayerNorm scaling: norms before the branches put out less, the deeper their block is."""

from dataclasses import dataclass

from vitmods.changes.base import Change
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class LayerNormScaling(Change):
    """``x + F(norm(x) / sqrt(l))`` in both branches of block l = 1, 2, ... (Sun et al., 2025). It keeps the variance of
    the residual stream from growing with depth, which lets deep pre-norm blocks contribute little.
    """

    name = "layernormscaling"
    title = "LayerNorm scaling"
    paper = "Sun et al.: The Curse of Depth in Large Language Models. NeurIPS 2025"
    url = "https://arxiv.org/abs/2502.05795"
    summary = "Divides what the norms before the branches put out by the root of the block's number."
    cost = "no parameters and no multiply-adds"
    published = (
        "none for ViTs: language models from 130 million to 7 billion parameters train to a lower loss (abstract)"
    )
    words = ("lns", "layernorm_scaling")
    fills = frozenset({Slot.NORM_SCALE})

    def edit(self, config: ViTConfig) -> ViTConfig:
        if not all(branch.before for block in range(config.depth) for branch in config.branches(block)):
            raise UserError("layernormscaling scales the norms before branches, which this model lacks in places.")
        return config.with_(norm_scale=True)
