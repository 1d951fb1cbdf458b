"""SwiGLU: a gated MLP (Shazeer, 2020, GLU Variants Improve Transformer)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.mlp import MLPS


@MLPS.register("swiglu")
class SwiGLU(nn.Module):
    """``fc2(norm(dropout(silu(fc1_g(x)) * fc1_x(x))))`` followed by dropout; (..., C) in and out. Parameters named as
    in timm; ``norm`` is the inner slot."""

    readers = ("fc1_g", "fc1_x")

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        norm: nn.Module | None = None,
        bias: bool = True,
        drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.fc1_x = nn.Linear(dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.drop1 = nn.Dropout(drop)
        self.norm = norm or nn.Identity()
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias, device=device, dtype=dtype)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.fc1_g(x)) * self.fc1_x(x)
        out: Tensor = self.drop2(self.fc2(self.norm(self.drop1(hidden))))
        return out

    @staticmethod
    def macs(dim: int, hidden_dim: int) -> int:
        """Multiply-adds for one token."""
        return 3 * dim * hidden_dim
