"""load: from a spec to images that are ready to train on. check: the same checks, for `vitmods data`. The content and
the problems of a data set, as plain types for JSON and as text."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from vitmods.data.copies import MOST_PAIRS, near_copies
from vitmods.data.dataset import ImageDataset, Joint, JointView, Split, independent, open_lazily
from vitmods.data.geometry import LONGEST, Geometry
from vitmods.data.multilabel import label_counts, target_named, with_target
from vitmods.data.records import SPLITS, Broken, Records, Source, printable
from vitmods.data.sources import naming_the_source, open_source
from vitmods.data.splits import SplitOptions, group_keys, grouping_of_copies, groups_in, groups_of, hashes, make_splits
from vitmods.data.store import REMEMBERED, Store, estimate, open_store, remembered
from vitmods.data.threads import cores
from vitmods.recipes import Augment
from vitmods.util.errors import UserError
from vitmods.util.text import first_of, grouped, plural

STREAM_ABOVE = 64 << 30  # bytes; a larger split, decoded, is not kept unless asked for
KEPT_RATIO = 224 / 256  # random crops are cut from images whose short side is 256 for views of 224


def load(
    spec: str | Path,
    *,
    img_size: int | Sequence[int],
    augment: Augment,
    in_chans: int = 3,
    unreadable: str = "stop",
    cache_dir: Path | str | None = None,
    workers: int = 0,
    target: str = "class",
    joint: Joint | None = None,
    joint_view: JointView | None = None,
    train_on_all: bool = False,
    **split: Any,
) -> ImageDataset:
    """Find a data set, split it, read every image once and return it ready to train on.

    spec: "digits", a folder, a known set ("imagenet:FOLDER"), "torchvision:NAME?root=FOLDER", "hf:NAME" or
    "wds:SHARDS". With "?stream=1" after the last or a folder, and by default where a split would fill more than 64 GiB,
    images are decoded when they are needed. img_size: (H, W) in pixels. in_chans: 3 (RGB) or 1 (gray). unreadable:
    "stop" refuses a set with images that cannot be read, "skip" leaves them out and counts them. cache_dir keeps
    decoded images for later runs and other processes. workers: threads that prepare batches ahead (0: none; for
    streamed images: one a core). target, joint and joint_view: from the task; see ImageDataset. train_on_all: join all
    splits to train. split: fields of `SplitOptions`; missing splits are made, stratified, and equal images (byte for
    byte) are in one of them. Raises UserError with everything that is wrong with the set at once.
    """
    size, options = parse_size(img_size), SplitOptions(**split)
    if unreadable not in ("stop", "skip"):
        raise UserError(f'unreadable must be "stop" or "skip", not "{unreadable}".')
    source = open_source(spec)
    with naming_the_source(spec):
        source = with_target(source, target)
    target = source.target
    if (inputs := source.inputs) is not None:
        raise UserError(
            f"{printable(source.spec)} has {inputs.title}, and this task reads images: train it with --task "
            f"{inputs.task}."
        )
    if in_chans not in (1, 3):
        raise UserError(f"Images are read with 1 channel (gray) or 3 (RGB), not {in_chans}: set in_chans to 1 or 3.")
    cache = None if cache_dir is None else Path(cache_dir)
    records, origin = make_splits(source, options, train_on_all=train_on_all, cache_dir=cache)
    views = {name: geometry_of(name, size, augment, target) for name in records}
    if (streamed := source.streaming.asked) is None:
        streamed = any(estimate(part, views[name], in_chans) > STREAM_ABOVE for name, part in records.items())
    open_images = open_lazily if streamed else open_store
    group_by = options.group_by or groups_in(options.split_file)
    splits = {
        name: _split(name, part, open_images(part, views[name], in_chans, cache), views[name], group_by)
        for name, part in records.items()
    }
    summary = facts(source, records, splits, origin)
    bad = summary["unreadable"] if unreadable == "stop" else []
    stop_on_problems(problems(source, splits, group_by, train_on_all, records), bad, source.spec)
    return ImageDataset(
        source.name,
        source.classes,
        splits,
        size,
        in_chans,
        augment,
        summary,
        workers or (cores() if streamed else 0),
        class_map=source.class_map,
        target=target,
        joint=joint,
        joint_view=joint_view,
        buffer=source.streaming.buffer,
    )


def parse_size(img_size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width. UserError where they are not positive."""
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if height < 1 or width < 1:
        raise UserError(f"img_size must be positive, not {(height, width)}.")
    return int(height), int(width)


