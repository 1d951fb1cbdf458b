"""Scaled dot-product attention that is not slow in bfloat16 on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` for each head, (B, H, N, D) each; the mask and dropout are PyTorch's.

    This is ``scaled_dot_product_attention``, but where it will be differentiated in bfloat16 on a CPU: PyTorch's own
    backward there takes 1.6 to 12 times its time in float32 (benchmarks/bf16.py), so that float32 is taken.
    """
    if _slow(q, k, v):
        mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.float()
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, dropout_p=dropout)
        return out.to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout)


def _slow(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not isinstance(q, Tensor) or q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return False
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
