"""Sizes and costs that follow from a model or a config by counting."""

from typing import TYPE_CHECKING, Any

from vitmods.layers.mlp import MLPS
from vitmods.model.build import stem_size
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
        pool = 2 * c * c + 2 * config.num_patches * c * c + 2 * config.num_patches * c
        pool += 2 * c * (config.pool_mlp_dim or config.mlp_dim)
    hidden = config.head_hidden or (c if config.representation else 0)
    head = (hidden or c) * config.num_classes + c * hidden
    return blocks + _stem_macs(config) + pool + head


def _stem_macs(config: ViTConfig) -> int:
    """Products of the stem, and of the norm on the pixels of a patch where it has any (whitening)."""
    size, before = stem_size(config), config.stem.before
    return config.stem.facts.macs(size) + (before.facts.macs(config.grid, size.values, False) if before else 0)


def count_published(config: ViTConfig) -> int:
    """FLOPs for one image as Three Things and Dynamic Token Normalization report them: ``count_macs``, and five for
    each value that passes a norm, as the counter fvcore has it (ViT-B/16: 17.58 G, of which 17.56 are products)."""
    return count_macs(config) + 5 * (_stem_normed(config) + _stream_normed(config))


def _stem_normed(config: ViTConfig) -> int:
    """Values that pass the stem's norms."""
    stem, size = config.stem, stem_size(config)
    before = size.patches * size.values if stem.before else 0
    after = size.patches * size.embed_dim if stem.after else 0
    return before + after + stem.facts.normed(size, inner=stem.inner is not None)


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
    heads = config.num_heads * (config.head_dim or c // config.num_heads)
    attention = 4 * n * c * heads + 2 * n * n * heads
    if config.positional is not None and block < config.positional.count:
        attention += config.num_patches * sum(config.grid) * c
    kind: Any = MLPS[config.mlp_kind]
    mlp: int = n * kind.macs(c, config.mlp_dim)
    return config.parallel * (attention + mlp + _norm_macs(config, block, dense_norms))


def _norm_macs(config: ViTConfig, block: int, dense: bool) -> int:
    """Products of the norms before a branch that have any."""
    norms = [branch.before for branch in config.branches(block) if branch.before is not None]
    return sum(norm.facts.macs(config.grid, config.embed_dim, dense) for norm in norms)
