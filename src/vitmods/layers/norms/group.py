"""Normalization over the tokens of each image, by channel (Ulyanov et al., 2016) or by group (Wu & He, 2018)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitmods.layers.norms.contract import AffineNorm, Device, Dtype, dtn_table, norm_kind, unbiased
from vitmods.ops.context import upcast
from vitmods.ops.padding import padding_of


@norm_kind(
    "group",
    title="GroupNorm",
    shorts=("groupnorm",),
    paper="Wu & He: Group Normalization. ECCV 2018",
    url="https://arxiv.org/abs/1803.08494",
    how="statistics over the tokens of an image and the channels of a head",
    published=dtn_table(78.3, 79.5),
    folds=True,
)
class GroupNorm(AffineNorm):
    r"""Normalizes with statistics over all tokens and the channels of a group, for each image; biased variance.

    .. math:: y = \gamma \, \frac{x - \mathrm{mean}}{\sqrt{\mathrm{var} + \epsilon}} + \beta

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Groups are the attention heads unless ``groups`` is given
    (as in the code of Dynamic Token Normalization); they must divide the channels, else ValueError. Prefix tokens are
    counted as any other token. Statistics are in float32 whatever the input type; the output has the input's type.
    Images share nothing: without state, nothing is synchronized.
    """

    takes = ("num_heads",)

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        affine: bool = True,
        groups: int | None = None,
        num_heads: int = 1,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(dim, eps, affine, device, dtype)
        self.group(num_heads if groups is None else groups)

    def normalize(self, x: Tensor) -> Tensor:
        if padding_of(self, x) is not None:
            return super().normalize(x)
        weight, bias = (None if p is None else upcast(p) for p in (self.weight, self.bias))
        channels_first = upcast(x).transpose(-1, -2)[..., None]  # as an image whose channels are last in memory
        return F.group_norm(channels_first, self.groups, weight, bias, self.eps)[..., 0].transpose(-1, -2).to(x.dtype)

    def statistics(self, mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        means, variances = (torch.unflatten(m, -1, (self.groups, -1)) for m in (mean, var))
        center = means.mean(-1, keepdim=True)
        spread = (variances + (means - center).square()).mean(-1, keepdim=True)
        return center.expand_as(means).flatten(-2), spread.expand_as(means).flatten(-2)


@norm_kind(
    "instance",
    title="InstanceNorm",
    shorts=("instancenorm",),
    paper="Ulyanov, Vedaldi & Lempitsky: Instance Normalization: The Missing Ingredient for Fast Stylization. 2016",
    url="https://arxiv.org/abs/1607.08022",
    how="statistics over the tokens of an image, for each channel",
    published=dtn_table(77.7, 77.6),
    least_tokens=2,
    folds=True,
)
class InstanceNorm(AffineNorm):
    r"""Normalizes with statistics over the tokens, for each image and channel.

    .. math:: y = \gamma \, \frac{x - \mathrm{mean}}{\sqrt{\mathrm{var} + \epsilon}} + \beta

    Shapes: (B, N, C) or (B, rows, columns, C) in and out, N at least 2 (else ValueError). The variance is unbiased
    (divided by N - 1), as in the code that Dynamic Token Normalization compares with. Prefix tokens are counted as any
    other token. Statistics are in float32 whatever the input type; the output has the input's type. It is
    stateless: nothing is synchronized.
    """

    least = 2

    def statistics(self, mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        return mean, unbiased(var, length)
