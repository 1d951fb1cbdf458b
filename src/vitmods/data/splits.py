"""Split the images of a source without splits into train, val and test: stratified, and by seed and names only.

The split of an image depends on its name and on the number of images of its class, not on the order of files. Images of
one group stay together: the group follows its first image in the drawn order, in that image's class.

Images of one patient or video, or with the same bytes, belong together. A split that is made keeps them in
one part, and statistics count them as one. `group_by` is a regular expression, whose first group (or whole match) in an
image's path names its group; or a CSV file with the columns image and group. Paths are those that `vitmods data` shows.

split.csv: each image with its split, label and group; written with every study, and read to reproduce its split.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitmods.data.records import SPLITS, Records, Source, joined, printable
from vitmods.data.rng import text_order
from vitmods.util.errors import UserError, explaining
from vitmods.util.files import expand_user, write_atomically
from vitmods.util.tables import IMAGE_NAMES, Finder, cell, read_table
from vitmods.util.text import no_formula

if TYPE_CHECKING:
    from vitmods.data.dataset import ImageDataset, Split


Indices = NDArray[np.int64]
Groups = Sequence[str] | None
SUGGESTED = (
    r"([^/]+)\.rf\.[^/]+$",
    r"([^/]+)[-_.](?:frame|tile|crop|f)?[-_]?\d+\.[^./]+$",
    r"(?i)(?<![a-z0-9])((?:patient|subject|case|person|pat|subj|pid|p|video|vid|clip|scene|slide)[-_]?\d+)(?![a-z0-9])",
    r"^([^/]+/.+)/[^/]+$",
)
"""Usual names of groups: the name before what Roboflow adds, or before a frame's number, a patient's or a video's
number, a folder in a class."""
_OF_COPIES = (*SUGGESTED, r"([^/]+)/[^/]*$", r"([^/]+)\.[^./]+$")  # and the folder, and the name without its folder
_SEPARATORS, _MOST_MARKS = "-_. (", 8


def group_keys(group_by: str | Path, ids: Sequence[str]) -> tuple[str, ...]:
    """Return the group of each image. Raises UserError if `group_by` is invalid or leaves images out."""
    keys: list[str | None]
    if str(group_by).lower().endswith(".csv"):
        rows = _of_images(group_by, read_columns(group_by, ("image", "group")), ids)
        keys = [rows[name]["group"] if name in rows else None for name in ids]
    else:
        expression = _compile(group_by)
        keys = [match[min(1, expression.groups)] if match else None for match in map(expression.search, ids)]
    if without := [name for name, key in zip(ids, keys, strict=True) if not key]:
        raise UserError(
            f'group_by="{printable(str(group_by))}" leaves {len(without)} of {len(ids)} images without a group, '
            f"such as {printable(without[0])}. Use an expression that matches every path, or a CSV file with the "
            "columns image and group that lists every image."
        )
    return tuple(map(str, keys))


def _compile(group_by: str | Path) -> re.Pattern[str]:
    text = printable(str(group_by))
    with explaining(lambda error: f'group_by="{text}" is not a valid regular expression: {error}.', re.error):
        return re.compile(str(group_by))


def groups_of(
    ids: Sequence[str], group_by: str | Path | None, digests: NDArray[np.uint8], listed: Groups = None
) -> tuple[str, ...] | None:
    """The group of each image, by name; None where no images belong together.

    Images with the same group or the same bytes belong together, also indirectly. A group has the name that `group_by`
    gives its first image (by name), or else that image's name. digests (n, 16): of the images' bytes, 0 if unknown.
    listed: the groups that the source names, without `group_by`.
    """
    if not (n := len(ids)):
        return None
    keys = group_keys(group_by, ids) if group_by else listed
    readable = np.flatnonzero(digests.any(axis=1))
    kinds, kind = np.unique(hashes(digests[readable]), return_inverse=True)
    if keys is None and len(kinds) == len(readable):
        return None
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # A graph of n images, up to n kinds of bytes and up to n groups: joined are the images of one component.
    starts, ends = [readable], [n + kind]
    if keys is not None:
        starts, ends = [*starts, np.arange(n)], [*ends, 2 * n + np.unique(keys, return_inverse=True)[1]]
    edges = (np.concatenate(starts), np.concatenate(ends))
    graph = coo_array((np.ones(len(edges[0]), dtype=bool), edges), shape=(3 * n, 3 * n))
    component = connected_components(graph, directed=False)[1][:n].tolist()
    if len(set(component)) == n:
        return None
    names: dict[int, str] = {}
    for i in sorted(range(n), key=ids.__getitem__):
        names.setdefault(component[i], ids[i] if keys is None else keys[i])
    return tuple(names[number] for number in component)


def hashes(digests: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Return digests (n, 16) as an array (n,) that numpy can sort and compare."""
    return np.ascontiguousarray(digests).view("S16").ravel()


