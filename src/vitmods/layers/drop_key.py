"""DropKey (Li et al., CVPR 2023): dropout before the softmax of attention, by keys."""

import torch
from torch import Tensor, nn


class DropKey(nn.Module):
    """For the slot ``mask`` of attention: in training each query sees each key with probability ``1 - rate``, drawn for
    every image and head; the weights of what it sees still sum to 1. In evaluation it does nothing.

    Called with queries and keys (B, H, N, D) and the caller's mask or None; returns logits to add (B, H, N, N). A query
    that would see nothing sees everything alike.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, q: Tensor, k: Tensor, attn_mask: Tensor | None = None) -> Tensor | None:
        if not self.training or self.rate == 0:
            return attn_mask
        shape = (*q.shape[:-1], k.shape[-2])
        dropped = torch.rand(shape, device=q.device) < self.rate
        # Far below all logits, and no infinity, whose softmax over a whole row is not a number.
        hidden = torch.zeros(shape, dtype=q.dtype, device=q.device).masked_fill_(dropped, torch.finfo(q.dtype).min / 2)
        if attn_mask is None:
            return hidden
        if attn_mask.dtype == torch.bool:
            return hidden.masked_fill(~attn_mask, -torch.inf)
        return hidden + attn_mask.to(hidden.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"
