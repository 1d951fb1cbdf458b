"""Operators for moments over tokens and the map that norms make of them; what they compute is said in moments.cpp.

x is (B, N, C); scale and shift are (B, 1, C) or (1, 1, C).
"""

from torch import Tensor

from vitmods.ops.native.operators import function, operator


def _step(scale: Tensor) -> int:
    return scale.shape[-1] if len(scale) > 1 else 0


def _moments_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    b, _, c = x.shape
    return x.new_empty((b, 1, c)), x.new_empty((b, 1, c))


def _moments(x: Tensor, mean: Tensor, var: Tensor) -> None:
    function("moments", "moments", "piiipp")(x, *x.shape, mean, var)


def _map_outputs(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _map(x: Tensor, scale: Tensor, shift: Tensor, y: Tensor) -> None:
    function("moments", "scale_shift", "pppiiiiip")(x, scale, shift, *x.shape, _step(scale), _step(shift), y)


def _sums_outputs(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return _moments_outputs(x)


def _sums(grad: Tensor, x: Tensor, sum_grad_x: Tensor, sum_grad: Tensor) -> None:
    function("moments", "scale_shift_sums", "ppiiipp")(grad, x, *x.shape, sum_grad_x, sum_grad)


def _backward_outputs(grad: Tensor, x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _backward(grad: Tensor, x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor, dx: Tensor) -> None:
    backward = function("moments", "scale_shift_backward", "pppppiiiip")
    backward(grad, x, scale, slope, offset, *x.shape, _step(scale), dx)


moments = operator("moments", _moments_outputs, _moments)
scale_shift = operator("scale_shift", _map_outputs, _map)
scale_shift_sums = operator("scale_shift_sums", _sums_outputs, _sums)
scale_shift_backward = operator("scale_shift_backward", _backward_outputs, _backward)
