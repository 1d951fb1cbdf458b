"""Sizes and costs that follow from a model or a config by counting."""

from typing import TYPE_CHECKING

from vitmods.layers.stems.shapes import LOCAL_CELLS, LOCAL_DEPTH, hmlp_layers, levit_widths, local_width
from vitmods.model.config import ViTConfig

if TYPE_CHECKING:
    from torch import nn


def count_params(model: "nn.Module") -> int:
    """Learned numbers of a model."""
    return sum(p.numel() for p in model.parameters())


def count_macs(config: ViTConfig, dense_norms: bool = False) -> int:
    """Multiply-adds for one image, as the papers count their FLOPs: matrix products alone, all tokens of all blocks.

    Per block 12 N C^2 + 2 N^2 C for an MLP of width 4 C, times its parallel branches, plus the stem, representation
    layer and head. Norms, activations and softmax are not counted, nor is what the last block can leave out; the matrix
    products of dynamic token norms are, in their separable form or with ``dense_norms`` as T x T matrices, which the
    papers do.
    """
    c = config.embed_dim
    blocks = sum(_block_macs(config, index, dense_norms) for index in range(config.depth))
    pool = 0
    if config.pool == "map":
        pool = 2 * c * c + 2 * config.num_patches * c * c + 2 * config.num_patches * c + 2 * c * config.mlp_dim
    head = c * config.num_classes + (c * c if config.representation else 0)
    return blocks + _stem_macs(config) + pool + head


def count_published(config: ViTConfig) -> int:
    """FLOPs for one image as Three Things and Dynamic Token Normalization report them: ``count_macs``, and five for
    each value that passes a norm, as the counter fvcore has it (ViT-B/16: 17.58 G, of which 17.56 are products)."""
    return count_macs(config) + 5 * (_stem_normed(config) + _stream_normed(config))


def _stem_macs(config: ViTConfig) -> int:
    t, c, kind = config.num_patches, config.embed_dim, config.stem.kind
    values = config.in_chans * config.patch_size[0] * config.patch_size[1]
    if kind == "hmlp":
        return sum(tokens * inputs * width for tokens, inputs, width in _hmlp_maps(config))
    if kind == "levit":
        widths = levit_widths(c, config.patch_size)
        inputs = [config.in_chans, *widths]
        return sum(n * 9 * i * w for n, i, w in zip(_levit_places(config), inputs, widths, strict=False))
    if kind == "local":
        w, n = local_width(c, config.patch_size), LOCAL_CELLS**2
        return t * (values * w + LOCAL_DEPTH * (12 * n * w * w + 2 * n * n * w) + n * w * c)
    if kind == "t2t":
        first = _token_layer_macs(16 * t, 49 * config.in_chans)
        return first + _token_layer_macs(4 * t, 9 * 64) + t * 9 * 64 * c
    return t * values * c


def _token_layer_macs(n: int, values: int) -> int:
    """A layer of width 64 of the tokens-to-token stem, on n tokens of so many values."""
    return n * (3 * 64 * values + 2 * 64 * n + 3 * 64 * 64)


def _hmlp_maps(config: ViTConfig) -> list[tuple[int, int, int]]:
    """(tokens, inputs, outputs) of each linear map of the hMLP stem."""
    maps, channels = [], config.in_chans
    rows, columns = config.img_size
    for side, width in hmlp_layers(config.embed_dim, config.patch_size):
        rows, columns = rows // side, columns // side
        maps.append((rows * columns, side * side * channels, width))
        channels = width
    return maps


def _levit_places(config: ViTConfig) -> list[int]:
    """Places in the output of each convolution of the LeViT stem."""
    halvings = range(1, config.patch_size[0].bit_length())
    return [(config.img_size[0] >> i) * (config.img_size[1] >> i) for i in halvings]


def _stem_normed(config: ViTConfig) -> int:
    """Values that pass the stem's norms."""
    t, c, stem = config.num_patches, config.embed_dim, config.stem
    values = t * config.in_chans * config.patch_size[0] * config.patch_size[1] if stem.before else 0
    if stem.after:
        values += t * c
    if stem.kind == "hmlp" and stem.inner:
        values += sum(tokens * width for tokens, _, width in _hmlp_maps(config)[:-1])
    if stem.kind == "levit" and stem.inner:
        widths = levit_widths(c, config.patch_size)
        values += sum(n * w for n, w in zip(_levit_places(config)[:-1], widths, strict=False))
    if stem.kind == "local":
        values += t * LOCAL_CELLS**2 * local_width(c, config.patch_size) * (2 * LOCAL_DEPTH + 1)
    if stem.kind == "t2t":
        values += 16 * t * (49 * config.in_chans + 64) + 4 * t * (9 * 64 + 64)
    return values


def _stream_normed(config: ViTConfig) -> int:
    """Values that pass the norms after the positions, of the blocks, and at the end."""
    c, prefix = config.embed_dim, config.num_prefix_tokens
    n = config.num_patches + prefix
    values = 0
    if config.position_norm:
        values += c * (n if config.position_norm_on_prefix else config.num_patches)
    if config.final_norm:
        values += c * (1 if config.norm_after_pool else n)
    for block in range(config.depth):
        tokens = n if block >= config.prefix_from else config.num_patches
        for branch, hidden in zip(config.branches(block), (c, config.mlp_dim), strict=True):
            outside = (branch.before, branch.branch, branch.after)
            width = c * sum(norm is not None for norm in outside) + hidden * (branch.inner is not None)
            values += config.parallel * tokens * width
    return values


def _block_macs(config: ViTConfig, block: int, dense_norms: bool) -> int:
    c, n = config.embed_dim, config.num_patches + config.prefix_tokens(block)
    attention = 4 * n * c * c + 2 * n * n * c
    if config.positional is not None and block < config.positional.count:
        attention += config.num_patches * sum(config.grid) * c
    return config.parallel * (attention + 2 * n * c * config.mlp_dim + _norm_macs(config, block, dense_norms))


def _norm_macs(config: ViTConfig, block: int, dense: bool) -> int:
    """Products of the norms before a branch that have any."""
    norms = [branch.before for branch in config.branches(block) if branch.before is not None]
    return sum(norm.facts.macs(config.grid, config.embed_dim, dense) for norm in norms)
