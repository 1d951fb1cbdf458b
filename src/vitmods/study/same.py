"""When two sets of settings are the same study, so that one folder may hold both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitmods.recipes import Recipe

_MAY_DIFFER = ("arms", "seeds", "noise_floor", "margin", "metric", "tune", "tune_on")
_NEWER: dict[str, Any] = {"limit_val": None, "task": "classification"}
"""settings that older folders do not name, as they were then"""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which `new` is another study than `old` (both from `Settings.to_dict`), as `name: old -> new`.

    Added arms, seeds and values to tune, a noise floor, another margin and another metric are no difference: nothing
    that was trained depends on them.
    """
    found = []
    before, after = _flat(_fixed(old)), _flat(_fixed(new))
    for name in [*before, *(name for name in after if name not in before)]:
        was, now = before.get(name, "(not set)"), after.get(name, "(not set)")
        if was != now:
            found.append(f"{name}: {_show(was)} -> {_show(now)}")
    for name, arm in old["arms"].items():
        if name not in new["arms"]:
            found.append(f"arm {name}: {arm['changes']} -> (missing)")
        elif new["arms"][name] != arm:
            found.append(f"arm {name}: {_show_arm(arm)} -> {_show_arm(new['arms'][name])}")
    found += _tuned(old.get("tune", {}), new.get("tune", {}))
    missing = [seed for seed in old["seeds"] if seed not in new["seeds"]]
    if missing:
        found.append(f"seeds: {old['seeds']} -> {new['seeds']}")
    if old["noise_floor"] and not new["noise_floor"]:
        found.append("noise_floor: true -> false")
    return found


def _fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What every trial depends on; fields that the recipe of an older folder does not know are at their defaults."""
    recipe = Recipe.from_dict(dict(settings["recipe"])).to_dict()
    kept = {name: value for name, value in settings.items() if name not in _MAY_DIFFER}
    return {**_NEWER, **kept, "recipe": recipe}


def _tuned(old: Mapping[str, list[Any]], new: Mapping[str, list[Any]]) -> list[str]:
    """Fields cannot join or leave, since every trial has a value of each; values can only be added."""
    if set(old) != set(new):
        return [f"tune: {' '.join(old) or '(nothing)'} -> {' '.join(new) or '(nothing)'}"]
    left_out = [name for name in old if any(value not in new[name] for value in old[name])]
    return [f"tune {name}: {_show(old[name])} -> {_show(new[name])}" for name in left_out]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{name}" if prefix else str(name)))
    return flat


def _show(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _show_arm(arm: Mapping[str, Any]) -> str:
    overrides = ", ".join(f"{name}={value}" for name, value in arm["recipe"].items())
    begins = f" from {arm['start']}" if "start" in arm else ""
    return arm["changes"] + begins + (f" with {overrides}" if overrides else "")