def geometry_of(split: str, size: tuple[int, int], augment: Augment, target: str) -> Geometry:
    """Random resized crops are cut from whole images; padded crops move the whole view; other views are centered.
    Images with localized targets are kept whole, their short side at most twice the view's."""
    if target_named(target).located:
        return Geometry(size, 0.5, whole=True, resample=augment.resample)
    if split == "train" and augment.crop in ("random_resized", "inception"):
        shrink = augment.resample != "big_vision"  # its crops are exact only if they are cut from the original
        return Geometry(size, KEPT_RATIO, whole=True, resample=augment.resample, shrink=shrink)
    if split == "train" and augment.crop == "pad":
        return Geometry(size, resample=augment.resample)
    return Geometry(size, augment.eval_crop, resample=augment.resample)


def _split(name: str, records: Records, store: Store, geometry: Geometry, group_by: str | Path | None) -> Split:
    kept = records.take(store.index.kept)
    groups = groups_of(kept.ids, group_by, store.index.digests, kept.groups)
    return Split(name, kept.ids, kept.labels, store, geometry, kept.label_sets, groups, kept.annotations)


def stop_on_problems(texts: list[str], bad: list[dict[str, str]], spec: str) -> None:
    """Raise one UserError with everything that is wrong, before anything is trained."""
    if bad:
        remedy = 'Repair or remove them, or leave them out with unreadable="skip" (--unreadable skip).'
        texts = [*texts, f"{unreadable_text(bad)}\n{remedy}"]
    if texts:
        raise UserError(f"The images of {printable(spec)} cannot be used as they are.\n" + "\n".join(texts))


class Checked(NamedTuple):
    """summary: as ImageDataset.summary(), with "problems" that would stop a study; text: the same to read."""

    summary: dict[str, Any]
    text: str

    @property
    def fit(self) -> bool:
        """Whether a study could train on it as it is; an evaluation set is fit to be evaluated on."""
        return not self.summary["problems"] and not self.summary["unreadable"]


def check(spec: str | Path, **split: Any) -> Checked:
    """Read every image of a set and describe it. split: fields of `SplitOptions`. Raises UserError only for an invalid
    spec or option."""
    options, source = SplitOptions(**split), open_source(spec)
    source = with_target(source, "class") if source.target == "none" else source
    if source.inputs is not None:
        summary = source.inputs.summarize(source, options)
        return Checked(summary, describe(summary))
    records, origin = make_splits(source, options)
    group_by, any_size = options.group_by or groups_in(options.split_file), Geometry((8, 8))
    splits = {
        name: _split(name, part, open_store(part, None, 3, None), any_size, group_by) for name, part in records.items()
    }
    texts = problems(source, splits, group_by, records=records) + (source.verify() if source.verify else [])
    summary = facts(source, records, splits, origin) | {"problems": texts, "resolution": ""}
    held_out = origin.startswith("made") or "test" not in splits
    tested = [split for name, split in splits.items() if name == "test" or (name == "val" and held_out)]
    if source.target == "class" and any(map(len, tested)):
        from vitmods.stats.sample_size import resolution  # a second for scipy, which workers do without

        summary["resolution"] = resolution(*independent(tested))
    return Checked(summary, describe(summary))


