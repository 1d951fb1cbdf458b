"""What a file of tensors does not say outright: the size of the images and the number of heads."""

from collections.abc import Mapping
from math import isqrt

from torch import Tensor

from vitmods.model.names import SIZES
from vitmods.util.errors import UserError

Size = int | tuple[int, int] | None


def need(source: str, tensors: Mapping[str, Tensor], name: str, dimensions: int) -> Tensor:
    """A tensor that every file of this kind holds. Raises UserError without it or with another number of axes."""
    if name not in tensors:
        raise UserError(f"{source} cannot be read: it has no tensor {name}.")
    if tensors[name].dim() != dimensions:
        raise UserError(
            f"{source} cannot be read: {name} has shape {tuple(tensors[name].shape)}, expected {dimensions} axes."
        )
    return tensors[name]


def count_blocks(source: str, names: list[str], before: str) -> int:
    """How many blocks there are with names such as ``before``, the block's number, and a dot or slash."""
    rest = {name.removeprefix(before).replace("/", ".").partition(".")[0] for name in names if name.startswith(before)}
    numbers = sorted(int(part) for part in rest if part.isdigit())
    if not numbers or numbers != list(range(len(numbers))):
        raise UserError(f"{source} cannot be read: its blocks are numbered {numbers}, expected 0, 1, 2 and so on.")
    return len(numbers)


def image_size(
    source: str, positions: int | None, prefix: int, patch: tuple[int, int], asked: Size
) -> tuple[tuple[int, int], bool]:
    """(rows, columns) of the images in pixels, and whether the ``prefix`` tokens have positions too.

    Without ``asked`` the patches form a square. Raises UserError when the number of positions allows no answer or
    two, or contradicts ``asked``.
    """
    if asked is not None:
        size = (asked, asked) if isinstance(asked, int) else (asked[0], asked[1])
        patches = (size[0] // patch[0]) * (size[1] // patch[1])
        if positions not in (None, patches, patches + prefix):
            raise UserError(
                f"{source} has {positions} positions, and img_size={size} needs {patches}"
                + (f" or {patches + prefix}" if prefix else "")
                + ": give the size that it was trained at, and call set_input_size afterwards."
            )
        return size, positions is not None and positions != patches
    if positions is None:
        raise UserError(f"{source} has no learned positions that tell the size of its images: give img_size.")
    found = []
    for on_prefix in (False, True) if prefix else (False,):
        patches = positions - prefix * on_prefix
        if patches > 0 and isqrt(patches) ** 2 == patches:
            found.append(((isqrt(patches) * patch[0], isqrt(patches) * patch[1]), on_prefix))
    if len(found) != 1:
        raise UserError(
            f"{source} has {positions} positions, which is {'no' if not found else 'more than one'} square of patches "
            f"with {prefix} tokens before them: give img_size, (rows, columns) in pixels."
        )
    return found[0]


def heads_of_width(source: str, width: int) -> int:
    """The number of heads in the published ViTs of this width. Raises UserError when there is none."""
    for size in ("Ti", "S", "B", "L", "H"):
        if SIZES[size][0] == width:
            return SIZES[size][3]
    raise UserError(
        f"{source} does not say how many heads it has, and no published ViT is {width} wide: give num_heads."
    )
