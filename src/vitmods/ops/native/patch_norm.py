"""``vitmods::patch_norm``: images (B, channels, height, width) to normalized patches (B, T, values), see
patch_norm.cpp. It has no derivative: where images or the norm's parameters need one, the Python form runs."""

from torch import Tensor

from vitmods.ops.native.operators import function, operator


def _outputs(images: Tensor, gain: Tensor, shift: Tensor, rows: int, columns: int, eps: float) -> Tensor:
    b, channels, height, width = images.shape
    return images.new_empty((b, (height // rows) * (width // columns), channels * rows * columns))


def _fill(images: Tensor, gain: Tensor, shift: Tensor, rows: int, columns: int, eps: float, patches: Tensor) -> None:
    cut = function("patch_norm", "patch_norm", "pppiiiiiifp")
    cut(images, gain, shift, *images.shape, rows, columns, eps, patches)


patch_norm = operator("patch_norm", _outputs, _fill)