def describe(summary: dict[str, Any]) -> str:
    """A table of classes and splits, then sizes, warnings, unreadable images and problems."""
    splits = summary["splits"]
    rows = [[name, *(str(splits[s]["per_class"][name]) for s in splits)] for name in summary["classes"]]
    rows = [["class", *splits], *rows, ["all", *(str(splits[s]["count"]) for s in splits)]]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{summary['name']}: {len(summary['classes'])} classes; splits {summary['split_origin']}", ""]
    for row in [rows[0], ["-" * w for w in widths], *rows[1:]]:
        counts = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0] + " " * (widths[0] - cell_len(row[0])), *counts]))
    if native := summary["native"]:
        keys = {"smallest": "smallest", "median": "median", "largest": "largest", "most_common": "most common"}
        sizes = [f"{text} {native[key][0]} x {native[key][1]}" for key, text in keys.items()]
        lines += ["", f"Height x width: {', '.join(sizes[:3])}; {sizes[3]} ({native['most_common_count']})"]
    if summary.get("lengths"):
        lines += ["", "Tokens: " + ", ".join(f"{key} {count:,}" for key, count in summary["lengths"].items())]
    lines += ["", summary["resolution"]] if summary.get("resolution") else []
    lines += [f"Warning: {text}" for text in summary["warnings"]]
    lines += [unreadable_text(summary["unreadable"])] if summary["unreadable"] else []
    return "\n".join([*lines, *(f"Problem: {text}" for text in summary["problems"])])


Splits = Mapping[str, Split]
_LISTED = 20  # unreadable images named in an error; the summary has all
_LOOKED_AT, _DARK = 16, 20  # images, and the largest value of nearly black ones
_SHARED = 5  # images that are named one by one, although they have one reason


def facts(source: Source, records: dict[str, Records], splits: Splits, origin: str) -> dict[str, Any]:
    """Summarize a data set: its content, warnings, and what was left out. Counts are of readable images."""
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
    source: Source,
    splits: Splits,
    group_by: str | Path | None = None,
    train_on_all: bool = False,
    records: Mapping[str, Records] = {},
) -> list[str]:
    """Name everything that makes a set unfit to train on (or to evaluate on, if it is for that only), apart from
    unreadable images. group_by: by what images belong together. train_on_all: no images are kept to evaluate on.
    records: the images of the splits before they were read."""
    if not any(map(len, splits.values())):
        return ["No image is readable."]
    if "train" not in splits:
        return []
    texts = []
    train, others = splits["train"], {name: split for name, split in splits.items() if name != "train"}
    trained = np.flatnonzero(_per_class(source, train))

    def allowing(what: str) -> str:
        return f'"{printable(source.spec)}{"&" if "?" in source.spec else "?"}allow={what}"'

    if not len(train):
        texts.append("No training image is readable.")
    elif source.target == "labels":
        counts, count = _per_class(source, train), len(train)
        if not ((counts > 0) & (counts < count)).any():
            labels = ", ".join(source.classes[:5])
            texts.append(
                f"All {count} training images have the same labels ({labels}). Give some that other images lack."
            )
    elif source.target == "class" and len(trained) == 1:
        only = source.classes[trained[0]]
        texts.append(f'All images have one class, "{only}": comparing needs two or more, a folder for each.')
    left = sum((_per_class(source, split) for split in splits.values()), np.zeros(len(source.classes), np.int64))
    listed = sum((_per_class(source, part) for part in records.values()), np.zeros_like(left))
    if (lost := np.flatnonzero((listed > 0) & (left == 0))).size and "missing" not in source.allow:
        names = first_of([source.classes[i] for i in lost], _LISTED)
        texts.append(
            f"No image of {names} can be read: repair or convert the images, remove them, or write "
            f"{allowing('missing')} to go on without."
        )
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
            f"{text}. Add some, remove them there, or write {allowing('missing')} to keep them."
            for text in _untrained(source, splits)
        ]
    if "overlap" not in source.allow:
        shared = _repeats(splits)
        # Of splits that are made, copies of the same bytes stay together; others are known after the images are read.
        shared += _repeats({name: split for name, split in splits.items() if name in source.splits}, of_pixels=True)
        groups = set(group_keys(group_by, train.ids)) if group_by else set()
        for name, split in others.items() if group_by else ():
            if keys := groups & set(group_keys(str(group_by), split.ids)):
                examples = first_of(sorted(map(printable, keys)), 3)
                shared.append(f"{len(keys)} groups of {name} are also in train ({examples})")
        texts += [
            f"{text}: its numbers would flatter. Remove them from one of the two, or write {allowing('overlap')} to "
            "use them as they are."
            for text in shared
        ]
    return texts


