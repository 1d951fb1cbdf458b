"""Patch dropout: training on a random part of each image's patches."""

from dataclasses import dataclass

from vitmods.changes.base import Change
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class PatchDropout(Change):
    """Each training step leaves a fraction ``rate`` of the patches of every image out, drawn anew, after their
    positions are added; class and register tokens stay (Liu et al., 2023). What is left out is not computed, so a step
    takes about ``1 - rate`` of its time. Evaluation sees all patches, and weights stay as they are.

    Raises UserError where patches cannot be left out: stems that mix them, and what reads their whole grid
    (``dtn``, ``gpsa``).
    """

    name = "patchdropout"
    title = "Patch dropout"
    paper = "Liu et al.: PatchDropout: Economizing Vision Transformers Using Patch Dropout. WACV 2023"
    url = "https://arxiv.org/abs/2208.07220"
    summary = "Trains on a random half of each image's patches, in about half the time."
    cost = "no parameters; about the fraction of training multiply-adds that is kept, all of them in evaluation"
    published = "at least 50 % fewer FLOPs and less memory in training on images as ImageNet's (abstract)"
    acts_in = "training"
    words = ("patch_dropout", "patch_drop")
    preserves = "function"
    fills = frozenset({Slot.PATCHES_KEPT})

    rate: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise UserError(f"patchdropout(rate=...) is a fraction between 0 and 1, got {self.rate}.")

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(patch_drop=self.rate)
