"""Count parameters and multiply-adds of a model or a config."""

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
    """Multiply-adds for one image, as the papers count their FLOPs: only matrix products, all tokens of all blocks.

    Per block 12 N C^2 + 2 N^2 C for an MLP of width 4 C, times its parallel branches, plus the stem, representation
    layer and head. Norms, activations and softmax are not counted, nor is what the last block can leave out; the matrix
    products of dynamic token norms are, in their separable form or with ``dense_norms`` as T x T matrices, which the
    papers do.
    """
    c, size, before = config.embed_dim, stem_size(config), config.stem.before
    macs = config.stem.facts.macs(size)
    if before is not None:  # a norm on the pixels of a patch: whitening has products
        macs += before.facts.macs(config.grid, size.values, False)
    kind: Any = MLPS[config.mlp_kind]
    heads = config.num_heads * (config.head_dim or c // config.num_heads)
    for block in range(config.depth):
        n = config.num_patches + config.prefix_tokens(block) + config.prompts
        gates = {"none": 0, "channel": heads, "head": config.num_heads}[config.gate]
        values = c * heads if config.value_mix and block == 0 else 0
        branches = n * (c * gates + values) + 4 * n * c * heads + 2 * n * n * heads + n * kind.macs(c, config.mlp_dim)
        if config.positional is not None and block < config.positional.count:
            branches += config.num_patches * sum(config.grid) * c
        for branch in config.branches(block):
            if branch.before is not None:
                branches += branch.before.facts.macs(config.grid, c, dense_norms)
        macs += config.parallel * branches
    if config.pool == "map":
        tokens = config.num_patches + config.num_prefix_tokens * config.pool_prefix
        macs += 2 * c * c + 2 * tokens * c * (c + 1) + 2 * c * (config.pool_mlp_dim or config.mlp_dim)
    hidden, pooled = config.head_hidden or (c if config.representation else 0), config.pooled_dim
    return macs + (hidden or pooled) * config.num_classes + pooled * hidden


def count_published(config: ViTConfig) -> int:
    """FLOPs for one image as Three Things and Dynamic Token Normalization report them: ``count_macs``, and five for
    each value that passes a norm, as the counter fvcore has it (ViT-B/16: 17.58 G, of which 17.56 are products)."""
    c, stem, size, patches = config.embed_dim, config.stem, stem_size(config), config.num_patches
    values = stem.facts.normed(size, inner=stem.inner is not None)
    values += patches * (size.values * (stem.before is not None) + c * (stem.after is not None))
    if config.position_norm:
        values += c * (patches + config.num_prefix_tokens * config.position_norm_on_prefix)
    if config.final_norm:
        values += c * (1 if config.norm_after_pool else patches + config.num_prefix_tokens)
    for block in range(config.depth):
        for branch, hidden in zip(config.branches(block), (c, config.mlp_dim), strict=True):
            outside = (branch.before, branch.branch, branch.after)
            width = c * sum(norm is not None for norm in outside) + hidden * (branch.inner is not None)
            values += config.parallel * (patches + config.prefix_tokens(block) + config.prompts) * width
    return count_macs(config) + 5 * values
