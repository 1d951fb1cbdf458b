"""A learned squashing in the place of a norm: Dynamic Tanh (Zhu et al., CVPR 2025), Derf (Chen et al., CVPR 2026)."""

import torch
from torch import Tensor, nn

from vitmods.layers.norms.contract import AffineNorm, Device, Dtype, norm_kind
from vitmods.ops.context import upcast


class Squashing(AffineNorm):
    """``gamma f(x) + beta`` with f of each number by itself, and learned numbers of f, one of each a layer, which start
    at ``start``. It does not take an eps.

    Shapes: (..., C) in and out. No statistics, no state. It is computed in float32 whatever the input type; the output
    has the input's type.
    """

    token_wise = True
    alpha: nn.Parameter

    def __init__(
        self,
        dim: int,
        affine: bool,
        device: Device,
        dtype: Dtype,
        **start: float,
    ) -> None:
        super().__init__(dim, affine=affine, device=device, dtype=dtype)
        del self.eps
        self.start = start
        for name, value in start.items():
            self.register_parameter(name, nn.Parameter(torch.full((1,), value, device=device, dtype=dtype)))

    def squash(self, x: Tensor) -> Tensor:
        """f, in the type of the statistics."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self.squash(upcast(x))
        return (y if self.weight is None or self.bias is None else torch.addcmul(self.bias, y, self.weight)).to(x.dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name, value in self.start.items():
            nn.init.constant_(self.get_parameter(name), value)

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
    """``y = gamma tanh(alpha x) + beta``; gamma 1 and beta 0 at first. See ``Squashing``."""

    def __init__(
        self, dim: int, affine: bool = True, alpha: float = 0.5, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__(dim, affine, device, dtype, alpha=alpha)

    def squash(self, x: Tensor) -> Tensor:
        return torch.tanh(upcast(self.alpha) * x)


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
    """``y = gamma erf(alpha x + s) + beta``, s being ``shift``; gamma 1 and beta 0 at first. See ``Squashing``."""

    shift: nn.Parameter

    def __init__(
        self,
        dim: int,
        affine: bool = True,
        alpha: float = 0.5,
        shift: float = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, affine, device, dtype, alpha=alpha, shift=shift)

    def squash(self, x: Tensor) -> Tensor:
        return torch.erf(torch.addcmul(upcast(self.shift), upcast(self.alpha), x))
