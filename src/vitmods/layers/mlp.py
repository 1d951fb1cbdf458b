"""Feed-forward branches, with a norm slot before the last linear map: the MLP, and SwiGLU (Shazeer, 2020)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitmods.util.registry import Registry

MLPS: Registry[type[nn.Module]] = Registry("kind of MLP", "vitmods.layers")
"""Kinds of MLP. One is a class that is built as ``Mlp`` is (``act`` may be missing), names the linear maps that read
its input in ``readers``, writes its output by ``fc2``, and says in ``macs`` what it costs."""


class QuickGELU(nn.Module):
    """``x sigmoid(1.702 x)``, the approximation of GELU in CLIP's published weights (Hendrycks and Gimpel, 2016)."""

    token_wise = True

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class FeedForward(nn.Module):
    """``fc2(norm(dropout(hidden)))`` followed by dropout, where ``act`` (GELU) and the linear maps ``readers`` make
    ``hidden``; (..., C) in and out. Parameters named as in timm; ``norm`` is the inner slot (NormFormer, Sub-LN).
    """

    readers: ClassVar[tuple[str, ...]]

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
        for reader in self.readers:
            self.add_module(reader, nn.Linear(dim, hidden_dim, bias=bias, device=device, dtype=dtype))
        self.act = act or nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.norm = norm or nn.Identity()
        self.fc2 = nn.Linear(hidden_dim, dim, bias=bias, device=device, dtype=dtype)
        self.drop2 = nn.Dropout(drop)

    @classmethod
    def macs(cls, dim: int, hidden_dim: int) -> int:
        """Multiply-adds for one token."""
        return (len(cls.readers) + 1) * dim * hidden_dim


@MLPS.register("mlp")
class Mlp(FeedForward):
    """``fc2(norm(dropout(act(fc1(x)))))`` followed by dropout; ``act`` GELU, exact or with the tanh approximation."""

    readers = ("fc1",)
    fc1: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


@MLPS.register("swiglu")
class SwiGLU(FeedForward):
    """``fc2(norm(dropout(silu(fc1_g(x)) * fc1_x(x))))`` followed by dropout (Shazeer, 2020, GLU Variants Improve
    Transformer)."""

    readers = ("fc1_g", "fc1_x")
    fc1_g: nn.Linear
    fc1_x: nn.Linear

    def __init__(self, dim: int, hidden_dim: int, **options: Any) -> None:
        super().__init__(dim, hidden_dim, nn.SiLU(), **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1_g(x)) * self.fc1_x(x)))))
