"""Dynamic Tanh (Zhu et al., CVPR 2025): a learned squashing in the place of a norm."""

import torch
from torch import Tensor

from vitmods.layers.norms.contract import AffineNorm, norm_kind
from vitmods.ops.context import upcast


class Squashing(AffineNorm):
    """``gamma f(x) + beta`` with f of each number by itself: what DyT and Derf share. There is no eps."""

    token_wise = True

    def __init__(self, dim: int, affine: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__(dim, 1.0, affine, device, dtype)
        del self.eps

    def squash(self, x: Tensor) -> Tensor:
        """In the type of the statistics."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.squash(upcast(x))
        return (y if self.weight is None or self.bias is None else torch.addcmul(self.bias, y, self.weight)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, affine={self.weight is not None}"


@norm_kind(
    "dyt",
    title="Dynamic Tanh",
    shorts=("dyt",),
    paper="Zhu et al.: Transformers without Normalization. CVPR 2025",
    url="https://arxiv.org/abs/2503.10622",
    how="no statistics: each number goes through a tanh with one learned slope a layer",
    published="ImageNet-1k top-1 against LayerNorm: ViT-B 82.3 to 82.5, ViT-L 83.1 to 83.6",
    folds=True,
)
class DynamicTanh(Squashing):
    """``y = gamma tanh(alpha x) + beta`` with one alpha a layer, which starts at ``alpha``; gamma 1, beta 0.

    Shapes: (..., C) in and out. Every number by itself: no statistics, no eps, no state. It is computed in float32
    whatever the input type; the output has the input's type.
    """

    def __init__(
        self,
        dim: int,
        affine: bool = True,
        alpha: float = 0.5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, affine, device, dtype)
        self.start = alpha
        self.alpha = torch.nn.Parameter(torch.full((1,), alpha, device=device, dtype=dtype))

    def squash(self, x: Tensor) -> Tensor:
        return torch.tanh(upcast(self.alpha) * x)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        torch.nn.init.constant_(self.alpha, self.start)
