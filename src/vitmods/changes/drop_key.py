"""DropKey: dropout of keys before the softmax of attention."""

from dataclasses import dataclass
from typing import Literal

from vitmods.changes.base import Change
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class DropKey(Change):
    """In training each query leaves out each key with probability ``rate``, before the softmax: what it still sees is
    weighed as if there were nothing else (Li et al., 2023). Evaluation and weights stay as they are.

    ``schedule``: "decreasing" as published, from ``rate`` in the first block evenly to 0 in the last one; "constant"
    has it in every block.
    """

    name = "dropkey"
    title = "DropKey"
    paper = "Li et al.: DropKey for Vision Transformer. CVPR 2023"
    url = "https://arxiv.org/abs/2208.02646"
    summary = "Leaves random keys out of each query's attention while training, fewer with every block."
    cost = "no parameters and no multiply-adds; a random number for each pair of tokens in training"
    published = "gains for T2T, VOLO, CeiT and DeiT on ImageNet-1k (abstract, without numbers)"
    acts_in = "training"
    preserves = "function"
    fills = frozenset({Slot.ATTN_MASK})

    rate: float = 0.1
    schedule: Literal["decreasing", "constant"] = "decreasing"

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise UserError(f"dropkey(rate=...) is a probability between 0 and 1, got {self.rate}.")
        if self.schedule not in ("decreasing", "constant"):
            raise UserError(f"dropkey(schedule=...) is decreasing or constant, got '{self.schedule}'.")

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(key_drop=self.rate, key_drop_shape=self.schedule)
