"""A patch projection for another patch size (Beyer et al., 2023, FlexiViT, equation 4)."""

import torch
from torch import Tensor
from torch.nn import functional as F


def _resize_matrix(old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """(new pixels, old pixels): bilinear resizing of a patch, as a linear map."""
    basis = torch.eye(old[0] * old[1], dtype=torch.float64).reshape(-1, 1, *old)
    resized: Tensor = F.interpolate(basis, size=new, mode="bilinear", antialias=True)
    return resized.flatten(1).T


def resize_projection(weight: Tensor, new: tuple[int, int]) -> Tensor:
    """A kernel (C, in, rows, columns) for patches of ``new`` pixels.

    The pseudo-inverse of the resizing of patches: for enlarged patches the resized kernel gives on resized patches
    what the old one gave on the old patches, exactly.
    """
    matrix = _resize_matrix((weight.shape[-2], weight.shape[-1]), new).to(weight.device)
    resized = weight.double().flatten(2) @ torch.linalg.pinv(matrix)
    found: Tensor = resized.reshape(*weight.shape[:2], *new).to(weight.dtype)
    return found


def resize_pixels(values: Tensor, channels: int, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Values of a patch's pixels (channels * old pixels,) resized bilinearly to (channels * new pixels,)."""
    image = values.detach().double().reshape(1, channels, *old)
    return F.interpolate(image, size=new, mode="bilinear", antialias=True).flatten().to(values.dtype)
