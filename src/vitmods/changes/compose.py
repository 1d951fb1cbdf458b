"""Several changes of one model: the config that they give, and which of them cannot go together."""

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations

from vitmods.changes.base import Change
from vitmods.model.config import ViTConfig
from vitmods.model.slots import ADDED_NORMS
from vitmods.util.errors import NoEffect, SlotConflict, UserError


def edit(config: ViTConfig, changes: Sequence[Change]) -> ViTConfig:
    """The config with the changes, in order, without building a model.

    Raises NoEffect for a change that alters nothing, SlotConflict when two claim one slot, UserError for what a config
    can show.
    """
    check_conflicts(changes)
    for change in changes:
        config = edit_one(config, change)
    return config


def edit_one(config: ViTConfig, change: Change) -> ViTConfig:
    """The config with one change. Raises NoEffect where it is built that way already."""
    edited = change.edit(config)
    if edited == config:
        raise NoEffect(f"'{change}' changes nothing: the model already has it. Leave it out.")
    return edited


def check_conflicts(changes: Sequence[Change], earlier: Sequence[Change] = ()) -> None:
    """Raise SlotConflict, naming both, if two changes claim the same slot, or one undoes another or one of `earlier`
    that the model has; UserError for anything but a change."""
    owner: dict[str, Change] = {}
    filled = {slot: change for change in earlier for slot in change.claims}
    for change in changes:
        if not isinstance(change, Change):
            raise UserError(f"{change!r} is not a change: give one as DualPatchNorm(), or as text, 'dpn'.")
        for slot in change.undoes & filled.keys():
            raise SlotConflict(f"'{change}' would undo '{filled[slot]}': write '{change}+{filled[slot]}'.")
        filled |= dict.fromkeys(change.claims, change)
        for slot in sorted(change.claims):
            if slot in owner:
                raise SlotConflict(
                    f"'{owner[slot]}' and '{change}' both claim the slot '{slot}': "
                    "leave one out, or compare them as two arms."
                )
            owner[slot] = change


def adds_norms(edits: Sequence[object]) -> bool:
    """Whether a model without the norms that the changes among these edits add computes what it did before them."""
    placing = [edit for edit in edits if isinstance(edit, Change) and edit.fills & ADDED_NORMS]
    return bool(placing) and all(change.adds_norms for change in placing)


def conflicts(arms: Mapping[str, Sequence[Change]], config: ViTConfig | None = None) -> dict[tuple[str, str], str]:
    """Pairs of arms whose changes cannot go into one model, and why.

    They claim the same slot, or the config of base, where it is given, cannot be edited with both in either order (as
    patch dropout and a norm that reads the whole grid). Raises as `edit` does for an arm that fails by itself.
    """
    for changes in arms.values():
        _try(config, changes)
    refused = _refused(arms, config)
    return {pair: refused[pair] for pair in combinations(arms, 2) if pair in refused and pair[::-1] in refused}


def in_order(arms: Mapping[str, Sequence[Change]], config: ViTConfig | None = None) -> tuple[str, ...]:
    """The arms as given, except where two go together in only one order (`rms` before `dtn`): then the one that has to
    be first comes before the other."""
    refused = _refused(arms, config)
    remaining, placed = list(arms), []
    while remaining:
        first = (
            name for name in remaining if not any((name, b) in refused and (b, name) not in refused for b in remaining)
        )
        placed.append(next(first, remaining[0]))
        remaining.remove(placed[-1])
    return tuple(placed)


def _refused(arms: Mapping[str, Sequence[Change]], config: ViTConfig | None) -> dict[tuple[str, str], str]:
    """Return the pairs that fail in this order, with the reasons."""
    reasons = {}
    for first, then in permutations(arms, 2):
        try:
            _try(config, [*arms[first], *arms[then]])
        except UserError as error:
            reasons[first, then] = str(error)
    return reasons


def _try(config: ViTConfig | None, changes: Sequence[Change]) -> None:
    check_conflicts(changes)
    if config is not None:
        edit(config, changes)
