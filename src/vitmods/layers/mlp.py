"""The feed-forward branch, with a norm slot after the activation."""

import torch
from torch import Tensor, nn

from vitmods.util.registry import Registry

MLPS: Registry[type[nn.Module]] = Registry("kind of MLP", "vitmods.layers")
"""Kinds of MLP. One is a class that is built as ``Mlp`` is (``act`` may be missing), names the linear maps that read
its input in ``readers``, writes its output by ``fc2``, and says in ``macs`` what it costs."""


@MLPS.register("mlp")
class Mlp(nn.Module):
    """``fc2(norm(dropout(act(fc1(x)))))`` followed by dropout; (..., C) in and out. Parameters named as in timm.

    ``norm`` is the inner slot (NormFormer, Sub-LN); ``act`` GELU, exact or with the tanh approximation.
    """

    readers = ("fc1",)

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

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))
        return out

    @staticmethod
    def macs(dim: int, hidden_dim: int) -> int:
        """Multiply-adds for one token."""
        return 2 * dim * hidden_dim
