"""Spatter: drops of water (severities 1 to 3) or of mud (4 and 5) on the lens.

Edges, distances and equalization are defined as OpenCV defines them, which the published scripts call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitmods.data.corruptions.draws import Draws
from vitmods.data.corruptions.filters import gaussian, gray, levels, unit
from vitmods.data.corruptions.tables import Strength

_WATER, _MUD = (175, 238, 238), (63, 42, 20)
_LOW, _HIGH = 50, 150  # thresholds of the edges
_FAR = 20  # distances are cut off here, in pixels
_KNIGHT, _DIAGONAL = 2.1969, 1.4  # lengths of the moves (2, 1) and (1, 1); (1, 0) is 1
_TAN_22 = 13573  # tan(22.5 degrees), in parts of 2**15


def spatter(images: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Smoothed noise above a threshold is liquid. Water glistens by the distance to the drops' edges, mud covers."""
    mean, std, sigma, threshold, last, mud = strength
    liquid = gaussian(draws.normal(1, *images.shape[-2:]) * std + mean, sigma)
    values = unit(images)
    color = torch.tensor(_MUD if mud else _WATER).double().div(255).view(1, 3, 1, 1)
    color = color if images.shape[1] == 3 else gray(color)
    if mud:
        cover = gaussian((liquid > threshold).double(), last)
        cover = cover.masked_fill(cover < 0.8, 0)
        return levels(values * (1 - cover) + color * cover)
    drops = levels(liquid.masked_fill(liquid < threshold, 0)).double()
    shine = drops * _relief(edges(drops))
    brightest = shine.amax((1, 2, 3), keepdim=True)
    shine = torch.where(brightest > 0, shine / brightest, 0) * last
    return levels(values + shine * color)


def _relief(edge: Tensor) -> Tensor:
    """How strongly water shines (B, 1, H, W), 0 to 255, from where the drops' edges are."""
    near = _box_blur(distance(edge)).add(1e-6).floor()
    emboss = torch.tensor([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=near.dtype)
    return _box_blur(_filter(_equalized(near), emboss, "reflect").clamp(0, 255)).round()


def edges(drops: Tensor) -> Tensor:
    """Canny's edges, bool (B, 1, H, W), of whole numbers 0 to 255 (B, 1, H, W): |dx| + |dy| of the Sobel operator,
    thinned along the gradient, above 150 or above 50 and connected to such."""
    smooth, slope = torch.tensor([1.0, 2, 1]).double(), torch.tensor([-1.0, 0, 1]).double()
    dx = _filter(drops, smooth[:, None] * slope, "replicate")
    dy = _filter(drops, slope[:, None] * smooth, "replicate")
    strength = dx.abs() + dy.abs()
    across = dx.abs() * _TAN_22
    level = dy.abs() * 2**15 < across
    upright = dy.abs() * 2**15 > across + dx.abs() * 2**16
    falling = (dx < 0) == (dy < 0)  # OpenCV's rule: a zero counts as positive
    sides = F.pad(strength, [1] * 4)

    def above(down: int, right: int, *, ties: bool = False) -> Tensor:
        height, width = strength.shape[-2:]
        other = sides[..., 1 + down : 1 + down + height, 1 + right : 1 + right + width]
        return strength >= other if ties else strength > other

    ridge = torch.where(falling, above(-1, -1) & above(1, 1), above(-1, 1) & above(1, -1))
    ridge = torch.where(upright, above(-1, 0) & above(1, 0, ties=True), ridge)
    ridge = torch.where(level, above(0, -1) & above(0, 1, ties=True), ridge)
    weak = (ridge & (strength > _LOW)).float()
    found = weak * (strength > _HIGH)
    while not torch.equal(more := F.max_pool2d(found, 3, 1, 1) * weak, found):
        found = more
    return found > 0


def distance(edge: Tensor) -> Tensor:
    """To the nearest edge pixel (B, 1, H, W), at most 20: the shortest way by moves (1, 0), (1, 1) and (2, 1)."""
    height, width = edge.shape[-2:]
    moves = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if {abs(y), abs(x)} in ({0, 1}, {1}, {1, 2})]
    lengths = {1: 1.0, 2: _DIAGONAL, 3: _KNIGHT}
    near = torch.where(edge, 0.0, float(_FAR)).double()
    while True:
        beyond = F.pad(near, [2] * 4, value=float(_FAR))
        nearer = near
        for y, x in moves:
            moved = beyond[..., 2 + y : 2 + y + height, 2 + x : 2 + x + width]
            nearer = torch.minimum(nearer, moved + lengths[abs(y) + abs(x)])
        if torch.equal(nearer, near):
            return near
        near = nearer


def _equalized(values: Tensor) -> Tensor:
    """Whole numbers 0 to 255 mapped so that they are evenly used, each image for itself; the lowest becomes 0."""
    flat = values.long().flatten(1)
    counts = torch.zeros(len(flat), 256, dtype=torch.float64)
    counts.scatter_add_(1, flat, torch.ones(1, dtype=torch.float64).expand_as(flat))
    lowest = flat.amin(1, keepdim=True)
    rest = flat.shape[1] - counts.gather(1, lowest)
    above = counts.cumsum(1) - counts.gather(1, lowest)
    table = torch.where(rest > 0, (above.clamp(min=0) * (255 / rest)).round(), lowest.double())
    return table.gather(1, flat).view_as(values)


def _box_blur(values: Tensor) -> Tensor:
    return _filter(values, torch.full((3, 3), 1 / 9, dtype=values.dtype), "reflect")


def _filter(values: Tensor, kernel: Tensor, beyond: str) -> Tensor:
    """Correlate (B, 1, H, W) with 3 x 3 weights."""
    height, width = values.shape[-2:]
    padded = F.pad(values, [1] * 4, mode=beyond)
    total = torch.zeros_like(values)
    for y, row in enumerate(kernel.tolist()):
        for x, weight in enumerate(row):
            if weight:
                total += padded[..., y : y + height, x : x + width] * weight
    return total
