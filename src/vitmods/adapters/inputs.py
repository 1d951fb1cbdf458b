"""A small input for a model of any library: of the size that its config, its position table and its stem say."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.anatomy import maps_of, widths
from vitmods.adapters.running import Inputs, runs
from vitmods.util.errors import UserError

TOKENS = 8
SIDES = (4, 8)  # patches along an image, where no table says how many
PATCHES = (16, 8, 4, 2, 32)  # where the stem does not say it
CHANNELS = (3, 1, 4, 2)
MOST_PREFIX = 8  # class tokens and registers in a table of positions
MOST_TRIED = 200
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


def find_inputs(model: nn.Module, example: Any, width: int) -> Inputs | None:
    """The first candidate that the model takes; None if it takes none of those that are made.

    Raises UserError if the model does not run on the example.
    """
    inputs = next((candidate for candidate in candidate_inputs(model, example, width) if runs(model, candidate)), None)
    if inputs is None and example is not None:
        raise UserError("The model does not run on the example: give what it is called with.")
    return inputs


def candidate_inputs(model: nn.Module, example: Any, width: int) -> Iterator[Inputs]:
    """Yield inputs to call the model with: `example` (a tensor, a tuple of arguments or a mapping of keywords), or two
    each of words, images, videos and tokens of `width` channels."""
    if example is not None:
        keywords = example if isinstance(example, Mapping) else {}
        yield () if keywords else example if isinstance(example, tuple) else (example,), keywords
        return
    p = next(model.parameters())
    config = getattr(model, "config", None)
    stem = next((m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    channels = stem.in_channels if stem is not None else getattr(config, "num_channels", None)
    frames = getattr(config, "num_frames", None)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device=p.device, dtype=p.dtype)

    if isinstance(words := getattr(config, "vocab_size", None), int):
        yield (), {"input_ids": torch.arange(2 * TOKENS, device=p.device).view(2, -1) % words}
    if channels is not None or hasattr(model, "default_cfg"):
        for size in _named_sizes(model):
            if isinstance(frames, int):
                yield (draw(2, frames, channels or 3, *size),), {}
            yield (draw(2, channels or 3, *size),), {}
    tables = _tables(model)
    if stem is None and (sizes := [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]):
        for words, count in product(dict.fromkeys((sizes[0], min(sizes))), (TOKENS, *tables)):
            yield (torch.arange(2 * count, device=p.device).view(2, -1) % words,), {}
    for shape in list(dict.fromkeys(_shapes(model, tables)))[:MOST_TRIED]:
        yield (draw(2, *shape),), {}
    if channels is not None or hasattr(model, "default_cfg"):
        # The size of most published models: a model for smaller images may run on it too, but slowly.
        yield (draw(2, channels or 3, 224, 224),), {}
    first = [widths(model.get_submodule(name))[0] for name in maps_of(model)[:1]]
    for count, channels in product((TOKENS, *tables), dict.fromkeys((width, *first))):
        tokens = draw(2, count, channels)
        yield (tokens,), {}
        yield (tokens, tokens), {}  # a decoder's tokens and what it reads


def _named_sizes(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Candidate sizes from Hugging Face's config, the model's parts, and timm's config."""
    cfg = getattr(model, "default_cfg", None) or {}
    parts = (getattr(model, "config", None), *model.modules())
    named = [getattr(part, name, None) for part in parts for name in ("image_size", "img_size")]
    sizes = [*named, cfg["input_size"][-2:] if "input_size" in cfg else None]
    pairs = [(size, size) if isinstance(size, int) else size for size in sizes]
    yield from dict.fromkeys((p[0], p[1]) for p in pairs if isinstance(p, tuple | list) and len(p) == 2)


def _tables(model: nn.Module) -> list[int]:
    """Numbers of positions that tables (..., positions, C) or (1, C, rows, columns) may have, of a width C that a
    linear map puts out; a table may be a parameter, a buffer, or a tensor that the model keeps."""
    dims = {widths(model.get_submodule(name))[1] for name in maps_of(model)}
    counts: dict[int, None] = {}
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]
        for table in own if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd) else ():
            if isinstance(table, Tensor) and 1 < table.ndim < 6:
                axis = next((axis for axis in (-1, 1) if table.shape[axis] in dims), None)
                if axis is not None and table.numel() > table.shape[axis]:
                    counts[table.numel() // table.shape[axis]] = None
    return list(counts)


def _shapes(model: nn.Module, tables: list[int]) -> Iterator[tuple[int, ...]]:
    """Shapes of images, videos and signals that a stem cuts into as many patches as a table has positions."""
    stems = list(_stems(model))
    for axes in (2, 3, 1):
        grids = [grid for table in tables for grid in _grids(table, axes)] or [(side,) * axes for side in SIDES]
        for (channels, steps, kernel), grid in product([stem for stem in stems if len(stem[1]) == axes], grids):
            yield channels, *(count * step for count, step in zip(grid, steps, strict=True))
            if kernel != steps:  # overlapping patches, without padding
                yield channels, *((n - 1) * s + k for n, s, k in zip(grid, steps, kernel, strict=True))


def _stems(model: nn.Module) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Channels, steps and sides of patches: those of a linear map of patches that are cut already, or of convolutions
    and pools one after the other."""
    first = [model.get_submodule(name) for name in maps_of(model)[:1]]
    values = [widths(m)[0] for m in first if isinstance(m, nn.Linear)]
    cuts = [m for m in model.modules() if isinstance(m, nn.Unfold)]
    for value, count in product(values, CHANNELS):
        for frames in (1, 2, 4):
            side = isqrt(value // (count * frames))
            if count * frames * side * side == value:
                sides = (frames, side, side)[frames == 1 :]
                yield count, sides, sides
                yield from ((count, _tuple(cut.stride, 2), sides) for cut in cuts if frames == 1)
        if value % count == 0:
            yield count, (value // count,), (value // count,)
    passed: dict[int, tuple[int, tuple[int, ...]]] = {}  # by axes
    for module in model.modules() if not values else ():
        stride: Any = getattr(module, "stride", None)
        if isinstance(module, (nn.modules.conv._ConvNd, *_POOLS)):
            is_pool = not isinstance(module, nn.modules.conv._ConvNd)
            axes = max(passed, default=2) if is_pool else len(module.kernel_size)  # type: ignore[arg-type]
            channels, before = passed.get(axes, (3 if is_pool else module.in_channels, (1,) * axes))
            steps = tuple(a * b for a, b in zip(before, _tuple(stride, axes), strict=True))
            kernel = tuple(a * b for a, b in zip(before, _tuple(module.kernel_size, axes), strict=True))
            passed[axes] = (channels, steps)  # type: ignore[assignment]
            yield channels, steps, kernel  # type: ignore[misc]
    for channels, side in product([channels for channels, _ in passed.values()] or CHANNELS[:2], PATCHES):
        yield channels, (side, side), (side, side)


def _tuple(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)


def _grids(positions: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Grids with this number of positions, less those of further tokens: squares first."""
    for prefix in range(min(MOST_PREFIX, positions - 1) + 1):
        count = positions - prefix
        if axes == 1:
            yield (count,)
        for frames in {1: (), 2: (1,), 3: range(1, 17)}[axes]:
            side = isqrt(count // frames)
            if frames * side * side == count and side > 1:
                yield (frames, side, side)[3 - axes :]
    for rows in range(2, isqrt(positions) + 1) if axes == 2 else ():
        for count in (positions, positions - 1):
            if count % rows == 0 and 4 * rows * rows >= count:
                yield from ((rows, count // rows), (count // rows, rows))
