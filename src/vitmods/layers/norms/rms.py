"""Root mean square normalization (Zhang & Sennrich, 2019): no centering, no bias."""

import torch
from torch import Tensor, nn

from vitmods.layers.norms.contract import Device, Dtype, check, norm_kind
from vitmods.ops.rms import rms_norm


@norm_kind(
    "rms",
    title="RMSNorm",
    shorts=("rms", "rmsnorm"),
    paper="Zhang & Sennrich: Root Mean Square Layer Normalization. NeurIPS 2019",
    url="https://arxiv.org/abs/1910.07467",
    how="a token is divided by the root mean square of its channels",
    published="none for ViTs; as part of Dual PatchNorm it loses 0.0 to 1.7 (Dual PatchNorm, Table 6)",
    folds=True,
)
class RMSNorm(nn.Module):
    r"""Divides by the root mean square over the last dimension.

    .. math:: y = \gamma \, \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}

    Shapes: (B, N, C) or (B, rows, columns, C) in and out. Statistics are in float32 whatever the input type; the
    output has the input's type. Every token is normalized by itself. Raises ValueError on an eps that is not positive,
    and on an input of another width.
    """

    token_wise = image_wise = True

    def __init__(
        self, dim: int, eps: float = 1e-6, affine: bool = True, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__()
        check("RMSNorm", eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None and len(self.weight) != x.shape[-1]:
            raise ValueError(f"This norm has {len(self.weight)} channels and the input {x.shape[-1]}.")
        return rms_norm(x, self.weight, self.eps)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, affine={self.weight is not None}"
