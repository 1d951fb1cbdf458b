"""The content and the problems of a data set, as plain types for JSON and as text."""

from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitmods.data.dataset import Split
from vitmods.data.geometry import LONGEST
from vitmods.data.multilabel import label_counts, label_problems, target_named
from vitmods.data.records import SPLITS, Broken, Records, Source, printable
from vitmods.data.splits import group_keys, hashes
from vitmods.util.text import plural

Splits = Mapping[str, Split]
_LISTED = 20  # unreadable images named in an error; the summary has all
_LOOKED_AT, _DARK = 16, 20  # images, and the largest value of nearly black ones
_SHARED = 5  # images that are named one by one, although they have one reason


def facts(source: Source, records: dict[str, Records], splits: Splits, origin: str) -> dict[str, Any]:
    """The summary: what was found, left out and warned of. Counts are of images that could be read."""
    unreadable = [
        Broken(name, records[name].ids[position], reason)
        for name, split in splits.items()
        for position, reason in split.store.index.unreadable
    ]
    bad = [record(item) for item in (*source.broken, *unreadable)]
    left_out = [f"{len(bad)} images that cannot be used were left out."] if bad else []
    return {
        "name": source.name,
        "spec": source.spec,
        "classes": list(source.classes),
        "splits": {
            name: {
                "count": len(split),
                "per_class": dict(zip(source.classes, _per_class(source, split).tolist(), strict=True)),
            }
            for name, split in splits.items()
        },
        "split_origin": origin,
        "class_map": None if source.class_map is None else list(source.class_map),
        "target": source.target,
        "label_sets": [name for name, split in splits.items() if split.label_sets is not None],
        "native": _native_sizes(splits),
        "unreadable": bad,
        "left_out": len(bad),
        "warnings": [*source.warnings, *_warnings(source, splits), *left_out],
        "fingerprint": _fingerprint(source, splits),
    }


def problems(
    source: Source, splits: Splits, group_by: str | Path | None = None, train_on_all: bool = False
) -> list[str]:
    """Name everything that makes a set unfit to train on (or to evaluate on, if it is for that only), apart from
    unreadable images. group_by: by what images belong together. train_on_all: no images are kept to evaluate on."""
    if not any(map(len, splits.values())):
        return ["No image is readable."]
    if "train" not in splits:
        return []
    texts = []
    others = {name: split for name, split in splits.items() if name != "train"}
    trained = set(_present(source, splits["train"]))

    def allowing(what: str) -> str:
        return f'"{printable(source.spec)}{"&" if "?" in source.spec else "?"}allow={what}"'

    if not len(splits["train"]):
        texts.append("No training image is readable.")
    elif source.target == "labels":
        texts += label_problems(splits["train"].label_sets or (), source.classes)
    elif source.target == "class" and len(trained) == 1:
        only = source.classes[trained.pop()]
        texts.append(f'All images have one class, "{only}": comparing needs two or more, a folder for each.')
    if source.unseen and "missing" not in source.allow:
        texts.append(
            f"{source.unseen} Correct the list of classes (in classes.txt, cell,255 gives the class cell the value "
            f"255), or write {allowing('missing')} to keep classes without pixels."
        )
    if check := target_named(source.target).check:
        texts += check(splits)
    if train_on_all:
        return texts
    if not any(map(len, others.values())):
        texts.append("Images to evaluate on are missing: add a val or test split, or images to make one from.")
    else:
        empty = [name for name, split in others.items() if not len(split)]
        texts += [f"Images in {name} are missing: add some, or leave {name} out." for name in empty]
    if "missing" not in source.allow and (len(trained) > 1 or source.target != "class"):
        texts += [
            f"Classes in {name} without any training image: {names}. Add some, remove them there, or write "
            f"{allowing('missing')} to keep them."
            for name, names in _untrained(source, splits).items()
        ]
    if "overlap" not in source.allow:
        shared = _repeats(splits)
        groups = set(group_keys(group_by, splits["train"].ids)) if group_by else set()
        for name, split in others.items() if group_by else ():
            if keys := groups & set(group_keys(str(group_by), split.ids)):
                examples = _list(sorted(map(printable, keys)), 3)
                shared.append(f"{len(keys)} groups of {name} are also in train ({examples})")
        texts += [
            f"{text}: its numbers would flatter. Remove them from one of the two, or write {allowing('overlap')} to "
            "use them as they are."
            for text in shared
        ]
    return texts


