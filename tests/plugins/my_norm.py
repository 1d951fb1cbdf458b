"""A user's norm, in one file: each token divided by its largest channel."""

import torch
from torch import nn

from vitmods.layers.norms import norm_kind


@norm_kind(
    "peak",
    title="Peak norm",
    shorts=("peaknorm",),
    paper="ours",
    url="https://example.org",
    how="a token is divided by the largest of its channels",
    published="none",
    folds=True,
)
class PeakNorm(nn.Module):
    """``y = gamma x / (max |x| + eps)``, (..., C) in and out."""

    token_wise = image_wise = True

    def __init__(self, dim: int, eps: float = 1e-6, affine: bool = True, power: float = 1.0) -> None:
        super().__init__()
        if not eps > 0:
            raise ValueError(f"Peak norm: eps must be positive, got {eps}.")
        self.eps, self.power = eps, power
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x / (x.abs().amax(-1, keepdim=True) + self.eps) ** self.power
        return y if self.weight is None else (y * self.weight).to(x.dtype)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