def suggest_grouping(ids: Sequence[str], classes: int) -> tuple[str, int] | None:
    """Suggest an expression that seems to group the images, with its number of groups; None if none does.

    It finds a group for every image and several for each class; most images share theirs with one of the same folder,
    and a group has at most a fifth of them.
    """
    for pattern in SUGGESTED:
        if (keys := _separated(pattern, ids, classes)) is None:
            continue
        together = Counter((name.rpartition("/")[0], key) for name, key in zip(ids, keys, strict=True))
        if 2 * sum(size for size in together.values() if size > 1) > len(ids):
            return pattern, len(set(keys))
    return None


def _separated(pattern: str, ids: Sequence[str], classes: int) -> list[str] | None:
    """The group of every image; None without several groups for each class, or with one of more than a fifth."""
    # A lazy iterator: most patterns fail at the first of a million names.
    keys = [match[1] for match in takewhile(bool, map(re.compile(pattern).search, ids)) if match]
    sizes = Counter(keys)
    separates = len(keys) == len(ids) and len(sizes) >= max(6, 2 * classes) and 5 * max(sizes.values()) <= len(ids)
    return keys if separates else None


def grouping_of_copies(pairs: Sequence[tuple[str, str]], ids: Sequence[str], classes: int) -> tuple[str, int] | None:
    """Suggest the expression of most groups that has nine of ten pairs of copies in one group, with their number."""
    found = []
    for pattern in (*_OF_COPIES, *_learned(pairs)):
        if keys := _separated(pattern, ids, classes):
            group = dict(zip(ids, keys, strict=True))
            if 10 * sum(group[a] == group[b] for a, b in pairs) >= 9 * len(pairs):
                found.append((pattern, len(set(keys))))
    return max(found, key=lambda item: item[1], default=None)


