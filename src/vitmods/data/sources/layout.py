"""What a folder of images seems to be. It is listed once; then hypotheses are tested before anything else happens.

A reading says which folders are which split, as the option `splits` does: `{"train": "train", "test_set": "test"}`. The
folders inside of them are the classes; in `{"*/images": "train"}` the star is. `{".": "train"}` is a folder of class
folders. Where the names and the structure of the folders agree on one reading it is used; otherwise an error shows
those that fit, with their numbers of images and the specification of each.
"""

import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TypeVar
from unicodedata import normalize
from urllib.parse import quote

import numpy as np

from vitmods.data.read import Unreadable, decode, format_of, reading
from vitmods.data.records import PICTURES, SPLITS, printable, split_named
from vitmods.util.errors import UserError
from vitmods.util.limits import read_bytes
from vitmods.util.text import first_of, listing, plural

Reading = Mapping[str, str]
T = TypeVar("T")
LAYOUT = "Expected FOLDER/class/image.jpg, or FOLDER/train/class/image.jpg with val and test next to train."
_IMAGES = frozenset(["image", "images", "img", "imgs", "jpegimages"])
_MASKS = frozenset(["annotation", "annotations", "gt", "label", "labels", "mask", "masks", "seg", "segmentation"])
_MASKS |= {"segmentationclass", "trimaps"}
_PLAIN = _IMAGES | {"data", "dataset", "folder", "photos", "pictures", "samples", "set", "split"}
"""words that say nothing of the content of a folder"""
_PARTS = frozenset(["archive", "batch", "chunk", "fold", "part", "shard", "split", "vol", "volume"])
_KINDS = frozenset(["category", "class", "grade", "label", "level", "stage", "type"])
_UNLABELED = frozenset(["unlabeled", "unlabelled", "unsup", "unsupervised"])
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+")
_COMPACT = re.compile(r"\b(train|training|val|valid|validation|dev|test|testing)(set|data|dataset|images|imgs|list)\b")
_TRIED = 3  # pictures that are compared with those that they may be made of
_ALIKE = 0.4  # least correlation of a small copy with its original; filters differ
_FEW_COLORS = 16  # of a mask


class Tree:
    """A folder, with the names of its pictures and of its other files, sorted, and the folders in it by name.

    Hidden files are left out. Names of pictures are those with a picture's ending, whether it can be read or not, and
    those with another ending whose first bytes are a picture's.
    """

    def __init__(self, path: str) -> None:
        self.path, self.name = path, normalize("NFC", os.path.basename(path))
        self.pictures, self.others = list[str](), list[str]()
        self.folders: dict[str, Tree] = {}

    def walk(self) -> "Iterator[Tree]":
        """This folder and all below it."""
        pending = [self]
        while pending:
            yield (tree := pending.pop())
            pending += reversed(tree.folders.values())

    @cached_property
    def count(self) -> int:
        """How many pictures are in and below it."""
        return sum(len(tree.pictures) for tree in self.walk())

    @property
    def filled(self) -> "dict[str, Tree]":
        """The folders in it that hold pictures, by name."""
        return {tree.name: tree for tree in self.folders.values() if tree.count}

    @cached_property
    def inner(self) -> "Tree":
        """The first folder in it that is more than the wrapper of one other."""
        tree = self
        while not tree.pictures and len(filled := list(tree.filled.values())) == 1 and filled[0].filled:
            tree = filled[0]
        return tree

    def paths(self) -> Iterator[str]:
        """The paths of all pictures in and below it."""
        return (os.path.join(tree.path, name) for tree in self.walk() for name in tree.pictures)


