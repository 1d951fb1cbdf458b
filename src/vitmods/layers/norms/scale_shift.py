"""The learnable half of a LayerNorm without its statistics: the "only learnable" ablation of Dual PatchNorm."""

import torch
from torch import Tensor, nn


class ScaleShift(nn.Module):
    """``y = gamma * x + beta`` for each channel (Kumar et al., Dual PatchNorm, 2023, Table 6).

    Shapes: (..., C) in and out; the output has the input's type. Nothing is normalized, so there is no eps.
    """

    token_wise = True

    def __init__(self, dim: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, x, self.weight).to(x.dtype)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
