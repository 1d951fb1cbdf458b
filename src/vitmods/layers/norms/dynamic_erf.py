"""Derf (Chen et al., CVPR 2026): a learned error function in the place of a norm."""

import torch
from torch import Tensor

from vitmods.layers.norms.contract import norm_kind
from vitmods.layers.norms.dynamic_tanh import Squashing
from vitmods.ops.context import upcast


@norm_kind(
    "derf",
    title="Derf",
    shorts=("derf",),
    paper="Chen et al.: Stronger Normalization-Free Transformers. CVPR 2026",
    url="https://arxiv.org/abs/2512.10938",
    how="no statistics: each number goes through an error function with one learned slope and shift a layer",
    published="ImageNet-1k top-1: ViT-B 82.3 with LayerNorm, 82.5 with DyT, 82.8 with Derf",
    folds=True,
)
class DynamicErf(Squashing):
    """``y = gamma erf(alpha x + s) + beta`` with one alpha and one s a layer, which start at ``alpha`` and ``shift``.

    Shapes: (..., C) in and out. Every number by itself: no statistics, no eps, no state. It is computed in float32
    whatever the input type; the output has the input's type.
    """

    def __init__(
        self,
        dim: int,
        affine: bool = True,
        alpha: float = 0.5,
        shift: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, affine, device, dtype)
        self.start = alpha, shift
        self.alpha = torch.nn.Parameter(torch.full((1,), alpha, device=device, dtype=dtype))
        self.shift = torch.nn.Parameter(torch.full((1,), shift, device=device, dtype=dtype))

    def squash(self, x: Tensor) -> Tensor:
        return torch.erf(torch.addcmul(upcast(self.shift), upcast(self.alpha), x))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for parameter, start in zip((self.alpha, self.shift), self.start, strict=True):
            torch.nn.init.constant_(parameter, start)