def list_tree(root: Path) -> tuple[Tree, list[str]]:
    """Read each folder at and below root once, links followed; returns also the folders that links lead to again.

    Raises OSError.
    """
    top, seen, repeated = Tree(str(root)), set[tuple[int, int]](), []
    pending: list[tuple[Tree, Tree | None]] = [(top, None)]
    samples: dict[str, list[str]] = {}
    while pending:
        tree, above = pending.pop()
        status = os.stat(tree.path)
        if (identity := (status.st_dev, status.st_ino)) in seen:
            repeated.append(printable(tree.path))
            continue
        seen.add(identity)
        if above is not None:
            above.folders[os.path.basename(tree.path)] = tree
        inside = []
        with os.scandir(tree.path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                if is_dir(entry):
                    inside.append((Tree(entry.path), tree))
                elif (ending := ending_of(entry.name)) in PICTURES:
                    tree.pictures.append(entry.name)
                else:
                    tree.others.append(entry.name)
                    if len(some := samples.setdefault(ending, [])) < _TRIED:
                        some.append(entry.path)
        pending += reversed(inside)
    if pictures := {ending for ending, paths in samples.items() if all(map(_begins_as_picture, paths))}:
        for tree in top.walk():
            found = {name for name in tree.others if ending_of(name) in pictures}
            tree.pictures, tree.others = sorted({*tree.pictures, *found}), [n for n in tree.others if n not in found]
    return top, repeated


def is_dir(entry: "os.DirEntry[str]") -> bool:
    """Whether it is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link that points to itself
        return False


def ending_of(name: str) -> str:
    """Return ".jpg" of a file's name that starts without a dot; os.path.splitext takes four times as long."""
    dot = name.rfind(".")
    return name[dot:].lower() if dot > 0 else ""


def stem_of(name: str) -> str:
    """A file's name without its ending."""
    return name[: name.rfind(".")] if name.rfind(".") > 0 else name


def _begins_as_picture(path: str) -> bool:
    with suppress(OSError, ValueError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return format_of(file.read(256)) not in ("", "HTML", "Git LFS", "PostScript", "SVG")
    return False


# Pictures that were made of others


def leave_out_copies(top: Tree) -> list[str]:
    """Remove the thumbnails and masks that lie beside or below their pictures, and a folder that repeats those beside
    it. Returns sentences that name and count them."""
    removed = Counter[str]()
    for tree in top.walk():
        stems = {stem_of(name): name for name in tree.pictures}
        for name, below in list(tree.folders.items()) if stems else ():
            pairs, named, paths = [], 0, list(below.paths())
            for path in paths:
                *folders, last = path[len(below.path) + 1 :].split(os.sep)
                original = next((part for part in folders if stems.get(stem_of(part)) == part), None)
                named += original is not None
                if original := original or stems.get(stem_of(last)):
                    pairs.append((path, os.path.join(tree.path, original)))
            if 5 * len(pairs) >= 4 * len(paths) > 0 and (2 * named > len(paths) or _made_as(pairs) == "copies"):
                removed[f"smaller copies (thumbnails) in folders called {name}"] += len(paths)
                del tree.folders[name]
        if any(base_of(stem, stems, proper=True) for stem in _spread(list(stems), 60)):
            removed.update(_leave_out_beside(tree, stems))
    above = top.inner
    filled = above.filled
    for name, tree in filled.items():
        others = {other: below for other, below in filled.items() if other != name}
        inside = tree.inner.filled
        if len(others) > 1 and all(o in inside and _files(inside[o]) == _files(below) for o, below in others.items()):
            removed[f"images in {name}, which repeats the folders beside it,"] += tree.count
            above.folders = {key: below for key, below in above.folders.items() if below is not tree}
            for counted in top.walk():
                counted.__dict__.pop("count", None)
            break
    return [f"{count:,} {printable(what)} were left out." for what, count in removed.items()]


def _leave_out_beside(tree: Tree, stems: dict[str, str]) -> Counter[str]:
    """Remove pictures whose names extend that of the picture that they were made of, as in cat.jpg and cat_mask.png."""
    bases = {stem: base for stem in stems if (base := base_of(stem, stems, proper=True))}
    made: dict[str, list[str]] = {}
    for stem, base in bases.items():
        made.setdefault(stem.replace(base, "*", 1), []).append(stem)
    removed, gone = Counter[str](), dict[str, str]()
    for how, some in made.items():
        files = [(os.path.join(tree.path, stems[s]), os.path.join(tree.path, stems[bases[s]])) for s in some]
        if 4 * len(some) >= len(stems) - len(bases) and (kind := _made_as(files)):
            gone |= dict.fromkeys(some, f"{'masks' if kind == 'masks' else 'smaller copies'} called {how}")
    gone |= {stem: gone[base] for stem, base in bases.items() if base in gone and stem not in gone}
    removed.update(f"{what} of the images beside them" for what in gone.values())
    tree.pictures = [name for stem, name in stems.items() if stem not in gone]
    return removed


def _spread(items: list[T], count: int) -> list[T]:
    """At most so many of them, evenly spread."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)] if items else []


def _files(tree: Tree) -> set[tuple[str, int]]:
    return {(path[len(tree.path) :], os.stat(path).st_size) for path in tree.paths() if os.path.isfile(path)}


def base_of(stem: str, stems: Container[str], proper: bool = False) -> str | None:
    """The name itself, unless `proper`; or the longest of the stems that it begins or ends with, beside a sign."""
    if stem in stems and not proper:
        return stem
    cuts = [i for i, sign in enumerate(stem) if not sign.isalnum()]
    parts = [part for cut in cuts for part in (stem[:cut], stem[cut + 1 :]) if part and part in stems]
    return max(parts, key=len, default=None)


def _made_as(pairs: list[tuple[str, str]]) -> str:
    """Whether pictures are smaller "copies" or "masks" of their partners, by the pixels of a few; "" if neither."""
    try:
        images = [(_pixels(made), _pixels(original)) for made, original in _spread(pairs, _TRIED)]
    except Unreadable:
        return ""
    if not images:
        return ""
    colors = [[len(np.unique(image.reshape(3, -1), axis=1).T) for image in pair] for pair in images]
    same = all(made.shape == original.shape for made, original in images)
    if same and all(few <= _FEW_COLORS < many for few, many in colors):
        return "masks"
    ratios = [np.divide(original.shape[1:], made.shape[1:]) for made, original in images]
    if not all(min(ratio) > 1.2 and max(ratio) < 1.1 * min(ratio) + 0.1 for ratio in ratios):
        return ""
    likeness = np.array([[_correlation(made, original) for _, original in images] for made, _ in images])
    own, others = np.diag(likeness), likeness[~np.eye(len(images), dtype=bool)]
    least = _ALIKE if len(images) > 1 else 2 * _ALIKE
    return "copies" if own.min() > max(least, others.max(initial=-1.0)) else ""


def _pixels(path: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    with reading():
        return decode(read_bytes(Path(path), "image"), 3)


def _correlation(made: "np.ndarray", original: "np.ndarray") -> float:
    """Of the gray values of a picture with those of another that is shrunk to its size."""
    from PIL import Image

    size = made.shape[2], made.shape[1]
    shrunk = Image.fromarray(original.mean(0).astype(np.uint8)).resize(size, Image.Resampling.BOX)
    a, b = made.mean(0).ravel(), np.asarray(shrunk, dtype=float).ravel()
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0


# Readings


def parse_reading(text: str) -> dict[str, str]:
    """Read the option `splits`: "none", or FOLDER:SPLIT separated by commas, or lists of images as FILE:SPLIT. Raises
    UserError."""
    if text == "none":
        return {".": "train"}
    pairs = [pair.rpartition(":") for pair in text.split(",")]
    if wrong := next((name or split for name, _, split in pairs if not name or split not in SPLITS), None):
        raise UserError(
            f"splits: {printable(wrong)!r} is not understood. Write FOLDER:SPLIT, separated by commas, with the splits "
            f"{', '.join(SPLITS)}; or none, where the folders are classes without splits."
        )
    names = [name if os.path.isfile(name) else name.strip("/") or "." for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"splits: {printable(twice)} is named twice: leave one out.")
    return {name: split for name, (_, _, split) in zip(names, pairs, strict=True)}


def places_of(top: Tree, reading: Reading) -> dict[str, list[tuple[Tree, str]]]:
    """Split -> the folders of a reading, each with its class, or "" where the folders in it are classes.

    Raises UserError for a folder that does not exist.
    """
    places: dict[str, list[tuple[Tree, str]]] = {}
    for pattern, split in reading.items():
        found = [(top, "")]
        for part in [] if pattern == "." else pattern.split("/"):
            if "*" in part:
                star = re.compile(re.escape(part).replace(r"\*", "(.+)", 1))
                inside = [(below, star.fullmatch(below.name)) for tree, _ in found for below in tree.folders.values()]
                found = [(below, match[1]) for below, match in inside if match]
            else:
                named = [
                    (tree.folders.get(part) or tree.filled.get(normalize("NFC", part)), label) for tree, label in found
                ]
                found = [(tree, label) for tree, label in named if tree is not None]
        if not found:
            raise UserError(
                f"splits: {printable(top.path)} does not have the folder {printable(pattern)}, or a list of images at "
                "this path."
            )
        places.setdefault(split, []).extend(found)
    return {split: places[split] for split in SPLITS if split in places}


def in_words(top: Tree, reading: Reading, where: str, lists: str = "") -> str:
    """A line that says what a reading finds, and its specification, which may name lists of splits too."""
    classes, counts, loose = set[str](), Counter[str](), 0
    for split, places in places_of(top, reading).items():
        for tree, label in places:
            below = {label: tree} if label else tree.filled
            classes |= below.keys()
            counts[split] += sum(inside.count for inside in below.values())
            loose += 0 if label else len(tree.pictures)
    of_splits = ", ".join(f"{count:,} for {split}" for split, count in counts.items() if count)
    if not classes:
        found = f"{loose:,} images without classes"
    else:
        found = (
            f"{plural(len(classes), 'class', 'classes')} ({first_of(sorted(map(printable, classes)), 4)}): {of_splits}"
        )
    option = ",".join(f"{quote(name, safe='/*. ')}:{split}" for name, split in reading.items())
    if dict(reading) == {".": "train"} and not lists:
        option = "none"
    return f'  {found}: --data "{where}?splits={",".join(filter(None, (option, lists)))}"'


class SeveralReadings(UserError):
    """A folder can be read in several ways, each of which the message specifies."""

    def __init__(self, tree: Tree, where: str, reason: str, readings: Sequence[Reading] = ()) -> None:
        self.tree, self.where, self.reason, self.readings = tree, where, reason, readings
        super().__init__(self.text())

    def text(self, lists: str = "") -> str:
        """The message; lists: of splits that were given, for the specifications."""
        return "\n".join([self.reason, *(in_words(self.tree, one, self.where, lists) for one in self.readings)])


def ask(top: Tree, where: str, reason: str, *readings: Reading) -> SeveralReadings:
    """The error that shows the readings of a folder that fit."""
    text = f"{where} can be read in several ways: {reason} Say which is meant:"
    return SeveralReadings(top, where, text, readings)


def above(top: Tree, where: str, *inside: str) -> SeveralReadings:
    """The error that names the folders inside of one that can be read."""
    text = f"{where} is above the folders of the classes. Give {' or '.join(inside)}. {LAYOUT}"
    return SeveralReadings(top, where, text)


def split_word(name: str) -> tuple[str, frozenset[str]] | None:
    """The split that a word in a name means, and the other words that say something; None without one split."""
    words = _COMPACT.sub(r"\1 \2", " ".join(_WORDS.findall(name)).lower()).split()
    meant = {split for word in words if (split := split_named(word))}
    rest = frozenset(word for word in words if split_named(word) is None)
    return (meant.pop(), rest) if len(meant) == 1 else None


def understand(top: Tree, where: str) -> tuple[dict[str, str], list[str]]:
    """Find the one reading of a folder that fits, and what to say of it. Raises UserError where several do."""
    tops = list(top.filled.values())
    if (
        len(tops) == 1
        and not top.pictures
        and not split_named(tops[0].name)
        and len((inner := tops[0].inner).filled) > 1
    ):
        inside = f"{where}/{printable(_below(top, inner))}"
        understand(inner, inside)  # its own error says more
        raise above(top, where, inside)
    refuse_masks(where, top.filled)
    reading, notes = _named_splits(top, where, tops) or _classes(top, where, tops)
    notes = [*notes, *_inside(top, where, reading)]
    for places in places_of(top, reading).values():
        refuse_masks(where, {name: below for tree, label in places if not label for name, below in tree.filled.items()})
    return reading, notes


def _below(top: Tree, tree: Tree) -> str:
    return os.path.relpath(tree.path, top.path).replace(os.sep, "/")


def _together(top: Tree, trees: Iterable[Tree], split: str = "train") -> dict[str, str]:
    """The reading in which the folders inside of these are the classes."""
    return {_below(top, tree.inner): split for tree in trees}


def _named(trees: Iterable[Tree]) -> str:
    return first_of([*dict.fromkeys(printable(tree.name) for tree in trees)], 4)


def _kin(trees: Iterable[Tree], names: Container[str]) -> list[Tree]:
    """The folders in which at least two folders, and half of them, have one of the names."""
    inside = {tree: [name in names for name in tree.inner.filled] for tree in trees}
    return [tree for tree, known in inside.items() if sum(known) > 1 and 2 * sum(known) >= len(known)]


def _named_splits(top: Tree, where: str, tops: list[Tree]) -> tuple[dict[str, str], list[str]] | None:
    """The reading in which folders are splits by their names, if what is in them agrees; None if no name says so."""
    exact: dict[str, Tree] = {}
    for tree in top.folders.values():
        if (split := split_named(tree.name)) and exact.setdefault(split, tree) is not tree:
            raise UserError(f"Both {exact[split].name} and {tree.name} in {where} could be {split}: keep one.")
    # A class may be called "train" or "test" (vehicles, say): a train folder without folders is a split only where all
    # its neighbors are called as splits too.
    is_exact = "train" in exact and bool(exact["train"].folders or len(exact) == len(top.folders) > 1)
    words = {tree: word for tree in tops if (word := split_word(tree.name))}
    split_of = {tree: split for split, tree in exact.items()} if is_exact else {t: word[0] for t, word in words.items()}
    others = [tree for tree in tops if tree not in split_of]
    train = next((tree for tree, split in split_of.items() if split == "train"), None)
    classes = train.inner.filled.keys() if train else set[str]()
    unwrapped = {tree: _unwrapped(tree, classes) for tree in split_of}
    reading = {_below(top, inside): split_of[tree] for tree, inside in unwrapped.items()}
    kin = _kin(others, classes if is_exact else {name for tree in words for name in tree.inner.filled})
    if is_exact and kin:
        more = [reading | _together(top, kin, split) for split in ("test", "train")]
        raise ask(top, where, f"{_named(kin)} holds the classes of {_named([exact['train']])}.", reading, *more)
    if is_exact:
        return reading, []
    if exact and train is None and not kin and all(tree.folders for tree in exact.values()):
        names = " and ".join(tree.name for tree in exact.values())
        reading = {tree.name: split for split, tree in exact.items()}
        raise ask(top, where, f"it holds {names}, but not a train folder.", reading, dict.fromkeys(reading, "train"))
    are_words = all(any(map(str.isalpha, rest - _PLAIN)) for _, rest in words.values())
    if len({split for split, _ in words.values()}) == 1 and are_words and not any(tree.filled for tree in words):
        return None  # "strength training" and "test positive" are classes where no other split is there
    if not words or (len(words) == 1 and not kin and all(not rest or rest - _PLAIN for _, rest in words.values())):
        return None
    rests = [rest - _PLAIN for _, rest in words.values()]
    agree = train and not kin and (classes or not others) and len({*split_of.values()}) == len(words) > 1
    agree = agree and all(one <= other or other <= one for one in rests for other in rests)
    for inside in unwrapped.values():  # unlabeled images of a split are no objection, and neither are a few new classes
        agree = agree and 2 * len(inside.filled.keys() & classes) >= len(inside.filled)
    if agree and not any(tree.inner.filled.keys() & classes for tree in others):
        texts = listing([f"{printable(tree.name)} as {split}" for tree, split in split_of.items()])
        return reading, [f"By their names and by what is in them, {texts} were read."]
    reading |= {} if train else _together(top, kin)
    starred = [pattern for tree in words if (pattern := _starred(tree.name))]
    if len({*starred}) < len(starred) == len(words) and not any(tree.filled for tree in words):
        reading = {pattern: word[0] for pattern in starred if (word := split_word(pattern))}
    raise ask(
        top, where, f"{_named(words)} {'is' if len(words) == 1 else 'are'} named like splits.", {".": "train"}, reading
    )


def _starred(name: str) -> str | None:
    """The name with a star for the class that it has beside a split: train_* of train_cats, and *-test of cats-test."""
    words = _WORDS.findall(name)
    if split_named(words[0]) and (match := re.fullmatch(rf"({words[0]}[ _-]?)(.+)", name)):
        return f"{match[1]}*"
    match = re.fullmatch(rf"(.+?)([ _-]?{words[-1]})", name) if split_named(words[-1]) else None
    return f"*{match[2]}" if match else None


def _unwrapped(tree: Tree, classes: Container[str]) -> Tree:
    """The folder itself, or the one in it that holds all that it has without being a class."""
    while not tree.pictures and len(inside := list(tree.filled.values())) == 1 and inside[0].name not in classes:
        tree = inside[0]
    return tree


def _classes(top: Tree, where: str, tops: list[Tree]) -> tuple[dict[str, str], list[str]]:
    """The reading in which the folders are classes, if nothing in them says that they are not."""
    reading, notes, names = {".": "train"}, list[str](), _named(tops)
    splits_in = {tree: _splits_in(tree) for tree in tops}
    divided = {tree: splits for tree, splits in splits_in.items() if {*splits.values()} > {"train"}}
    trains = {
        tree: [b for b, split in splits_in[tree].items() if split == "train" and len(b.filled) > 1] for tree in tops
    }
    over = [_below(top, found[0]).rpartition("/")[0] for found in trains.values() if found]
    if len(tops) > 1 and over and (divided or len(over) == len(tops)):
        raise above(top, where, *(f"{where}/{printable(path)}" for path in over))
    if divided:  # the splits are in the classes
        paths = {_below(top, below): split for splits in divided.values() for below, split in splits.items()}
        starred = {re.sub("^[^/]+", "*", path): split for path, split in paths.items()}
        raise ask(top, where, f"{_named(divided)} hold folders that are named like splits.", reading, starred)
    if tops and 2 * len(top.pictures) >= top.count:
        count = top.count - len(top.pictures)
        raise ask(top, where, f"{len(top.pictures):,} images lie directly in it, and {count:,} in {names}.", reading)
    if nested := next(
        (t for t in tops if len(tops) > 2 and top.filled.keys() - {t.name} <= t.inner.filled.keys()), None
    ):
        reason = f"{nested.name} holds folders of the same names as those beside it."
        raise ask(top, where, reason, reading, _together(top, [nested]))
    _inside(top, where, reading)  # its error comes before those below
    stems = {re.sub(r"\d+$", "", tree.name) for tree in tops}
    if len(tops) > 1 and len(stems) == 1 and (stem := stems.pop()) not in top.filled:
        words = {word.lower() for word in _WORDS.findall(stem)}
        is_class = bool(words & _KINDS) or all(len(word) == 1 for word in words)
        if words & (_PARTS | _PLAIN) or (not is_class and _continue(tops)):
            reason = f"{names} are named like parts of one collection."
            raise ask(top, where, reason, reading, {tree.name: "train" for tree in tops})
    if tops and all(len(t.name) == 1 and t.filled and all(name[0] == t.name for name in t.filled) for t in tops):
        raise ask(top, where, "Its folders are the letters by which others are sorted.", reading, _together(top, tops))
    if odd := [tree for tree in tops if len(tops) > 2 and (split_named(tree.name) or tree.name.lower() in _UNLABELED)]:
        notes += [f"{_named(odd)} of {where} was read as a class. If it is not one, move it."]
    return reading, notes


def _inside(top: Tree, where: str, reading: Reading) -> list[str]:
    """What to say of the folders in the class folders of a reading. UserError where these have the same names."""
    kin, shared, deep = dict[Tree, str](), dict[str, None](), dict[Tree, str]()
    for split, places in places_of(top, reading).items():
        for tops in ([*place.filled.values()] for place, label in places if not label):
            counts = Counter(name for tree in tops for name in tree.inner.filled)
            names = [name for name, count in counts.items() if count > 1]
            if len(some := _kin(tops, names)) > 1 and 2 * len(some) >= len(tops):
                kin, shared = kin | dict.fromkeys(some, split), shared | dict.fromkeys(names)
            if len(tops) > 1:
                deep |= {tree: split for tree in tops if len(tree.inner.filled) > 1 and not tree.inner.pictures}

    there = {*(kin or deep).values()}
    others_stay = {path: split for path, split in reading.items() if split not in there}  # of splits without any

    def of(trees: Iterable[Tree]) -> dict[str, str]:
        return others_stay | {_below(top, tree.inner): (kin | deep)[tree] for tree in trees}

    if kin:
        if pictures := [name for name in shared if name.lower() in _IMAGES]:
            of_these = [(path, split) for path, split in reading.items() if split in there]
            starred = [others_stay | {f"{path}/*/{name}": split for path, split in of_these} for name in pictures]
            others = [{path.removeprefix("./"): split for path, split in one.items()} for one in starred]
        else:
            alone = dict.fromkeys(tree.name for tree in kin)
            others = [of(kin), *(of(tree for tree in kin if tree.name == name) for name in [*alone][:2])]
        inside = first_of(list(map(printable, shared)), 4)
        raise ask(top, where, f"{_named(kin)} hold folders of the same names ({inside}).", reading, *others)
    said = f"{_named(deep)} hold folders, which count as theirs. If those are the classes, write:"
    return [f"{said}\n{in_words(top, of(deep), where)}"] if deep else []


def _splits_in(tree: Tree) -> dict[Tree, str]:
    """The folders in one, or in those that wrap them, that are called as splits."""
    while not tree.pictures and len(filled := [*tree.filled.values()]) == 1 and not split_word(filled[0].name):
        tree = filled[0]
    return {below: word[0] for below in tree.filled.values() if (word := split_word(below.name))}


def _continue(tops: list[Tree]) -> bool:
    """Whether the names of the pictures go on from each folder to the next, as those of one collection do."""
    ordered = sorted(tops, key=lambda tree: int((re.search(r"\d*$", tree.name) or [""])[0] or 0))
    ends = [(min(names), max(names)) for tree in ordered if (names := [n for t in tree.walk() for n in t.pictures])]
    return len(ends) > 1 and all(last < first for (_, last), (first, _) in pairwise(ends))


def refuse_masks(where: str, classes: Mapping[str, Tree]) -> None:
    """Raise UserError if would-be classes are images and their masks."""
    by_name = {name.lower(): name for name in classes}
    images, masks = ([by_name[word] for word in words if word in by_name] for words in (_IMAGES, _MASKS))
    pair = (images[0], masks[0]) if images and masks else None
    for name, tree in classes.items() if pair is None else ():
        is_named = bool({word.lower() for word in _WORDS.findall(name)} & _MASKS)
        for other, pictures in classes.items() if (is_named or len(classes) == 2) and tree.count else ():
            stems = {stem_of(file): os.path.join(t.path, file) for t in pictures.walk() for file in t.pictures}
            bases = {path: base_of(stem_of(os.path.basename(path)), stems) for path in tree.paths()}
            pairs = [(path, stems[base]) for path, base in bases.items() if base] if other != name else []
            if 5 * len(pairs) >= 4 * len(bases) and _made_as(pairs) == "masks":
                pair = other, name
    if pair:
        raise UserError(
            f"{where} holds {printable(pair[0])} and {printable(pair[1])}, which look like images and their masks "
            f"instead of two classes. For segmentation write masks:{where} (with classes.txt next to them); if they "
            f'are classes, write "{where}?splits=none".'
        )
