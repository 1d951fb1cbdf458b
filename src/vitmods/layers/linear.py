"""A linear map for inference on a CPU, by the library that PyTorch ships and does not use for it in float32."""

import torch
from torch import Tensor
from torch.nn import functional as F


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` (..., in) -> (..., out), by oneDNN's product where no gradient is recorded: on the CPUs that we
    measured (benchmarks/stem.py) a tenth faster than the default one, equal up to float32 rounding.

    Falls back to ``F.linear`` for other devices and types, under autocast, and when compiling or exporting.
    """
    if _onednn_fits(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _onednn_fits(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and type(x) is Tensor
    return bool(plain and torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
