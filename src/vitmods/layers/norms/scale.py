"""ScaleNorm: tokens of a learned length (Nguyen & Salazar, 2019)."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.norms.contract import Device, Dtype, check, dtn_table, norm_kind
from vitmods.ops.context import upcast


@norm_kind(
    "scale",
    title="ScaleNorm",
    shorts=("scalenorm",),
    paper="Nguyen & Salazar: Transformers without Tears: Improving the Normalization of Self-Attention. IWSLT 2019",
    url="https://arxiv.org/abs/1910.05895",
    how="a token is divided by its length",
    published=dtn_table(80.0, 80.6),
    folds=True,
    unit=math.sqrt,
)
class ScaleNorm(nn.Module):
    r"""Divides by the norm over the last dimension; g starts at sqrt(C), so that fresh outputs are of size 1.

    .. math:: y = g \, \frac{x}{\max(\lVert x \rVert, \epsilon)}

    Shapes: (..., C) in and out. ``gain="channel"`` learns g for each channel, as in the code of Dynamic Token
    Normalization; ``"scalar"`` learns one g, as in the original paper. Without ``affine`` g stays sqrt(C). Statistics
    are in float32 whatever the input type; the output has the input's type. Every token, prefix tokens too, is
    normalized by itself: no state, nothing to synchronize. Raises ValueError on another gain or an eps that is not
    positive.
    """

    token_wise = image_wise = True

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        affine: bool = True,
        gain: Literal["channel", "scalar"] = "channel",
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        check("ScaleNorm", eps)
        if gain not in ("channel", "scalar"):
            raise ValueError(f"ScaleNorm(gain=...) is 'channel' or 'scalar', got '{gain}'.")
        self.dim, self.eps, self.gain = dim, eps, gain
        size = dim if gain == "channel" else 1
        start = torch.full((size,), math.sqrt(dim), device=device, dtype=dtype)
        self.weight = nn.Parameter(start) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        gain = math.sqrt(self.dim) if self.weight is None else self.weight
        return (F.normalize(upcast(x), dim=-1, eps=self.eps) * gain).to(x.dtype)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, math.sqrt(self.dim))

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, gain={self.gain}, affine={self.weight is not None}"
