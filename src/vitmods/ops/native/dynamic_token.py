"""Native operators for dynamic token normalization; ../separable.py defines what they compute.

x is (B, T, C); px (H, columns, columns) and py (H, rows, rows); the mixes are (H,), weight and bias (C,).
"""

import torch
from torch import Tensor

from vitmods.ops.native import function, operator


def _sizes(x: Tensor, px: Tensor, py: Tensor, eps: float, unbiased: bool) -> tuple[float, ...]:
    heads, columns, _ = px.shape
    return len(x), py.shape[-1], columns, x.shape[-1], heads, eps, unbiased, torch.get_num_threads()


def _forward_outputs(
    x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor, bias: Tensor,
    eps: float, unbiased: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


def _forward(
    x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor, bias: Tensor,
    eps: float, unbiased: bool, y: Tensor,
) -> None:  # fmt: skip
    norm = function("dynamic_token", "dynamic_token_forward", "ppppppppiiiiifii")
    norm(x, px, py, mix_mean, mix_var, weight, bias, y, *_sizes(x, px, py, eps, unbiased))


def _backward_outputs(
    grad: Tensor, x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor,
    eps: float, unbiased: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gx, gpx, gpy, gmix_mean, gmix_var, gweight, gbias = (
        t.new_empty(t.shape) for t in (x, px, py, mix_mean, mix_var, weight, weight)
    )
    return gx, gpx, gpy, gmix_mean, gmix_var, gweight, gbias


def _backward(
    grad: Tensor, x: Tensor, px: Tensor, py: Tensor, mix_mean: Tensor, mix_var: Tensor, weight: Tensor,
    eps: float, unbiased: bool, *outputs: Tensor,
) -> None:  # fmt: skip
    backward = function("dynamic_token", "dynamic_token_backward", "ppppppppppppppiiiiifii")
    backward(grad, x, px, py, mix_mean, mix_var, weight, *outputs, *_sizes(x, px, py, eps, unbiased))


forward = operator("dynamic_token_norm", _forward_outputs, _forward)
backward = operator("dynamic_token_norm_backward", _backward_outputs, _backward)
