"""The positional half of gated positional self-attention (d'Ascoli et al., 2021, ConViT), without a T x T matrix."""

from typing import Literal

import torch
from torch import Tensor, nn

from vitmods.layers.norms.dynamic_token import start_kernels
from vitmods.layers.position import check_tokens
from vitmods.ops.separable import Grid, axis_kernels, columns, rows


class GatedPositions(nn.Module):
    """Mixes what heads read by content with what a learned kernel over the grid reads of the same values v:

    ``(1 - s) softmax(q k^T / sqrt(D)) v + s P v`` for each head, ``s = sigmoid(gate)``,
    ``P[i, j] = softmax_j(a . [dx^2 + dy^2, dx, dy])``, dx in columns and dy in rows from token i to token j.

    P is Dynamic Token Normalization's (its equation 6), a product of one kernel over rows and one over columns. Both
    softmaxes come before the mixture, so ``P v`` is taken by itself: exact at T (rows + columns) C multiply-adds, and
    any fast attention serves for the other half. Any grid works with the same parameters: set ``grid_size``.

    Prefix tokens are not on the grid: they read by content, and P reads none of them.

    Args:
        num_heads: heads H.
        grid_size: (rows, columns).
        prefix_tokens: class and register tokens in front of the grid.
        init: of a, as in DynamicTokenNorm: "local" or "noise".
        gate: where the logits of P's share start; 1 as published.
    """

    takes = ("num_heads", "grid_size", "prefix_tokens")

    def __init__(
        self,
        num_heads: int,
        grid_size: Grid,
        prefix_tokens: int = 0,
        init: Literal["local", "noise"] = "local",
        gate: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid_size, self.prefix_tokens, self.init, self.start = grid_size, prefix_tokens, init, gate
        self.a = nn.Parameter(torch.empty(num_heads, 3, device=device, dtype=dtype))
        self.gate = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        start_kernels(self.a, self.init, sequence=self.grid_size[0] == 1)
        nn.init.constant_(self.gate, self.start)

    def forward(self, read: Tensor, v: Tensor) -> Tensor:
        """read (B, H, queries, D), what the first queries read by content, and v (B, H, N, D) -> as read.

        Raises ValueError when N is not ``prefix_tokens`` + rows * columns.
        """
        prefix, queries = self.prefix_tokens, read.shape[2]
        check_tokens(v.shape[2], "positions in attention", self.grid_size, prefix)
        if queries <= prefix:
            return read
        px, py = (kernel.to(v.dtype) for kernel in self.kernels(self.grid_size))
        x = v[:, :, prefix:].unflatten(2, self.grid_size).permute(1, 3, 2, 0, 4).contiguous()
        around = rows(py, columns(px, x)).permute(3, 0, 2, 1, 4).flatten(2, 3)[:, :, : queries - prefix]  # P v
        patches = torch.lerp(read[:, :, prefix:], around.to(read.dtype), self._fraction(read))
        return torch.cat([read[:, :, :prefix], patches], dim=2) if prefix else patches

    def mix_weights(self, weights: Tensor) -> Tensor:
        """Attention weights of content (B, H, N, N) -> those of the mixture; to look at."""
        prefix, fraction = self.prefix_tokens, self._fraction(weights)
        check_tokens(weights.shape[-1], "positions in attention", self.grid_size, prefix)
        px, py = self.kernels(self.grid_size)
        p = torch.einsum("hrs,hcw->hrcsw", py, px).flatten(3).flatten(1, 2)
        mixed = weights.clone()
        mixed[:, :, prefix:] *= 1 - fraction
        mixed[:, :, prefix:, prefix:] += fraction * p.to(weights.dtype)
        return mixed

    def kernels(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """P as its factors over columns and rows, (H, columns, columns) and (H, rows, rows), in float32 at least."""
        return axis_kernels(self.a.to(torch.promote_types(self.a.dtype, torch.float32)), grid)

    def _fraction(self, like: Tensor) -> Tensor:
        return torch.sigmoid(self.gate).to(like.dtype).view(-1, 1, 1)

    def extra_repr(self) -> str:
        return f"num_heads={len(self.gate)}, grid_size={self.grid_size}, prefix_tokens={self.prefix_tokens}"