def record(broken: Broken) -> dict[str, str]:
    """Return a broken entry as printable text, for the summary."""
    return {field: printable(value) for field, value in broken._asdict().items()}


def unreadable_text(bad: list[dict[str, str]]) -> str:
    """Count, then path and reason, one image per line; a reason that many images share is given once."""
    lines = []
    for reason, paths in grouped((item["path"], item["reason"]) for item in bad).items():
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
    distinct, first, counts = np.unique(sizes, axis=0, return_index=True, return_counts=True)
    common = np.lexsort((first, -counts))[0]
    return {
        "smallest": by_side[0].tolist(),
        "median": by_side[len(by_side) // 2].tolist(),
        "largest": by_side[-1].tolist(),
        "most_common": distinct[common].tolist(),
        "most_common_count": int(counts[common]),
    }


def _per_class(source: Source, split: Split | Records) -> NDArray[np.int64]:
    """How many images each class has; with several labels an image counts for each."""
    if source.target != "class" and split.label_sets is not None:
        return np.array(label_counts(split.label_sets, len(source.classes)), dtype=np.int64)
    return np.bincount(split.labels, minlength=len(source.classes))


def _warnings(source: Source, splits: Splits) -> list[str]:
    warnings = [source.unseen] if source.unseen and "missing" in source.allow else []
    spellings = grouped((name, _spelled(name)) for name in source.classes)
    if similar := [" = ".join(map(repr, names)) for key, names in spellings.items() if key and len(names) > 1]:
        text = "Classes whose names differ only in case, spaces, signs or zeros in front"
        warnings.append(f"{text}: {first_of(similar, _LISTED)}. Are they one?")
    for name, split in splits.items():
        counts = _per_class(source, split)
        groups = {f"Classes without an image in {name}": counts == 0}
        if name == "train" and source.target == "labels" and len(split) > 1:
            groups["Labels of every training image, from which nothing is learned"] = counts == len(split)
        if name == "train":
            groups["Classes with one training image"] = counts == 1
        warnings += [
            f"{text}: {first_of([source.classes[i] for i in np.flatnonzero(chosen)], _LISTED)}."
            for text, chosen in groups.items()
            if chosen.any()
        ]
        if bare := sum(not labels for labels in split.label_sets or ()) if source.target != "class" else 0:
            warnings.append(f"{bare:,} of {len(split):,} images in {name} are without labels: none applies to them.")
    warnings += _conflicts(source, splits)
    made = {name: split for name, split in splits.items() if name == "train" or name not in source.splits}
    repeats = _repeats(made, of_pixels=True)
    if "overlap" in source.allow:
        repeats = [*_repeats(splits), *_repeats(splits, of_pixels=True)]
    warnings += [f"{text}: its numbers flatter. Remove the copies, or group them (--group-by)." for text in repeats]
    warnings += _near_copies(source, splits)
    if "train" not in splits:
        return [*warnings, "Without a train split this set is for evaluation only."]
    if "missing" in source.allow:
        warnings += [f"{text}." for text in _untrained(source, splits)]
    if "test" not in splits and "val" in splits:
        warnings.append("Without a test split results are of the val split.")
    if "val" not in splits and "test" in splits:
        warnings.append("Without a val split, choices are made on test, which makes its results too good.")
    native = {name: split.store.index.native for name, split in splits.items() if split.geometry is not None}
    if not native:
        return warnings
    pages = [
        ids[i]
        for ids, split in ((s.ids, s) for s in splits.values())
        for i in np.flatnonzero(split.store.index.several)
    ]
    if pages:
        named = printable(pages[0])
        warnings.append(
            f"{plural(len(pages), 'file')} with several pages or frames, such as {named}: the first is used."
        )
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
            f"All {count} training images that were sampled are nearly black: the largest value is {largest} of "
            "255. If 16-bit files hold values of 10 or 12 bits, scale these up to 16 bits first."
        )
    return warnings


def _spelled(name: str) -> str:
    """A name without what people write in different ways: letters and digits alone."""
    letters = "".join(filter(str.isalnum, normalize("NFKC", name).casefold()))
    return letters.lstrip("0") or "0" if letters.isdigit() else letters


