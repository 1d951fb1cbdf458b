"""What changes bring along besides their idea, and the arms that tell the two apart: their controls.

Dynamic Token Normalization lets the class token join late, because its norm works on the grid. An arm that gains by it
may gain by the late token alone. The control is base with a late token and LayerNorm: what the norm does is the
difference of the arm and its control, not of the arm and base.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from vitmods.changes.base import Change
from vitmods.changes.dynamic_token_norm import DynamicTokenNorm
from vitmods.changes.placement import Placement
from vitmods.changes.size import Size
from vitmods.model.config import ViTConfig

LEAST = 0.01  # of base's multiply-adds


class Control(NamedTuple):
    """What a change brings along, as the object of a sentence; and the control of such a change in a model with this
    config: its name and changes, or None where the change brings nothing along there."""

    brings: str
    arm: Callable[[Any, ViTConfig], tuple[str, Change] | None]


def _late(change: Any, config: ViTConfig) -> tuple[str, Change] | None:
    control = DynamicTokenNorm(blocks=change.blocks, trade_off=1.0)
    joins_late = config.num_prefix_tokens > 0 and not config.prefix_from
    return (f"late{change.blocks or ''}", control) if joins_late and getattr(change, "trade_off", None) != 1 else None


def _with_final_norm(change: Placement, config: ViTConfig) -> tuple[str, Change] | None:
    loses_it = config.final_norm is not None and change.edit(config).final_norm is None
    name = f"{change.attn}-{change.mlp}-final".replace("pre+post", "both")
    return (name, replace(change, keep_final=True)) if loses_it else None


def _as_costly(change: Change, config: ViTConfig) -> tuple[str, Change] | None:
    """A wider MLP with as many multiply-adds more."""
    from vitmods.model.flops import count_macs  # imports torch

    more, wider = count_macs(change.edit(config)) - count_macs(config), replace(config, mlp_dim=2 * config.mlp_dim)
    if config.mlp_kind != "mlp" or more < LEAST * count_macs(config):
        return None
    channels = config.mlp_dim + round(config.mlp_dim * more / (count_macs(wider) - count_macs(config)))
    return f"mlp{channels}", Size(mlp=channels)


CONTROLS: dict[str, Control] = {
    "dtn": Control("a class token that joins late, without a position", _late),
    "gpsa": Control("a class token that joins late, without a position", _late),
    "placement": Control("the loss of the final norm", _with_final_norm),
    "registers": Control("more multiply-adds", _as_costly),
    "swiglu": Control("more multiply-adds", lambda change, config: change.hidden and _as_costly(change, config)),
}
"""change -> its control; changes that bring nothing along have none"""


def controls(edits: Iterable[object], config: ViTConfig) -> list[tuple[str, str, Change]]:
    """List what the change of an arm brings along in a model with this config: (what, name of the control, its change).

    Empty for an arm with several changes: its control would have the other changes too.
    """
    first, *others = edits
    control = None if others or not isinstance(first, Change) else CONTROLS.get(first.name)
    arm = control.arm(first, config) if control is not None else None
    return [(control.brings, *arm)] if control is not None and arm else []
