"""Operators for root mean square normalization of rows in groups; what they compute is said in rms.cpp."""

from torch import Tensor

from vitmods.ops.native.operators import function, operator


def _forward_outputs(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], groups))


def _forward(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, groups: int, eps: float, y: Tensor, r: Tensor
) -> None:
    c = x.shape[-1]
    function("rms", "rms_forward", "pppiiifpp")(x, gain, shift, x.numel() // c, c, groups, eps, y, r)


def _means_outputs(x: Tensor, groups: int, eps: float) -> Tensor:
    return x.new_empty(x.shape[-1:])


def _means(x: Tensor, groups: int, eps: float, means: Tensor) -> None:
    c = x.shape[-1]
    function("rms", "rms_quadratic_means", "piiifp")(x, x.numel() // c, c, groups, eps, means)


def _backward_outputs(
    grad: Tensor, x: Tensor, gain: Tensor | None, pull: Tensor | None, r: Tensor, shifted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:]), x.new_empty(x.shape[-1] if shifted else 0)


def _backward(
    grad: Tensor, x: Tensor, gain: Tensor | None, pull: Tensor | None, r: Tensor, shifted: bool,
    dx: Tensor, sum_grad_z: Tensor, sum_grad: Tensor,
) -> None:  # fmt: skip
    c, groups, sums = x.shape[-1], r.shape[-1], sum_grad if shifted else None
    backward = function("rms", "rms_backward", "pppppiiippp")
    backward(grad, x, gain, pull, r, x.numel() // c, c, groups, dx, sum_grad_z, sums)


forward = operator("rms_forward", _forward_outputs, _forward)
quadratic_means = operator("rms_quadratic_means", _means_outputs, _means)
backward = operator("rms_backward", _backward_outputs, _backward)
