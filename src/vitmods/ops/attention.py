"""Scaled dot-product attention that is not slow in bfloat16 on a CPU."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = 320
"""Tokens up to which products may hold their N x N weights for backward; PyTorch's fused kernel is good beyond."""


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` for each head, (B, H, N, D) each; the mask and dropout are PyTorch's.

    This is ``scaled_dot_product_attention``, but where it will be differentiated in bfloat16 on a CPU: the backward of
    PyTorch's kernel takes 1.2 to 11 times its time in float32 there (benchmarks/bf16.py). Wide heads are then taken as
    plain products in bfloat16, narrow ones in float32.
    """
    kernel = _kernel_for(q, k, v, dropout)
    if kernel == "fused":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout)
    if kernel == "float32":
        mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.float()
        with torch.autocast("cpu", enabled=False):  # which would take it back
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask).to(v.dtype)
    logits = (q * q.shape[-1] ** -0.5) @ k.mT
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if boolean else logits + attn_mask.to(logits.dtype)
    return logits.softmax(-1) @ v


def _kernel_for(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Literal["fused", "float32", "products"]:
    if not isinstance(q, Tensor) or q.dtype != torch.bfloat16 or q.device.type != "cpu" or dropout:
        return "fused"
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if torch.compiler.is_compiling() or not differentiated:
        return "fused"
    if q.shape[-1] < 32 or k.shape[-2] < 32 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "float32"
    return "products" if k.shape[-2] <= LARGEST else "fused"