def record(broken: Broken) -> dict[str, str]:
    """For the summary, and for any terminal."""
    return {field: printable(value) for field, value in broken._asdict().items()}


def unreadable_text(bad: list[dict[str, str]]) -> str:
    """Count, then path and reason, one image a line; a reason that many images share is given once."""
    by_reason: dict[str, list[str]] = {}
    for item in bad:
        by_reason.setdefault(item["reason"], []).append(item["path"])
    lines = []
    for reason, paths in by_reason.items():
        names = [f"{len(paths)} of them, such as {paths[0]}"] if len(paths) > _SHARED else paths
        lines += [f"{name}: {reason}" for name in names]
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n  ".join([f"{plural(len(bad), 'image')} cannot be used:", *lines[:_LISTED], *more])


def _fingerprint(source: Source, splits: Splits) -> str:
    """sha256 of class names and, split by split in order, of labels and the images' own bytes; not of paths."""
    content = sha256("\0".join(source.classes).encode())
    for name, split in ((name, splits[name]) for name in SPLITS if name in splits):
        content.update(f"\0{name}\0{len(split)}\0".encode())
        content.update(split.labels.astype("<i8").tobytes())
        content.update(split.store.index.digests.tobytes())
        if split.label_sets is not None:
            content.update(repr(split.label_sets).encode())
        if split.annotations is not None:
            content.update("\0".join(annotation.stamp for annotation in split.annotations).encode())
    return content.hexdigest()


