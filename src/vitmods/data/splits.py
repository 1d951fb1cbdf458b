"""Train, val and test where a source does not bring them: stratified, and a function of the split seed and the names.

A picture's place depends on its own name and on how many pictures its class has, never on the order of files.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from vitmods.data.records import SPLITS, Records, Source
from vitmods.data.rng import text_bits
from vitmods.errors import UserError

Indices = NDArray[np.int64]


def make_splits(source: Source, seed: int, val: float, test: float) -> tuple[dict[str, Records], str]:
    """The splits to use and where each comes from, in words.

    A source with train alone is cut into train, val and test. One that lacks val gives a part of train to it. One that
    lacks test beside its own val is evaluated on val, so that numbers stay comparable with others on that split.
    """
    _check_fraction("val_fraction", val)
    _check_fraction("test_fraction", test)
    if val + test >= 1:
        raise UserError(f"val_fraction {val} and test_fraction {test} leave nothing to train on: make them smaller.")
    train, alone = source.splits["train"], len(source.splits) == 1
    if "val" in source.splits or (val == 0 and not alone):
        return _ordered(source.splits), "found"
    parts = cut(train, seed, {"test": test, "val": val} if alone else {"val": val})
    splits = source.splits | {name: train.take(part) for name, part in parts.items() if len(part)}
    return _ordered(splits), f"made, seed {seed}" if alone else f"found; val made from train, seed {seed}"


def cut(records: Records, seed: int, fractions: dict[str, float]) -> dict[str, Indices]:
    """Positions of each named part, and of the rest as "train"; each class is cut by itself, rounded to the nearest.

    A part takes at least one picture of a class that has three left, and every class keeps one in train.
    """
    parts: dict[str, list[int]] = {name: [] for name in (*fractions, "train")}
    for members in _by_class(records, seed, "split"):
        left = members
        for name, fraction in fractions.items():
            least = 1 if fraction > 0 and len(left) >= 3 else 0
            count = min(max(int(len(members) * fraction + 0.5), least), len(left) - 1)
            parts[name] += left[:count]
            left = left[count:]
        parts["train"] += left
    return {name: np.array(sorted(part), dtype=np.int64) for name, part in parts.items()}


def limit(records: Records, count: int | None, seed: int) -> Records:
    """At most `count` pictures, classes in proportion (largest remainders), chosen by split seed and name."""
    if count is None or count >= len(records):
        return records
    if count < 1:
        raise UserError(f"limit_train must be at least 1, not {count}.")
    classes = _by_class(records, seed, "limit")
    shares = [Fraction(count * len(members), len(records)) for members in classes]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(classes)), key=lambda c: (counts[c] - shares[c], c))
    for c in by_remainder[: count - sum(counts)]:
        counts[c] += 1
    kept = [i for members, n in zip(classes, counts, strict=True) for i in members[:n]]
    return records.take(np.array(sorted(kept), dtype=np.int64))


def _by_class(records: Records, seed: int, purpose: str) -> list[list[int]]:
    """Positions of each class's pictures, in an order drawn from the seed and the names."""
    draws = [(text_bits(seed, purpose, name), name) for name in records.ids]
    members: dict[int, list[int]] = {int(label): [] for label in np.unique(records.labels)}
    for i in sorted(range(len(records)), key=draws.__getitem__):
        members[int(records.labels[i])].append(i)
    return list(members.values())


def _ordered(splits: dict[str, Records]) -> dict[str, Records]:
    return {name: splits[name] for name in SPLITS if name in splits}


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name} must lie between 0 and 1 (0 makes no such split), not {value}.")
