"""A faster linear map for inference on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional as F


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` (..., in) -> (..., out), by oneDNN's product where no gradient is recorded: on the CPUs that we
    measured (benchmarks/stem.py) a tenth faster than the default one, equal up to float32 rounding.

    Falls back to ``F.linear`` for other devices and types, under autocast, and when compiling or exporting.
    """
    if onednn_fits(x, torch.float32):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def onednn_fits(x: Tensor, *types: torch.dtype) -> bool:
    """Whether oneDNN's product may take this input of one of the ``types``: a plain tensor on the CPU, nothing that
    records gradients, casts, compiles, exports or traces, and a PyTorch that has the product."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    plain = x.device.type == "cpu" and x.dtype in types and type(x) is Tensor
    return bool(plain and torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
