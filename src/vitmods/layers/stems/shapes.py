"""Patch sides and widths of the stems that have several layers: what fits, and what follows from a model's width."""

from vitmods.util.errors import UserError

LOCAL_CELLS = 4  # a side of a patch, in the local transformer's cells
LOCAL_DEPTH = 12
LOCAL_HEADS = 4


def hmlp_layers(embed_dim: int, patch_size: tuple[int, int]) -> list[tuple[int, int]]:
    """(kernel side, width) of each layer of the hMLP stem: 4 x 4 pixels first, then 2 x 2 neighbors up to the patch.

    Raises UserError unless the patch is a square with a side of 4, 8, 16, ... and the width a multiple of 4.
    """
    side = _square("hMLP", patch_size)
    halvings = (side // 4).bit_length() - 1
    if side != 4 << max(halvings, 0):
        raise UserError(
            f"The hMLP stem grows patches from 4 pixels by doubling: their side is 4, 8, 16, 32, ..., not {side}. "
            f"Use patch_size={4 << max(halvings, 0)}, or another stem."
        )
    if embed_dim % 4:
        raise UserError(f"The hMLP stem needs a width that is a multiple of 4, got {embed_dim}.")
    widths = [embed_dim // 4] * halvings + [embed_dim]
    return list(zip([4] + [2] * halvings, widths, strict=True))


def levit_widths(embed_dim: int, patch_size: tuple[int, int]) -> list[int]:
    """Width of each convolution of the LeViT stem; each halves the image and all but the first double the width.

    Raises UserError unless the patch is a square with a side of 2, 4, 8, ... and the width can be halved as often.
    """
    side = _square("LeViT", patch_size)
    convolutions = side.bit_length() - 1
    if side < 2 or side != 1 << convolutions:
        raise UserError(
            f"The LeViT stem halves the image with each convolution: the patch side is 2, 4, 8, 16, ..., not {side}."
        )
    if embed_dim % (side // 2):
        raise UserError(f"The LeViT stem needs a width that is a multiple of {side // 2}, got {embed_dim}.")
    return [embed_dim >> (convolutions - 1 - i) for i in range(convolutions)]


def local_width(embed_dim: int, patch_size: tuple[int, int]) -> int:
    """Width of the transformer inside a patch: 7/96 of the model's, a multiple of its heads.

    Raises UserError unless the sides of the patch are multiples of 4 pixels.
    """
    if patch_size[0] % LOCAL_CELLS or patch_size[1] % LOCAL_CELLS:
        raise UserError(
            f"The local-transformer stem cuts a patch into {LOCAL_CELLS} x {LOCAL_CELLS} cells: the sides of the patch "
            f"are multiples of {LOCAL_CELLS} pixels, not {patch_size[0]} x {patch_size[1]}."
        )
    return LOCAL_HEADS * max(1, round(embed_dim * 7 / 96 / LOCAL_HEADS))


def _square(name: str, patch_size: tuple[int, int]) -> int:
    if patch_size[0] != patch_size[1]:
        raise UserError(f"The {name} stem needs square patches, got {patch_size[0]} x {patch_size[1]} pixels.")
    return patch_size[0]
