"""Instance normalization over the tokens of each image (Ulyanov, Vedaldi & Lempitsky, 2016)."""

from torch import Tensor

from vitmods.layers.norms.contract import AffineNorm, dtn_table, norm_kind, unbiased


@norm_kind(
    "instance",
    title="InstanceNorm",
    shorts=("instancenorm",),
    paper="Ulyanov, Vedaldi & Lempitsky: Instance Normalization. 2016",
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
    other token. Statistics are in float32 whatever the input type; the output has the input's type. Nothing is shared
    between images, so there is no state and nothing to synchronize.
    """

    least = 2

    def statistics(self, mean: Tensor, var: Tensor, length: Tensor | int) -> tuple[Tensor, Tensor]:
        return mean, unbiased(var, length)
