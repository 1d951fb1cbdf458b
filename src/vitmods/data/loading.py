"""load: from a spec to images that are ready to train on. check: the same checks, for `vitmods data`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len

from vitmods.data.dataset import ImageDataset, Joint, JointView, Split, independent, open_lazily
from vitmods.data.geometry import Geometry
from vitmods.data.multilabel import target_named, with_target
from vitmods.data.records import Records, printable
from vitmods.data.sources import naming_the_source, open_source
from vitmods.data.splits import SplitOptions, groups_in, groups_of, make_splits
from vitmods.data.store import Store, estimate, open_store
from vitmods.data.summary import facts, problems, unreadable_text
from vitmods.data.threads import cores
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

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
    stop_on_problems(problems(source, splits, group_by, train_on_all), bad, source.spec)
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
    groups = groups_of(kept.ids, group_by, store.index.digests)
    return Split(name, kept.ids, kept.labels, store, geometry, kept.label_sets, groups, kept.annotations)


def stop_on_problems(texts: list[str], bad: list[dict[str, str]], spec: str) -> None:
    """Raise one UserError with everything that is wrong, before anything is trained."""
    if bad:
        remedy = 'Repair or remove them, or leave them out with unreadable="skip" (--unreadable skip).'
        texts = [*texts, f"{unreadable_text(bad)}\n{remedy}"]
    if texts:
        raise UserError(f"The images of {printable(spec)} cannot be used as they are.\n" + "\n".join(texts))


_ANY = Geometry((8, 8))


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
    source = with_target(source, "class") if source.target == "nothing" else source
    if source.inputs is not None:
        summary = source.inputs.summarize(source, options)
        return Checked(summary, describe(summary))
    records, origin = make_splits(source, options)
    group_by = options.group_by or groups_in(options.split_file)
    splits = {
        name: _split(name, part, open_store(part, None, 3, None), _ANY, group_by) for name, part in records.items()
    }
    texts = problems(source, splits, group_by) + (source.verify() if source.verify else [])
    summary = facts(source, records, splits, origin) | {"problems": texts, "resolution": ""}
    held_out = origin.startswith("made") or "test" not in splits
    tested = [split for name, split in splits.items() if name == "test" or (name == "val" and held_out)]
    if source.target == "class" and any(map(len, tested)):
        from vitmods.stats.plan import resolution  # a second for scipy, which workers do without

        summary["resolution"] = resolution(*independent(tested))
    return Checked(summary, describe(summary))


def describe(summary: dict[str, Any]) -> str:
    """A table of classes and splits, then sizes, warnings, unreadable images and problems."""
    splits = summary["splits"]
    head = ["class", *splits]
    rows = [[name, *(str(splits[s]["per_class"][name]) for s in splits)] for name in summary["classes"]]
    rows.append(["all", *(str(splits[s]["count"]) for s in splits)])
    widths = [max(cell_len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [f"{summary['name']}: {len(summary['classes'])} classes; splits {summary['split_origin']}", ""]
    for row in [head, ["-" * w for w in widths], *rows]:
        counts = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0] + " " * (widths[0] - cell_len(row[0])), *counts]))
    if native := summary["native"]:
        keys = {"smallest": "smallest", "median": "median", "largest": "largest", "most_common": "most common"}
        sizes = [f"{text} {native[key][0]} x {native[key][1]}" for key, text in keys.items()]
        count = native["most_common_count"]
        lines += ["", f"Height x width: {', '.join(sizes[:3])}; {sizes[3]} ({count})"]
    if summary.get("lengths"):
        lines += ["", "Tokens: " + ", ".join(f"{key} {count:,}" for key, count in summary["lengths"].items())]
    lines += ["", summary["resolution"]] if summary.get("resolution") else []
    lines += [f"Warning: {text}" for text in summary["warnings"]]
    lines += [unreadable_text(summary["unreadable"])] if summary["unreadable"] else []
    lines += [f"Problem: {text}" for text in summary["problems"]]
    return "\n".join(lines)
