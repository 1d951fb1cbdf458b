"""Train, val and test where a source does not bring them: stratified, and a function of the split seed and the names.

An image's place depends on its own name and on how many images its class has, never on the order of files. Images of
one group stay together: the group goes where its first image in the drawn order would, in that image's class.
"""

from fractions import Fraction
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from vitmods.data.records import SPLITS, Records, Source
from vitmods.data.rng import text_bits
from vitmods.util.errors import UserError

Indices = NDArray[np.int64]
VAL_FRACTION, TEST_FRACTION = 0.1, 0.2
"""Of the images, for the splits that are made if nothing else is said."""


def make_splits(
    source: Source,
    seed: int,
    val: float = VAL_FRACTION,
    test: float = TEST_FRACTION,
    limit_val: int | None = None,
    groups: Indices | None = None,
) -> tuple[dict[str, Records], str]:
    """The splits to use and where each comes from, in words.

    A source with train alone is cut into train, val and test. One that lacks val gives a part of train to it. One that
    lacks test beside its own val is evaluated on val, so that numbers stay comparable with others on that split. A
    source without train is for evaluation only. limit_val: so many images for val, classes in proportion, instead of
    the fraction where val is made, and of val's own where it is not. groups: of train's images (n,), see `groups_of`.
    """
    _check_fraction("val_fraction", val)
    _check_fraction("test_fraction", test)
    if val + test >= 1:
        raise UserError(f"val_fraction {val} and test_fraction {test} leave nothing to train on: make them smaller.")
    if limit_val is not None and limit_val < 1:
        raise UserError(f"limit_val must be at least 1, not {limit_val}. For no val split set val_fraction to 0.")
    if "val" in source.splits and limit_val is not None:
        return _ordered(source.splits | {"val": limit(source.splits["val"], limit_val, seed)}), "found"
    alone = list(source.splits) == ["train"]
    if "val" in source.splits or "train" not in source.splits or (val == 0 and limit_val is None and not alone):
        return _ordered(source.splits), "found"
    fractions = {"test": test} if alone else {}
    train = source.splits["train"]
    parts = cut(train, seed, fractions if limit_val is not None else fractions | {"val": val}, groups)
    splits = source.splits | {name: train.take(part) for name, part in parts.items() if len(part)}
    if limit_val is not None:
        left = None if groups is None else groups[parts["train"]]
        splits["train"], splits["val"] = take_out(splits["train"], limit_val, seed, left)
    return _ordered(splits), f"made, seed {seed}" if alone else f"found; val made from train, seed {seed}"


def cut(records: Records, seed: int, fractions: dict[str, float], groups: Indices | None = None) -> dict[str, Indices]:
    """Positions of each named part, and of the rest as "train"; each class is cut by itself, rounded to the nearest.

    A part takes at least one image of a class that has three left, and every class keeps one in train. Of groups (n,) a
    part takes those that bring it nearer to its number of images.
    """
    parts: dict[str, list[int]] = {name: [] for name in (*fractions, "train")}
    for left in _by_class(records, seed, "split", groups):
        total = _images(left)
        for name, fraction in fractions.items():
            least = 1 if fraction > 0 and len(left) >= 3 else 0
            count = min(max(int(total * fraction + 0.5), least), _images(left) - 1)
            taken, left = _nearest(left, count, at_least_one=count > 0)
            left = left or [taken.pop()] if taken else left
            parts[name] += chain.from_iterable(taken)
        parts["train"] += chain.from_iterable(left)
    return {name: np.array(sorted(part), dtype=np.int64) for name, part in parts.items()}


def limit(records: Records, count: float | None, seed: int) -> Records:
    """At most `count` images, or such a fraction of them (a float up to 1), chosen by split seed and name: classes in
    proportion (largest remainders), but one of each class as long as there are as many images as classes."""
    if isinstance(count, float) and 0 < count <= 1:
        count = round(count * len(records))
    if count is None or count >= len(records):
        return records
    if count < 1 or count != int(count):
        raise UserError(f"limit_train must be at least 1, or a fraction (0.25) of the images, not {count}.")
    return records.take(_drawn(records, int(count), seed, "limit", spare=0))


