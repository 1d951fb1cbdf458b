"""Contrast, saturation, elastic transform, pixelation and JPEG."""

import io
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitmods.data.corruptions.draws import Draws
from vitmods.data.corruptions.filters import gaussian, levels, unit
from vitmods.data.corruptions.tables import Strength
from vitmods.util.errors import UserError


def contrast(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Every channel is drawn towards its mean over the image."""
    (kept,) = strength
    pixels = images.shape[-2] * images.shape[-1]
    means = images.sum((2, 3), keepdim=True).double() / (255 * pixels)  # summed as integers: exact in any order
    return levels(unit(images).sub_(means).mul_(kept).add_(means))


def saturate(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Saturation (of hue, saturation, value) becomes saturation x factor + more; gray has the hue of red."""
    factor, more = strength
    if images.shape[1] != 3:
        raise UserError("The corruption 'saturate' needs color; these images are gray. Leave it out.")
    values = unit(images)
    brightest, darkest = values.amax(1, keepdim=True), values.amin(1, keepdim=True)
    span = brightest - darkest
    red = torch.tensor([0.0, 1.0, 1.0], dtype=values.dtype).view(3, 1, 1)
    below = torch.where(span > 0, (brightest - values) / span, red)  # how far down to the darkest channel, 0 to 1
    saturation = torch.where(brightest > 0, span / brightest, 0)
    return levels(brightest * (1 - (saturation * factor + more).clamp(0, 1) * below))


def elastic_transform(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A random affine map, then a smooth random displacement of every pixel; lengths in short sides of the image."""
    height, width = images.shape[-2:]
    amount, sigma, jitter = (part * min(height, width) for part in strength)
    moves = draws.uniform(3, 2, low=-jitter, high=jitter)
    values = _sample(unit(images), _affine(moves, height, width), edge_repeated=False)
    fields = gaussian(draws.uniform(2, height, width, low=-1), sigma, reflect=True, truncate=3) * amount
    return levels(_sample(values, _grid(height, width) + fields.permute(0, 2, 3, 1), edge_repeated=True))


def _grid(height: int, width: int) -> Tensor:
    """(H, W, 2): x and y of each pixel."""
    y, x = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    return torch.stack((x, y), -1)


def _affine(moves: Tensor, height: int, width: int) -> Tensor:
    """Where each pixel comes from, x and y (B, H, W, 2), if three points around the center go by moves (B, 3, 2)."""
    center = torch.tensor([width // 2, height // 2]).double()
    points = center + torch.tensor([[1, 1], [1, -1], [-1, -1]]) * (min(height, width) // 3)
    targets = torch.cat((points + moves, torch.ones(len(moves), 3, 1)), -1)
    back = torch.linalg.solve(targets, points.expand(len(moves), -1, -1))  # (B, 3, 2)
    return _grid(height, width) @ back[:, None, :2] + back[:, None, 2:]


def _sample(values: Tensor, places: Tensor, *, edge_repeated: bool) -> Tensor:
    """Images at places x, y (B, H, W, 2), in pixels, linearly interpolated; beyond the edge they are mirrored."""
    size = torch.tensor([values.shape[-1], values.shape[-2]])
    where = (2 * places + 1) / size - 1 if edge_repeated else 2 * places / (size - 1) - 1
    return F.grid_sample(values, where, mode="bilinear", padding_mode="reflection", align_corners=not edge_repeated)


def pixelate(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Shrunk to `part` of its sides by averaging boxes, then enlarged again, both by Pillow."""
    (part,) = strength
    height, width = images.shape[-2:]
    small = (int(width * part), int(height * part))

    def change(image: Image.Image) -> Image.Image:
        box = Image.Resampling.BOX
        return image.resize(small, box).resize((width, height), box)

    return _by_pillow(images, change)


def jpeg_compression(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Written as a JPEG file of this quality by Pillow, and read again."""
    (quality,) = strength

    def change(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=int(quality))
        return Image.open(file)

    return _by_pillow(images, change)


def _by_pillow(images: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Each image goes to Pillow, (H, W, 3) or (H, W), and comes back."""
    gray = images.shape[1] == 1
    stacked = (images[:, 0] if gray else images.permute(0, 2, 3, 1)).contiguous().numpy()
    changed = torch.from_numpy(np.stack([np.asarray(change(Image.fromarray(img))) for img in stacked]))
    return changed[:, None] if gray else changed.permute(0, 3, 1, 2).contiguous()
