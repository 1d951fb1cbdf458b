"""The learnable half of a LayerNorm without its statistics: the "only learnable" ablation of Dual PatchNorm."""

import torch
from torch import Tensor, nn

from vitmods.layers.norms.contract import norm_kind


@norm_kind(
    "scale_shift",
    title="scale + shift",
    paper="Kumar, Dehghani & Houlsby: Dual PatchNorm. TMLR 2023, Table 6",
    url="https://openreview.net/forum?id=jgMqve6Qhw",
    how="nothing is normalized: a gain and a shift for each channel",
    published="as both norms of Dual PatchNorm: its ablation without statistics (Table 6)",
    replaces=False,
)
class ScaleShift(nn.Module):
    r"""A gain and a shift for each channel (Kumar et al., Dual PatchNorm, 2023, Table 6).

    .. math:: y = \gamma x + \beta

    Shapes: (..., C) in and out; the output has the input's type. Nothing is normalized, so there is no eps.
    """

    token_wise = image_wise = True

    def __init__(self, dim: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, x, self.weight).to(x.dtype)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