def _native_sizes(splits: Splits) -> dict[str, Any]:
    """Sizes (H, W) before resizing: smallest and largest short side's image, and the most common size."""
    native = [split.store.index.native for split in splits.values() if split.geometry is not None]
    if not sum(map(len, native)):
        return {}
    sizes = np.concatenate(native)
    by_side = sizes[np.argsort(sizes.min(axis=1), kind="stable")]
    common, count = Counter(map(tuple, sizes.tolist())).most_common(1)[0]
    return {
        "smallest": by_side[0].tolist(),
        "median": by_side[len(by_side) // 2].tolist(),
        "largest": by_side[-1].tolist(),
        "most_common": list(common),
        "most_common_count": count,
    }


def _per_class(source: Source, split: Split) -> NDArray[np.int64]:
    """How many images each class has; with several labels an image counts for each."""
    if source.target != "class" and split.label_sets is not None:
        return np.array(label_counts(split.label_sets, len(source.classes)), dtype=np.int64)
    return np.bincount(split.labels, minlength=len(source.classes))


def _present(source: Source, split: Split) -> list[int]:
    """Classes that have an image."""
    return np.flatnonzero(_per_class(source, split)).tolist()


def _warnings(source: Source, splits: Splits) -> list[str]:
    warnings = [source.unseen] if source.unseen and "missing" in source.allow else []
    spellings: dict[str, list[str]] = {}
    for name in source.classes:
        spellings.setdefault("".join(filter(str.isalnum, name.casefold())), []).append(name)
    if similar := [" = ".join(map(repr, names)) for key, names in spellings.items() if key and len(names) > 1]:
        text = "Classes whose names differ in case, spaces or signs alone"
        warnings.append(f"{text}: {_list(similar)}. Are they one?")
    for name, split in splits.items():
        counts = _per_class(source, split)
        bare = sum(not labels for labels in split.label_sets or ()) if source.target != "class" else 0
        groups = {f"Classes without an image in {name}": counts == 0}
        if name == "train" and source.target == "labels" and len(split) > 1:
            groups["Labels of every training image, from which nothing is learned"] = counts == len(split)
        if name == "train":
            groups["Classes with one training image"] = counts == 1
        for text, chosen in groups.items():
            if chosen.any():
                warnings.append(f"{text}: {', '.join(source.classes[i] for i in np.flatnonzero(chosen))}.")
        if bare:
            warnings.append(f"{bare:,} of {len(split):,} images in {name} are without labels: none applies to them.")
    warnings += _conflicts(source, splits)
    if "overlap" in source.allow:
        warnings += [f"{text}: its numbers flatter." for text in _repeats(splits)]
    if "train" not in splits:
        return [*warnings, "Without a train split this set is for evaluation only."]
    if "missing" in source.allow:
        untrained = _untrained(source, splits).items()
        warnings += [f"Classes in {name} without any training image: {names}." for name, names in untrained]
    if "test" not in splits and "val" in splits:
        warnings.append("Without a test split results are of the val split.")
    if "val" not in splits and "test" in splits:
        warnings.append("Without a val split, choices are made on test, which makes its results too good.")
    native = {name: split.store.index.native for name, split in splits.items() if split.geometry is not None}
    if not native:
        return warnings
    if long := sum(int((sizes.max(1) > LONGEST * sizes.min(1)).sum()) for sizes in native.values()):
        warnings.append(f"{long} images are longer than {LONGEST}:1; only their middle is used.")
    train = splits["train"]
    size = train.geometry.size
    small = {name: int((sizes < size).any(1).sum()) for name, sizes in native.items()}
    if any(small.values()):
        texts = ", ".join(f"{count:,} of {len(splits[name]):,} in {name}" for name, count in small.items() if count)
        warnings.append(f"Images smaller than {size[0]} x {size[1]}, which are enlarged: {texts}.")
    # 10 or 12 bits in 16-bit files, which are scaled by the full range of 16 bits
    count = min(_LOOKED_AT, len(train)) if train.store.pixels.size else 0
    sample = np.linspace(0, len(train) - 1, count).astype(int).tolist()
    largest = max((int(train.store.image(i).max()) for i in sample), default=255)
    if largest <= _DARK:
        warnings.append(
            f"All of {count} training images that were looked at are nearly black: the largest value is {largest} of "
            "255. If 16-bit files hold values of 10 or 12 bits, scale these up to 16 bits first."
        )
    return warnings


def _conflicts(source: Source, splits: Splits) -> list[str]:
    """Equal images, byte for byte, that are labelled differently."""
    ids: list[str] = []
    labels: list[Any] = []
    for split in splits.values():
        ids += split.ids
        if source.target == "class" or split.label_sets is None:
            labels += split.labels.tolist()
        else:
            labels += [a.stamp for a in split.annotations] if split.annotations else split.label_sets
    digests = hashes(np.concatenate([split.store.index.digests for split in splits.values()]).reshape(-1, 16))
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    pairs = [(i, int(first[k])) for i, k in enumerate(inverse.ravel()) if labels[i] != labels[first[k]]]
    if not pairs:
        return []
    examples = _list([f"{printable(ids[i])} = {printable(ids[j])}" for i, j in pairs], 3)
    copies = plural(len(pairs), "copy", "copies")
    return [f"{copies} of images, byte for byte, have other labels than the first ({examples}): correct the labels."]


def _untrained(source: Source, splits: Splits) -> dict[str, str]:
    """For val and test the classes, in words, without an image in train."""
    trained = _present(source, splits["train"])
    missing = {n: np.setdiff1d(_present(source, s), trained).tolist() for n, s in splits.items() if n != "train"}
    return {name: _list([source.classes[label] for label in labels]) for name, labels in missing.items() if labels}


def _repeats(splits: Splits) -> list[str]:
    """How many images of val and test are also trained on, with examples."""
    if "train" not in splits:
        return []
    train, texts = splits["train"], []
    trained = hashes(train.store.index.digests)
    for name, split in splits.items():
        digests = hashes(split.store.index.digests)
        if name != "train" and len(repeated := np.flatnonzero(np.isin(digests, trained))):
            names = dict(zip(trained.tolist(), train.ids, strict=True))
            pairs = [f"{printable(split.ids[i])} = {printable(names[digests[i]])}" for i in repeated]
            texts.append(f"{len(pairs)} images of {name} are also in train, byte for byte ({_list(pairs, 3)})")
    return texts


def _list(names: list[str], most: int = _LISTED) -> str:
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])
