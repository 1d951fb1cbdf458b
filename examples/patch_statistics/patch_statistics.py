"""An idea as a plugin: each token is told the brightness and the contrast of its patch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitmods import ViTConfig
from vitmods.changes import Change
from vitmods.layers.stems import STEMS, LinearStem, StemSize, patchify
from vitmods.model.slots import Slot


@STEMS.register("patch_statistics")
class PatchStatisticsStem(LinearStem):
    """``proj(p) + [mean(p), log std(p)] W`` for each patch p; (B, channels, height, width) -> (B, T, C).

    W, (2, C), begins at zero: the model first computes what it computed without W.
    """

    title, around, published_norm = "linear, brightness and contrast", False, None

    def __init__(self, size: StemSize, **slots: Any) -> None:
        super().__init__(size, **slots)
        self.statistics = nn.Parameter(torch.zeros(2, size.embed_dim))

    @classmethod
    def macs(cls, size: StemSize) -> int:
        return super().macs(size) + 2 * size.patches * size.embed_dim

    def project(self, images: Tensor) -> Tensor:
        return super().project(images) + self._told(patchify(images, self.patch_size))

    def project_patches(self, patches: Tensor) -> Tensor:  # where only some patches are visible
        return super().project_patches(patches) + self._told(patches)

    def _told(self, patches: Tensor) -> Tensor:
        variance, mean = torch.var_mean(patches, dim=-1, correction=0)
        return torch.stack([mean, (variance + 1e-4).log() / 2], dim=-1) @ self.statistics


@dataclass(frozen=True)
class PatchStatistics(Change):
    """The stem `patch_statistics` in place of the linear one."""

    name = "patch_statistics"
    title = "Patch statistics"
    paper = "ours"
    url = "https://example.org"
    summary = "Adds a learned map of each patch's mean and log standard deviation to its token."
    cost = "2 width parameters"
    published = "none"
    fills = frozenset({Slot.STEM})
    preserves = "function"

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(stem=replace(config.stem, kind="patch_statistics"))