def take_out(records: Records, count: int, seed: int, groups: Indices | None = None) -> tuple[Records, Records]:
    """The rest, and `count` images drawn as in `limit`; every class keeps an image in the rest. Of groups (n,) whole
    ones are taken, which may make a few images less."""
    room = len(records) - len(np.unique(records.labels))
    if count > room:
        raise UserError(
            f"{count} images for val cannot be taken out of {len(records)}: every class keeps one to train on, which "
            f"leaves {room}. Set limit_val to at most {room}."
        )
    drawn = _drawn(records, count, seed, "val", spare=1, groups=groups)
    return records.take(np.setdiff1d(np.arange(len(records)), drawn)), records.take(drawn)


def _drawn(records: Records, count: int, seed: int, purpose: str, spare: int, groups: Indices | None = None) -> Indices:
    """Sorted positions of `count` images, leaving `spare` of every class."""
    classes = [units for units in _by_class(records, seed, purpose, groups) if units]
    counts = _quotas(np.array([_images(units) for units in classes]), count, spare)
    chosen = [_nearest(units, int(n), over=0)[0] for units, n in zip(classes, counts, strict=True)]
    return np.array(sorted(i for units in chosen for unit in units for i in unit), dtype=np.int64)


def _quotas(sizes: Indices, count: int, spare: int) -> Indices:
    """How many of `count` each class gives."""
    fractions = [Fraction(count * int(size), int(sizes.sum())) for size in sizes]
    room = sizes - spare
    counts = np.minimum([int(fraction) for fraction in fractions], room)
    by_remainder = sorted(range(len(sizes)), key=lambda c: (counts[c] - fractions[c], c))
    while counts.sum() < count:  # more than one round only where classes have no room left
        for c in [c for c in by_remainder if counts[c] < room[c]][: count - int(counts.sum())]:
            counts[c] += 1
    for empty in np.flatnonzero((counts == 0) & (room > 0)):
        if counts.max() == 1:
            break
        counts[counts.argmax()] -= 1
        counts[empty] = 1
    return counts


Unit = list[int]
"""Positions of images that stay together; one where there are no groups."""


def _by_class(records: Records, seed: int, purpose: str, groups: Indices | None) -> list[list[Unit]]:
    """Each class's units, in an order drawn from the seed and the names; a unit is of the class of its first image."""
    draws = [(text_bits(seed, purpose, name), name) for name in records.ids]
    units: dict[int, Unit] = {}
    for i in sorted(range(len(records)), key=draws.__getitem__):
        units.setdefault(i if groups is None else int(groups[i]), []).append(i)
    members: dict[int, list[Unit]] = {int(label): [] for label in np.unique(records.labels)}
    for unit in units.values():
        members[int(records.labels[unit[0]])].append(unit)
    return list(members.values())


def _nearest(
    units: list[Unit], count: int, *, over: float = 0.5, at_least_one: bool = False
) -> tuple[list[Unit], list[Unit]]:
    """The first units that together have about `count` images, and the others. A unit is passed over if more than the
    fraction `over` of it would be too much."""
    taken: list[Unit] = []
    left: list[Unit] = []
    room = count
    for unit in units:
        fits = room > 0 and len(unit) - room <= over * len(unit)
        (taken if fits else left).append(unit)
        room -= len(unit) if fits else 0
    if at_least_one and not taken and len(left) > 1:
        taken.append(left.pop(left.index(min(left, key=len))))
    return taken, left


def _images(units: list[Unit]) -> int:
    return sum(map(len, units))


def _ordered(splits: dict[str, Records]) -> dict[str, Records]:
    return {name: splits[name] for name in SPLITS if name in splits}


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"{name} must lie between 0 and 1 (0 makes no such split), not {value}.")
