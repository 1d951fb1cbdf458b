"""The feed-forward branch, with a norm slot after the activation."""

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """``fc2(norm(dropout(act(fc1(x)))))`` followed by dropout; (..., C) in and out. Parameters named as in timm.

    ``norm`` is the inner slot (NormFormer, Sub-LN); ``act`` GELU, exact or with the tanh approximation.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        act: nn.Module | None = None,
        norm: nn.Module | None = None,
        bias: bool = True,
        drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.act = act or nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.norm = norm or nn.Identity()
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias, device=device, dtype=dtype)
        self.drop2 = nn.Dropout(drop)
        self.recompute_frozen = False  # while not trained: fc1 runs again in backward, its output is not kept

    def hidden(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., hidden): what ``fc2`` reads."""
        return self.norm(self.drop1(self.act(self.fc1(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.hidden(x)))
