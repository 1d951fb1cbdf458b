"""Linear maps with weights in the memory layout that the CPU's matrix product reads fastest."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = 1 << 22
"""Multiply-adds below which the product takes less time than the call of oneDNN's."""


class PackedLinear(nn.Linear):
    """A linear map (..., in) -> (..., out) for inference on a CPU, optionally with the GELU that follows it.

    oneDNN, which PyTorch ships, wants the weights in blocks: they are laid out so once and kept next to the weights
    themselves, and made anew when those change (writes through ``.data`` leave no trace and are not seen). Without
    gradients, in float32 or bfloat16, the product then runs on that copy; in all other cases, and while compiling or
    exporting, this is ``F.linear`` with ``F.gelu``.
    """

    gelu: str | None = None
    """None, or the approximation of the GELU that follows: "none" or "tanh"."""

    @classmethod
    def of(cls, linear: nn.Linear, gelu: str | None = None) -> "PackedLinear":
        """Wrap a linear map; its parameters are shared, not copied."""
        packed = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        packed.weight, packed.bias, packed.gelu = linear.weight, linear.bias, gelu
        packed._blocks = None
        return packed.train(linear.training)

    _blocks: tuple[Any, Tensor] | None

    def forward(self, input: Tensor) -> Tensor:
        if not _fits(input, self.weight):
            plain = F.linear(input, self.weight, self.bias)
            return plain if self.gelu is None else F.gelu(plain, approximate=self.gelu)
        weight, name = self.weight, "none" if self.gelu is None else "gelu"
        key = (weight.data_ptr(), None if weight.is_inference() else weight._version, weight.dtype)
        if self._blocks is None or self._blocks[0] != key:
            self._blocks = key, torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        return torch.ops.mkldnn._linear_pointwise(input, self._blocks[1], self.bias, name, [], self.gelu or "")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_blocks": None}

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.gelu is None else f", gelu={self.gelu}")


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN's product may take this input: a plain tensor of the weights' type on the CPU, nothing that
    records gradients, casts, compiles or exports, not too small, and a PyTorch that has the product."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    if x.numel() * len(weight) < SMALL:
        return False
    if type(x) is not Tensor or x.device.type != "cpu" or x.dtype != weight.dtype or not torch.backends.mkldnn.enabled:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return x.dtype == torch.float32 or (
        x.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
