"""Sizes and costs that follow from a model or a config by counting."""

from typing import TYPE_CHECKING

from .config import ViTConfig

if TYPE_CHECKING:
    from torch import nn


def count_params(model: "nn.Module") -> int:
    """Learned numbers of a model."""
    return sum(p.numel() for p in model.parameters())


def count_macs(config: ViTConfig, dense_norms: bool = False) -> int:
    """Multiply-adds for one picture, as the papers count their FLOPs: matrix products alone, all tokens of all blocks.

    Per block 12 N C^2 + 2 N^2 C for an MLP of width 4 C, times its parallel branches, plus the patch projection,
    representation layer and head. Norms, activations and softmax are not counted, nor is what the last block can leave
    out; the matrix products of dynamic token norms are, in their separable form or with ``dense_norms`` as T x T
    matrices, which the papers do.
    """
    c = config.embed_dim
    blocks = sum(_block_macs(config, index, dense_norms) for index in range(config.depth))
    pool = 0
    if config.pool == "map":
        pool = 2 * c * c + 2 * config.num_patches * c * c + 2 * config.num_patches * c + 2 * c * config.mlp_dim
    head = c * config.num_classes + (c * c if config.representation else 0)
    return blocks + _stem_macs(config) + pool + head


def _stem_macs(config: ViTConfig) -> int:
    t, c = config.num_patches, config.embed_dim
    if config.stem.kind == "t2t":
        first = _token_layer_macs(16 * t, 49 * config.in_chans)
        return first + _token_layer_macs(4 * t, 9 * 64) + t * 9 * 64 * c
    return t * config.in_chans * config.patch_size[0] * config.patch_size[1] * c


def _token_layer_macs(n: int, values: int) -> int:
    """A layer of width 64 of the tokens-to-token stem, on n tokens of so many values."""
    return n * (3 * 64 * values + 2 * 64 * n + 3 * 64 * 64)


def _block_macs(config: ViTConfig, block: int, dense_norms: bool) -> int:
    c, n = config.embed_dim, config.num_patches + config.prefix_tokens(block)
    attention = 4 * n * c * c + 2 * n * n * c
    if config.positional is not None and block < config.positional.count:
        attention += config.num_patches * sum(config.grid) * c
    return config.parallel * (attention + 2 * n * c * config.mlp_dim + _norm_macs(config, block, dense_norms))


def _norm_macs(config: ViTConfig, block: int, dense: bool) -> int:
    """Two moments of every channel for each dynamic token norm before a branch."""
    kinds = [branch.before.kind for branch in config.branches(block) if branch.before is not None]
    reach = config.num_patches if dense else sum(config.grid)
    return kinds.count("dynamic_token") * 2 * config.num_patches * reach * config.embed_dim