def _conflicts(source: Source, splits: Splits) -> list[str]:
    """Warn of byte-identical images with different labels."""
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
    examples = first_of([f"{printable(ids[i])} = {printable(ids[j])}" for i, j in pairs], 3)
    copies = plural(len(pairs), "copy", "copies")
    return [f"{copies} of images, byte for byte, have other labels than the first ({examples}): correct the labels."]


def _untrained(source: Source, splits: Splits) -> list[str]:
    """Describe the classes of val and test without an image in train."""
    texts, trained = [], _per_class(source, splits["train"]) > 0
    for name, split in splits.items():
        missing = np.flatnonzero((_per_class(source, split) > 0) & ~trained)
        if len(missing):
            names = first_of([source.classes[label] for label in missing], _LISTED)
            texts.append(f"Classes in {name} without any training image: {names}")
    return texts


def _repeats(splits: Splits, of_pixels: bool = False) -> list[str]:
    """Describe how many images of val and test are also in train, with examples; of_pixels: in files of other bytes."""
    if "train" not in splits:
        return []
    train, texts = splits["train"], []
    how = "with the same pixels in other files" if of_pixels else "byte for byte"
    for name, split in splits.items():
        by_bytes, of_train = (hashes(part.store.index.digests) for part in (split, train))
        digests, trained = by_bytes, of_train
        if of_pixels:
            digests, trained = (hashes(part.store.index.pixels) for part in (split, train))
        if name == "train" or len(digests) < len(split) or len(trained) < len(train):
            continue
        repeated = np.isin(digests, trained)
        if of_pixels:
            repeated &= ~np.isin(by_bytes, of_train)
        if repeated.any():
            names = dict(zip(trained.tolist(), train.ids, strict=True))
            pairs = [f"{printable(split.ids[i])} = {printable(names[digests[i]])}" for i in np.flatnonzero(repeated)]
            texts.append(f"{len(pairs)} images of {name} are also in train, {how} ({first_of(pairs, 3)})")
    return texts


def _near_copies(source: Source, splits: Splits) -> list[str]:
    """Warn of images of val and test that are near copies of training images, and suggest what groups them."""
    train, others = splits.get("train"), [split for name, split in splits.items() if name != "train" and len(split)]
    if not train or not others:
        return []
    known, *asked = (split.store.index for split in (train, *others))
    if any(len(index.looks) < len(index.kept) for index in (known, *asked)):
        return []
    new = [np.isin(hashes(index.pixels), hashes(known.pixels), invert=True) for index in asked]
    place = np.flatnonzero(np.concatenate(new))
    count = min(len(place), max(1, MOST_PAIRS // len(train)))
    searched = place[np.linspace(0, len(place) - 1, count).astype(np.int64)]
    looks = np.concatenate([index.looks for index in asked])[searched]

    def search() -> list[list[int]]:
        return [positions.tolist() for positions in near_copies(looks, known.looks)]

    if len(known.looks) + count < REMEMBERED:
        found, of = search()
    else:
        name = sha256(looks.tobytes() + known.looks.tobytes()).hexdigest()[:32]
        found, of = remembered(f"{name}.copies.json", search)
    if not found:
        return []
    ids = [name for split in others for name in split.ids]
    pairs = [(ids[searched[i]], train.ids[j]) for i, j in zip(found, of, strict=True)]
    examples = first_of([f"{printable(a)} ~ {printable(b)}" for a, b in pairs], 3)
    group = grouping_of_copies(pairs, [*train.ids, *ids], len(source.classes))
    remedy = (
        "FILE, a CSV file with the columns image and group" if group is None else f"'{group[0]}' ({group[1]:,} groups)"
    )
    remedy = f"eep copies, frames and bursts in one split with --group-by {remedy}."
    made = all(split.name not in source.splits for split in others)
    return [
        f"{len(pairs):,} of {len(ids):,} images of {' and '.join(split.name for split in others)} are near copies "
        f"(mirrored, cropped, brightened, encoded anew) of training images ({examples}): their numbers may flatter. "
        + (f"Only {count:,} were searched for. " if count < len(place) else "")
        + (f"K{remedy}" if made else f"Remove them from one of the two, or join the splits and k{remedy}")
    ]
