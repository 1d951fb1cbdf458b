"""Train, val and test where a source does not bring them: stratified, and a function of the split seed and the names.

An image's place depends on its own name and on how many images its class has, never on the order of files. Images of
one group stay together: the group goes where its first image in the drawn order would, in that image's class.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from vitmods.data.digests import digests_of
from vitmods.data.groups import groups_of, hashes, keys_by, suggested
from vitmods.data.records import SPLITS, Records, Source, joined, printable
from vitmods.data.rng import text_order
from vitmods.data.split_file import read_split
from vitmods.util.errors import UserError

Indices = NDArray[np.int64]
Groups = Sequence[str] | None
VAL_FRACTION, TEST_FRACTION = 0.1, 0.2
"""Of the images, for the splits that are made if nothing else is said."""


class SplitOptions(TypedDict, total=False):
    """Which images are trained on, chosen by and reported.

    split_seed: which split is made, where the images have none.
    val_fraction, test_fraction: of the images, for such a split; None: 0.1 and 0.2. A UserError where the images have
        that split already.
    fold: (i, k): test is part i of k parts of all images, with about as many of each class; for i from 0 to k - 1 each
        image is tested once. Only a class whose images all belong together is always trained on.
    group_by: what images belong together, a regular expression or a CSV file; see `vitmods.data.groups`.
    split_file: a CSV file with the columns image and split, such as the split.csv of a study, that says it all.
    limit_train: at most so many training images, or such a fraction of them (a float up to 1), classes in proportion.
    limit_val: so many images for val, taken out of train where there is no val.
    train_on_all: train on val and test too, which then are no splits: for a model whose worth is known already.
    """

    split_seed: int
    val_fraction: float | None
    test_fraction: float | None
    fold: Sequence[int] | None
    group_by: str | Path | None
    split_file: str | Path | None
    limit_train: float | None
    limit_val: int | None
    train_on_all: bool


def make_splits(
    source: Source,
    *,
    split_seed: int = 0,
    val_fraction: float | None = None,
    test_fraction: float | None = None,
    fold: Sequence[int] | None = None,
    group_by: str | Path | None = None,
    split_file: str | Path | None = None,
    limit_train: float | None = None,
    limit_val: int | None = None,
    train_on_all: bool = False,
    cache_dir: Path | None = None,
) -> tuple[dict[str, Records], str]:
    """The splits to use and where each comes from, in words; the arguments are `SplitOptions`.

    A source with train alone is cut into train, val and test. One that lacks val gives a part of train to it. One that
    lacks test beside its own val is evaluated on val, so that numbers stay comparable with others on that split. A
    source without train is for evaluation only. What there is to know of groups is added to the source's warnings.
    """
    if limit_val is not None and limit_val < 1:
        raise UserError(f"limit_val must be at least 1, not {limit_val}. For no val split set val_fraction to 0.")
    _check_limit(limit_train)  # before images are read
    splits, origin = dict(source.splits), "found"
    if split_file is not None:
        given = {"val_fraction": val_fraction, "test_fraction": test_fraction, "fold": fold}
        _refuse(given, "the split file says where each image belongs")
        splits, origin = read_split(split_file, source), f"from {printable(Path(split_file).name)}"
    else:
        fractions = _fractions(source, val_fraction, test_fraction, fold, limit_val)
        if "test" in fractions or fractions.get("val") or (limit_val is not None and _lacks_val(source)):
            groups = _belonging(source, group_by, cache_dir)
            splits |= _made(splits["train"], split_seed, fractions, groups, fold, limit_val)
            made = f"seed {split_seed}" if fold is None else f"fold {fold[0]} of {fold[1]}, seed {split_seed}"
            origin = f"made, {made}" if "test" in fractions else f"found; val made from train, {made}"
    if limit_val is not None and "val" in splits:
        splits["val"] = limit(splits["val"], limit_val, split_seed)
    if "train" in splits:
        splits["train"] = limit(splits["train"], limit_train, split_seed)
    if train_on_all and "train" in splits:
        splits = {"train": joined(*(splits[name] for name in SPLITS if name in splits))}
        origin += "; joined to train on all"
    return {name: splits[name] for name in SPLITS if name in splits}, origin


def _lacks_val(source: Source) -> bool:
    return "train" in source.splits and "val" not in source.splits


def _fractions(
    source: Source,
    val_fraction: float | None,
    test_fraction: float | None,
    fold: Sequence[int] | None,
    limit_val: int | None,
) -> dict[str, float]:
    """Of the parts to be made, but for a val of `limit_val` images. UserError for what cannot apply."""
    own = f"these images come with splits of their own ({', '.join(source.splits)})"
    alone = list(source.splits) == ["train"]
    test = _fraction("test_fraction", test_fraction, TEST_FRACTION)
    val = _fraction("val_fraction", val_fraction, VAL_FRACTION)
    if not alone:
        _refuse({"test_fraction": test_fraction, "fold": fold}, own)
    if not _lacks_val(source):
        _refuse({"val_fraction": val_fraction}, own)
        return {}
    if limit_val is not None:
        _refuse({"val_fraction": val_fraction}, "limit_val says how many images val has")
    if fold is not None:
        _refuse({"test_fraction": test_fraction}, "the number of folds says how large test is")
        if len(fold) != 2 or not 0 <= fold[0] < fold[1] or fold[1] < 2:
            raise UserError(f"fold is (i, k): part i of k, with k at least 2 and i from 0 to k - 1, not {tuple(fold)}.")
        test = 1 / fold[1]
    fractions = ({"test": test} if alone else {}) | ({"val": val} if limit_val is None else {})
    if sum(fractions.values()) >= 1:
        raise UserError(f"A val_fraction of {val:g} and {test:g} for test leave nothing to train on: take less.")
    return fractions


def _made(
    train: Records,
    seed: int,
    fractions: dict[str, float],
    groups: Groups,
    fold: Sequence[int] | None,
    limit_val: int | None,
) -> dict[str, Records]:
    """Train and the parts that are cut out of it."""
    parts = cut(train, seed, fractions, groups, fold)
    splits = {name: train.take(part) for name, part in parts.items() if len(part)}
    if limit_val is not None:
        left = None if groups is None else [groups[i] for i in parts["train"]]
        splits["train"], splits["val"] = take_out(splits["train"], limit_val, seed, left)
    return splits


def _belonging(source: Source, group_by: str | Path | None, cache_dir: Path | None) -> Groups:
    """Groups of train's images; what there is to know of them is added to the source's warnings."""
    train = source.splits["train"]
    if group_by:
        keys_by(group_by, train.ids)  # a UserError, before every image is read
    digests = digests_of(train, cache_dir)
    copies = np.unique(hashes(digests[digests.any(axis=1)]), return_counts=True)[1]
    if many := copies[copies > 1].sum():
        source.warnings.append(f"{many} images have equals, byte for byte: they are in the same split as those.")
    if group_by is None and (found := suggested(train.ids, len(source.classes))):
        pattern, count = found
        source.warnings.append(
            f"By their names, images may belong together in {count} groups (patients, videos, scenes). If they do, "
            f"keep each in one split with --group-by '{pattern}' (group_by), or test shows what was trained on."
        )
    return groups_of(train.ids, group_by, digests)


def _refuse(given: dict[str, Any], why: str) -> None:
    """UserError for the first option that was given."""
    for name, value in given.items():
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            option = name.replace("_", "-")
            raise UserError(f"{name}={shown} cannot apply: {why}. Leave --{option} out.")


def _fraction(name: str, value: float | None, usual: float) -> float:
    value = usual if value is None else value
    if not 0 <= value < 1:
        raise UserError(f"{name} must lie between 0 and 1 (0 makes no such split), not {value}.")
    return value


def cut(
    records: Records, seed: int, fractions: dict[str, float], groups: Groups = None, fold: Sequence[int] | None = None
) -> dict[str, Indices]:
    """Positions of each named part, and of the rest as "train"; each class is cut by itself, rounded to the nearest.

    A part takes at least one image of a class that has three left, and every class keeps one in train. Of groups (n,) a
    part takes those that bring it nearer to its number of images. With a fold, test is that fold.
    """
    parts: dict[str, list[int]] = {name: [] for name in (*fractions, "train")}
    classes = _by_class(records, seed, "split", groups)
    homes = [] if fold is None else _dealt(classes, fold[1])
    for number, left in enumerate(classes):
        total = _images(left)
        for name, fraction in fractions.items():
            if fold is not None and name == "test":
                here = [home == fold[0] for home in homes[number]]
                parts[name] += chain.from_iterable(unit for unit, is_in in zip(left, here, strict=True) if is_in)
                left = [unit for unit, is_in in zip(left, here, strict=True) if not is_in]
                continue
            least = 1 if fraction > 0 and len(left) >= 3 else 0
            count = min(max(int(total * fraction + 0.5), least), _images(left) - 1)
            taken, left = _nearest(left, count, at_least_one=count > 0)
            left = left or [taken.pop()] if taken else left
            parts[name] += chain.from_iterable(taken)
        parts["train"] += chain.from_iterable(left)
    return {name: np.array(sorted(part), dtype=np.int64) for name, part in parts.items()}


def _dealt(classes: "list[list[Unit]]", count: int) -> list[list[int]]:
    """Of each class the fold of each unit. The largest units come first, each to the fold that has the fewest images of
    the class, and of all; -1, no fold, for the only unit of a class. UserError where a fold stays empty."""
    totals = [0] * count
    homes = []
    for units in classes:
        own, found = [0] * count, [-1] * len(units)
        for one in sorted(range(len(units)), key=lambda one: -len(units[one])) if len(units) > 1 else ():
            home = min(range(count), key=lambda fold: (own[fold], totals[fold]))
            found[one] = home
            own[home] += len(units[one])
            totals[home] += len(units[one])
        homes.append(found)
    if not all(totals):
        raise UserError(f"There are too few images, or groups of them, for {count} folds: make it fewer.")
    return homes


def limit(records: Records, count: float | None, seed: int) -> Records:
    """At most `count` images, or such a fraction of them (a float up to 1), chosen by split seed and name: classes in
    proportion (largest remainders), but one of each class as long as there are as many images as classes."""
    _check_limit(count)
    if isinstance(count, float) and 0 < count <= 1:
        count = round(count * len(records))
        _check_limit(count)
    if count is None or count >= len(records):
        return records
    return records.take(_drawn(records, int(count), seed, "limit", spare=0))


def _check_limit(count: float | None) -> None:
    if count is None or (isinstance(count, float) and 0 < count <= 1):
        return
    if not count >= 1 or count % 1:
        raise UserError(f"limit_train must be at least 1, or a fraction (0.25) of the images, not {count}.")


def take_out(records: Records, count: int, seed: int, groups: Groups = None) -> tuple[Records, Records]:
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


def _drawn(records: Records, count: int, seed: int, purpose: str, spare: int, groups: Groups = None) -> Indices:
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


def _by_class(records: Records, seed: int, purpose: str, groups: Groups) -> list[list[Unit]]:
    """Each class's units, in an order drawn from the seed and the names; a unit is of the class of its first image."""
    order = text_order(seed, purpose, records.ids).tolist()
    if groups is None:
        units: Iterable[Unit] = ([i] for i in order)
    else:
        together: dict[str, Unit] = {}
        for i in order:
            together.setdefault(groups[i], []).append(i)
        units = together.values()
    labels = records.labels.tolist()
    members: dict[int, list[Unit]] = {label: [] for label in sorted(set(labels))}
    for unit in units:
        members[labels[unit[0]]].append(unit)
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
