"""Class and register tokens that join after the first blocks, because those work only on the grid of patch tokens."""

from vitmods.changes.base import Weights
from vitmods.model.config import ViTConfig
from vitmods.util.errors import UserError


def first_blocks(change: str, blocks: int | None, config: ViTConfig) -> int:
    """How many blocks a change of the first blocks takes: those given, or ten twelfths of the depth.

    Raises UserError where that leaves no block in which the class and register tokens could join.
    """
    if config.depth == 1 and config.num_prefix_tokens:
        raise UserError(
            f"'{change}' needs a second block, in which the class token joins, and the model has one block: take a "
            "deeper one, or one without class and register tokens."
        )
    count = blocks or max(1, config.depth * 10 // 12)
    if count > config.depth or (count == config.depth and config.num_prefix_tokens):
        raise UserError(
            f"{change}(blocks={count}) leaves no block in which the class token could join; the model has "
            f"{config.depth}: give fewer."
        )
    return count


def join_late(config: ViTConfig) -> ViTConfig:
    """The config whose class and register tokens, without positions, join after all first blocks."""
    counts = [part.count for part in (config.first_blocks, config.positional) if part is not None]
    return config.with_(
        prefix_from=max(counts) if config.num_prefix_tokens else 0,
        position_on_prefix=False,
        position_norm_on_prefix=False,
    )


def carry_positions(weights: Weights, old: ViTConfig) -> Weights:
    """Add the former positions of class and register tokens to these tokens."""
    if not _had_positions(old):
        return weights
    positions, carried = weights["pos_embed"], dict(weights)
    names = [name for name in ("cls_token", "reg_token") if name in weights]
    lengths = [weights[name].shape[1] for name in names]
    for name, own_positions in zip(names, positions[:, : sum(lengths)].split(lengths, dim=1), strict=True):
        carried[name] = weights[name] + own_positions
    carried["pos_embed"] = positions[:, sum(lengths) :].clone()
    return carried


def dropped_positions(old: ViTConfig) -> tuple[str, ...]:
    """List the old weights that ``carry_positions`` rewrites."""
    return ("pos_embed", "cls_token", "reg_token") if _had_positions(old) else ()


def _had_positions(config: ViTConfig) -> bool:
    return config.position == "learn" and config.position_on_prefix and config.num_prefix_tokens > 0