def _learned(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Expressions for what precedes or follows the common name of two images: photo_flip.jpg, photo (1).jpg."""
    patterns, names = [], [[name.rpartition("/")[2].rpartition(".")[0] for name in pair] for pair in pairs]
    for turn, pattern in ((1, r"([^/]+?)(?:{})*\.[^./]+$"), (-1, r"(?:^|/)(?:{})*([^/]+)\.[^./]+$")):
        marks: Counter[str] = Counter()
        for pair in names:
            turned = [name[::turn] for name in pair]
            end = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], zip(*turned, strict=False)))
            while end and not all(name[end : end + 1] in _SEPARATORS for name in turned):
                end -= 1
            if end:
                marks.update(_form(name[end:][::turn]) for name in turned if name[end:])
        if marks:
            patterns.append(pattern.format("|".join(mark for mark, _ in marks.most_common(_MOST_MARKS))))
    return patterns


def _form(mark: str) -> str:
    """An expression for marks like this one: with any number, and any hash in place of letters and digits."""
    text = re.sub(r"([.()+*?{}^$|\[\]\\])", r"\\\1", mark)
    text = re.sub(r"(?=[^\W_]*\d)(?![A-Za-z]*\d{1,4}(?![^\W_]))[^\W_]{6,}", r"\\w+", text)
    return re.sub(r"\d+", r"\\d+", text)


def read_columns(path: str | Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Read a table with at least these columns. Raises UserError if one is missing or the file is not a table."""
    same = dict.fromkeys(IMAGE_NAMES, "image") if "image" in columns else {}
    rows = [row for _, row in read_table(expand_user(path), columns, same=same, errors="surrogateescape")]
    counts = Counter(row["image"] for row in rows) if "image" in columns else {}
    if repeated := [image for image, count in counts.items() if count > 1]:
        raise UserError(
            f"{printable(str(path))} names {printable(repeated[0])} {counts[repeated[0]]} times: leave one."
        )
    return rows


def _of_images(path: str | Path, rows: list[dict[str, str]], ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """The row of each image that the table names; rows that name none keep the name that they have."""
    written = {_cell(name): name for name in ids} | {name: name for name in ids}
    finder = None if any(row["image"] in written for row in rows) else Finder(ids)
    of_image: dict[str, dict[str, str]] = {}
    for row in rows:
        with explaining(lambda error: f"{printable(str(path))}: {printable(row['image'])} {error}.", ValueError):  # noqa: B023
            found = finder.find(row["image"]) if finder else written.get(row["image"])
        if of_image.setdefault(found or row["image"], row) is not row:
            raise UserError(f"{printable(str(path))} names {printable(row['image'])} twice: leave one.")
    return of_image


SPLIT_FILE = "split.csv"


def write_split(path: Path, dataset: "ImageDataset", folds: "Sequence[ImageDataset]" = ()) -> None:
    """Write the split of each image. Several labels are joined by ;, the group of an image without others is its name.
    With folds, a column more has the number of the fold that tests the image."""
    fold_of = {name: str(fold) for fold, part in enumerate(folds) for name in part.splits["test"].ids}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("image", "split", "label", "group", *(["fold"] if folds else [])))
    for name, split in dataset.splits.items():
        labels = _labels(split, dataset.classes, dataset.target)
        columns = [split.ids, [name] * len(split), labels, split.groups or split.ids]
        columns += [[fold_of.get(image, "") for image in split.ids]] if folds else []
        writer.writerows(map(_cell, row) for row in zip(*columns, strict=True))
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def _cell(text: str) -> str:
    """Return what is written of a name or a label: nothing that a spreadsheet runs, or that moves a cursor."""
    return str(no_formula(printable(text)))


def read_split(path: str | Path, source: Source) -> dict[str, Records]:
    """The source's images in the splits of the file. The source's warnings count images that it leaves out. UserError
    where it names unknown images, other labels, or no training images."""
    file = printable(str(path))
    listed = read_columns(path, ("image", "split"))
    rows = _of_images(path, listed, [name for part in source.splits.values() for name in part.ids])
    parts: dict[str, list[Records]] = {name: [] for name in SPLITS}
    left_out = 0
    for records in (source.splits[name] for name in SPLITS if name in source.splits):
        chosen: dict[str, list[int]] = {name: [] for name in SPLITS}
        wrong = []
        for i, (image, label) in enumerate(
            zip(records.ids, _labels(records, source.classes, source.target), strict=True)
        ):
            row = rows.pop(image, None)
            if row is None:
                left_out += 1
                continue
            if cell(_cell(row.get("label", label))) != cell(_cell(label)):  # for people; where it is there it is right
                wrong.append((image, label, row["label"]))
            split = row["split"].strip().lower()
            if split not in SPLITS:
                name, split = printable(row["image"]), printable(row["split"])
                raise UserError(f'{file} puts {name} into the split "{split}"; there are {", ".join(SPLITS)}.')
            chosen[split].append(i)
        if wrong:
            image, label, other = map(printable, wrong[0])
            raise UserError(
                f"{file} disagrees with {len(wrong)} labels of the data set: {image} is {label}, not {other}."
            )
        for name, positions in chosen.items():
            parts[name] += [records.take(np.array(positions))] if positions else []
    if rows:
        raise UserError(
            f"{file} names {len(rows)} images that {printable(source.spec)} does not have, such as "
            f"{printable(next(iter(rows)))}. Use the images for which it was written."
        )
    if not parts["train"]:
        raise UserError(f"{file} does not name any training image.")
    if left_out:
        source.warnings.append(f"{left_out} images that {file} does not name were left out.")
    return {name: part[0] if len(part) == 1 else joined(*part) for name, part in parts.items() if part}


def groups_in(path: str | Path | None) -> str | Path | None:
    """Return the split file if it has a column of groups, and so can serve as `group_by`; else None."""
    return path if path is not None and all("group" in row for row in read_columns(path, ("image", "split"))) else None


def _labels(split: "Split | Records", classes: Sequence[str], target: str) -> list[str]:
    if target != "class" and split.label_sets is not None:
        return [";".join(classes[label] for label in labels) for labels in split.label_sets]
    return [classes[label] for label in split.labels]


VAL_FRACTION, TEST_FRACTION = 0.1, 0.2
"""Default fractions of the images, for the splits that are made."""


def _check_limit(count: float | None) -> None:
    is_fraction = isinstance(count, float) and 0 < count <= 1
    if count is not None and not is_fraction and (not count >= 1 or count % 1):
        raise UserError(f"limit_train must be at least 1, or a fraction (0.25) of the images, not {count}.")


@dataclass(frozen=True)
class SplitOptions:
    """How images are divided into train, val and test."""

    split_seed: int = 0
    """seed of the split, for images without splits"""
    val_fraction: float | None = None
    """fraction of the images for val, if they lack a val split; None: 0.1"""
    test_fraction: float | None = None
    """fraction of the images for test, if they lack splits; None: 0.2"""
    fold: tuple[int, int] | None = None
    """I K: cross-validation, for images without splits: test is part I of K, from 0 to K - 1. Each image is in one test
    part (in none, if all images of its class belong together)"""
    group_by: str | None = None
    """keep images that belong together (of one patient or video) in one split: a regular expression whose first group,
    or match, in a path is the group's name, or a CSV file with the columns image and group (docs/data.md)"""
    split_file: Path | None = None
    """a CSV file with the columns image and split that defines the splits, such as the split.csv of a study"""
    limit_train: int | float | None = None
    """number of training images to use, or a fraction of them (0.25), classes in proportion"""
    limit_val: int | None = None
    """number of images for validation; without a val split, they are taken out of train"""

    def __post_init__(self) -> None:
        """Raise UserError for values that no images can be split by, before any image is read."""
        if self.limit_val is not None and self.limit_val < 1:
            raise UserError(
                f"limit_val must be at least 1, not {self.limit_val}. For no val split set val_fraction to 0."
            )
        _check_limit(self.limit_train)
        for name in ("val_fraction", "test_fraction"):
            if (value := getattr(self, name)) is not None and not (isinstance(value, int | float) and 0 <= value < 1):
                raise UserError(f"{name} must be at least 0 (no such split) and below 1, not {value!r}.")
        if (fold := self.fold) is not None and (len(fold) != 2 or not 0 <= fold[0] < fold[1] or fold[1] < 2):
            raise UserError(f"fold is (i, k): part i of k, with k at least 2 and i from 0 to k - 1, not {tuple(fold)}.")
        for name, excluded, reason in (
            ("split_file", ("val_fraction", "test_fraction", "fold"), "the split file says where each image belongs"),
            ("limit_val", ("val_fraction",), "limit_val says how many images val has"),
            ("fold", ("test_fraction",), "the number of folds says how large test is"),
        ):
            if getattr(self, name) is not None:
                self.refuse(reason, *excluded)
        if self.group_by is not None and not str(self.group_by).strip():
            raise UserError("group_by is empty: give an expression or a file, or leave it out (--group-by).")
        if not isinstance(self.group_by, str | Path | None):
            raise UserError(
                f"group_by is a regular expression or the path of a CSV file with the columns image and group, not a "
                f"{type(self.group_by).__name__}: write the groups into such a file."
            )
        if self.group_by and not str(self.group_by).lower().endswith(".csv"):
            _compile(self.group_by)
        for path in (self.split_file, self.group_by):
            if str(path).lower().endswith(".csv") and not expand_user(str(path)).exists():
                raise UserError(f"{printable(str(path))} cannot be read as a CSV file: it does not exist.")

    def refuse(self, reason: str, *names: str) -> None:
        """Raise UserError for the first of these options that is set."""
        for name in names:
            if (value := getattr(self, name)) is not None:
                text = f"{value:g}" if isinstance(value, float) else value
                raise UserError(f"{name}={text} cannot apply: {reason}. Leave --{name.replace('_', '-')} out.")


def make_splits(
    source: Source,
    options: SplitOptions = SplitOptions(),
    *,
    train_on_all: bool = False,
    cache_dir: Path | None = None,
) -> tuple[dict[str, Records], str]:
    """Return the splits to use, and a description of their origin.

    A source with only train is cut into train, val and test. Without val, a part of train becomes val. With val and
    without test it is evaluated on val, so that numbers stay comparable with others on that split. A source without
    train is for evaluation only. Warnings about groups are added to the source's.
    train_on_all: join all splits to train, for a model that was evaluated before.
    """
    splits, origin = dict(source.splits), "found"
    seed, fold, limit_val = options.split_seed, options.fold, options.limit_val
    if options.split_file is not None:
        splits = read_split(options.split_file, source)
        origin = f"from {printable(Path(options.split_file).name)}"
    else:
        fractions, needs_val = _fractions(splits, options), "train" in splits and "val" not in splits
        if "test" in fractions or fractions.get("val") or (needs_val and limit_val is not None):
            train, groups = splits["train"], _train_groups(source, options.group_by, cache_dir)
            parts = cut(train, seed, fractions, groups, fold)
            splits |= {name: train.take(part) for name, part in parts.items() if len(part)}
            if limit_val is not None:
                remaining = None if groups is None else [groups[i] for i in parts["train"]]
                splits["train"], splits["val"] = take_out(splits["train"], limit_val, seed, remaining)
            made = f"seed {seed}" if fold is None else f"fold {fold[0]} of {fold[1]}, seed {seed}"
            origin = f"made, {made}" if "test" in fractions else f"found; val made from train, {made}"
    if limit_val is not None and "val" in splits:
        splits["val"] = limit(splits["val"], limit_val, seed)
    if "train" in splits:
        splits["train"] = limit(splits["train"], options.limit_train, seed)
    if train_on_all and "train" in splits:
        splits = {"train": joined(*(splits[name] for name in SPLITS if name in splits))}
        origin += "; joined to train on all"
    return {name: splits[name] for name in SPLITS if name in splits}, origin


def _fractions(splits: Collection[str], options: SplitOptions) -> dict[str, float]:
    """Return the parts of train that become test and val. Raises UserError for options that these splits exclude, and
    where nothing is left."""
    fractions: dict[str, float] = {}
    reason = f"these images have given splits ({', '.join(splits)})"
    if list(splits) == ["train"]:
        fractions["test"] = TEST_FRACTION if options.test_fraction is None else options.test_fraction
        fractions |= {} if options.fold is None else {"test": 1 / options.fold[1]}
    else:
        options.refuse(reason, "test_fraction", "fold")
    if "train" not in splits or "val" in splits:
        options.refuse(reason, "val_fraction")
    elif options.limit_val is None:
        fractions["val"] = VAL_FRACTION if options.val_fraction is None else options.val_fraction
    if sum(fractions.values()) >= 1:
        val, test = (fractions.get(name, 0) for name in ("val", "test"))
        raise UserError(f"val_fraction {val:g} and test_fraction {test:g} leave nothing to train on: lower them.")
    return fractions


def count_training(source: Source, options: SplitOptions) -> int:
    """About how many images `make_splits` would train on, without drawing them."""
    splits = {name: len(records) for name, records in source.splits.items()}
    images = train = float(splits.get("train", 0))
    if options.split_file is not None:
        images = sum(row["split"] == "train" for row in read_columns(options.split_file, ("image", "split")))
    else:
        fractions = _fractions(splits, options)
        for name in sorted(fractions, reverse=True):  # val first: in floats the order may decide an image
            images -= fractions[name] * train
        images -= (options.limit_val or 0) if "val" not in splits else 0
    return limited(options.limit_train, int(max(images, 0)))


def _train_groups(source: Source, group_by: str | Path | None, cache_dir: Path | None) -> Groups:
    """Return the groups of train's images; adds to the source's warnings."""
    from vitmods.data.store import digests_of  # imports torch, so only here: --help does without

    train = source.splits["train"]
    if group_by:
        group_keys(group_by, train.ids)  # a UserError, before every image is read
    digests = digests_of(train, cache_dir)
    copies = np.unique(hashes(digests[digests.any(axis=1)]), return_counts=True)[1]
    if equal := copies[copies > 1].sum():
        source.warnings.append(f"{equal} images have exact copies (byte for byte): copies stay in one split.")
    if group_by is None and train.groups is None and (suggestion := suggest_grouping(train.ids, len(source.classes))):
        pattern, count = suggestion
        source.warnings.append(
            f"By their names, images may belong together in {count} groups (patients, videos, scenes). If they do, "
            f"keep each in one split with --group-by '{pattern}' (group_by); otherwise training images leak into test."
        )
    return groups_of(train.ids, group_by, digests, train.groups)


def cut(
    records: Records, seed: int, fractions: dict[str, float], groups: Groups = None, fold: Sequence[int] | None = None
) -> dict[str, Indices]:
    """Return the positions of each part, and of the rest as "train". Each class is cut by itself, with rounding.

    A part takes at least one image of a class that has three left, and every class keeps one in train. Of groups (n,) a
    part takes those that bring it nearer to its number of images. With a fold, test is that fold.
    """
    parts: dict[str, list[int]] = {name: [] for name in (*fractions, "train")}
    classes = _by_class(records, seed, "split", groups)
    folds = [] if fold is None else _deal(classes, fold[1])
    for number, units in enumerate(classes):
        total = sum(map(len, units))
        for name, fraction in fractions.items():
            if fold is not None and name == "test":
                pairs = list(zip(units, folds[number], strict=True))
                taken = [unit for unit, place in pairs if place == fold[0]]
                units = [unit for unit, place in pairs if place != fold[0]]
            else:
                least = 1 if fraction > 0 and len(units) >= 3 else 0
                count = min(max(int(total * fraction + 0.5), least), sum(map(len, units)) - 1)
                taken, units = _nearest(units, count, at_least_one=count > 0)
                units = units or [taken.pop()] if taken else units
            parts[name] += chain.from_iterable(taken)
        parts["train"] += chain.from_iterable(units)
    return {name: np.array(sorted(part), dtype=np.int64) for name, part in parts.items()}


def _deal(classes: "list[list[Unit]]", count: int) -> list[list[int]]:
    """Deal units out to folds: of each class the fold of each unit. The largest come first, each to the fold that has
    the fewest images of the class, and of all; -1 for the only unit of a class. UserError where a fold stays empty."""
    totals = [0] * count
    folds = []
    for units in classes:
        in_class, fold_of = [0] * count, [-1] * len(units)
        for unit in sorted(range(len(units)), key=lambda i: -len(units[i])) if len(units) > 1 else ():
            fold_of[unit] = fold = min(range(count), key=lambda i: (in_class[i], totals[i]))
            in_class[fold] += len(units[unit])
            totals[fold] += len(units[unit])
        folds.append(fold_of)
    if not all(totals):
        raise UserError(f"Too few images, or groups of them, for {count} folds: use fewer folds.")
    return folds


def limit(records: Records, count: float | None, seed: int) -> Records:
    """At most `count` images, or such a fraction of them (a float up to 1), chosen by split seed and name: classes in
    proportion (largest remainders), but one of each class as long as there are as many images as classes."""
    _check_limit(count)
    kept = limited(count, len(records))
    if kept == len(records):
        return records
    _check_limit(kept)  # of a fraction
    return records.take(_drawn(records, kept, seed, "limit", spare=0))


def limited(most: float | None, images: int) -> int:
    """How many of so many images are left: at most a number of them, or a fraction (a float up to 1)."""
    if most is None:
        return images
    return min(images, round(most * images) if isinstance(most, float) and most <= 1 else int(most))


def take_out(records: Records, count: int, seed: int, groups: Groups = None) -> tuple[Records, Records]:
    """The remaining images, and `count` drawn as in `limit`; every class keeps one. Whole groups (n,) are taken, which
    may make a few images less."""
    room = len(records) - len(np.unique(records.labels))
    if count > room:
        raise UserError(
            f"{count} images for val cannot be taken out of {len(records)}: every class keeps one to train on, which "
            f"leaves {room}. Set limit_val to at most {room}."
        )
    drawn = _drawn(records, count, seed, "val", spare=1, groups=groups)
    return records.take(np.setdiff1d(np.arange(len(records)), drawn)), records.take(drawn)


def _drawn(records: Records, count: int, seed: int, purpose: str, spare: int, groups: Groups = None) -> Indices:
    """Draw `count` images, leaving `spare` of every class; returns their sorted positions."""
    classes = [units for units in _by_class(records, seed, purpose, groups) if units]
    counts = _quotas(np.array([sum(map(len, units)) for units in classes]), count, spare)
    chosen = [_nearest(units, int(n), over=0)[0] for units, n in zip(classes, counts, strict=True)]
    return np.array(sorted(i for units in chosen for unit in units for i in unit), dtype=np.int64)


def _quotas(sizes: Indices, count: int, spare: int) -> Indices:
    """Divide `count` among classes in proportion to their sizes, leaving room for those that are kept."""
    shares, total, room = [count * int(size) for size in sizes], int(sizes.sum()), sizes - spare
    counts = np.minimum([share // total for share in shares], room)
    by_remainder = sorted(range(len(sizes)), key=lambda c: (int(counts[c]) * total - shares[c], c))
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
"""Positions of images that stay together; one position without groups."""


def _by_class(records: Records, seed: int, purpose: str, groups: Groups) -> list[list[Unit]]:
    """Return each class's units in an order drawn from seed and names; a unit has the class of its first image."""
    units: dict[str | int, Unit] = {}
    for i in text_order(seed, purpose, records.ids).tolist():
        units.setdefault(i if groups is None else groups[i], []).append(i)
    labels = records.labels.tolist()
    members: dict[int, list[Unit]] = {label: [] for label in sorted(set(labels))}
    for unit in units.values():
        members[labels[unit[0]]].append(unit)
    return list(members.values())


def _nearest(
    units: list[Unit], count: int, *, over: float = 0.5, at_least_one: bool = False
) -> tuple[list[Unit], list[Unit]]:
    """The first units that together have about `count` images, and the others. A unit is passed over if more than the
    fraction `over` of it would be too much."""
    taken: list[Unit] = []
    others: list[Unit] = []
    room = count
    for unit in units:
        fits = room > 0 and len(unit) - room <= over * len(unit)
        (taken if fits else others).append(unit)
        room -= len(unit) if fits else 0
    if at_least_one and not taken and len(others) > 1:
        taken.append(others.pop(others.index(min(others, key=len))))
    return taken, others
