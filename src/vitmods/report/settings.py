"""Settings, configs and data summaries as short pairs of words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def pairs(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flat (dotted name, value) pairs of a nested mapping."""
    return list(_flat(values, prefix))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", plain(value)


def plain(value: Any) -> str:
    """A JSON value as a person would write it."""
    if value is None or value in ({}, []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    return str(value)


def differences(base: Mapping[str, Any], arm: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """(setting, base's value, the arm's) wherever two configs differ. A norm is one value. None where one of the two is
    no vitmods ViT and has modules instead, which a table of their own shows."""
    if "modules" in base or "modules" in arm:
        return []
    found = []
    for key in [*base, *(key for key in arm if key not in base)]:
        old, new = base.get(key), arm.get(key)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping) and not _is_norm(key):
            found += differences(old, new, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", _norm(old), _norm(new)))
    return found


def _is_norm(slot: str) -> bool:
    return slot.endswith("_norm") or slot in ("before", "inner", "branch", "after")


def _norm(value: Any) -> str:
    if not (isinstance(value, Mapping) and "kind" in value):
        return plain(value)
    rest = ", ".join(f"{key} {plain(item)}" for key, item in value.items() if key != "kind")
    return f"{value['kind']} norm ({rest})" if rest else f"{value['kind']} norm"


def splits(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """name, count, and the smallest and largest class of each split."""
    rows = []
    for name, split in data["splits"].items():
        counts = list(split["per_class"].values())
        rows.append(
            {"name": name, "count": split["count"], "least": min(counts, default=0), "most": max(counts, default=0)}
        )
    return rows


def sizes(data: Mapping[str, Any]) -> str:
    """The images' own sizes in a few words; empty where unknown."""
    native = data.get("native") or {}
    if not native:
        return ""
    smallest, largest = (f"{h} × {w}" for h, w in (native["smallest"], native["largest"]))
    return smallest if smallest == largest else f"{smallest} to {largest}"
