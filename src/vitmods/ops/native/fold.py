"""Operators that multiply a norm's gain and shift into a linear map; what they compute is said in fold.cpp."""

from torch import Tensor

from vitmods.ops.native.operators import function, operator


def _fold_outputs(weight: Tensor, bias: Tensor | None, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(len(weight))


def _fold(weight: Tensor, bias: Tensor | None, gain: Tensor, shift: Tensor, folded: Tensor, offset: Tensor) -> None:
    function("fold", "fold", "ppppiipp")(weight, bias, gain, shift, *weight.shape, folded, offset)


def _backward_outputs(
    grad_folded: Tensor, grad_offset: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape[1]), weight.new_empty(weight.shape[1])


def _backward(
    grad_folded: Tensor, grad_offset: Tensor, weight: Tensor, gain: Tensor, shift: Tensor,
    grad_weight: Tensor, grad_gain: Tensor, grad_shift: Tensor,
) -> None:  # fmt: skip
    backward = function("fold", "fold_backward", "pppppiippp")
    given = grad_folded, grad_offset, weight, gain, shift
    backward(*given, *weight.shape, grad_weight, grad_gain, grad_shift)


fold = operator("fold", _fold_outputs, _fold)
fold_backward = operator("fold_backward", _backward_outputs, _backward)
