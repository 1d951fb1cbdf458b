"""load: from a spec to images that are ready to train on."""

from collections.abc import Sequence
from pathlib import Path

from vitmods.data.build import cores
from vitmods.data.dataset import ImageDataset, Joint, Split
from vitmods.data.geometry import Geometry
from vitmods.data.multilabel import with_target
from vitmods.data.records import Records, printable
from vitmods.data.sources import open_source
from vitmods.data.splits import limit, make_splits
from vitmods.data.store import open_store
from vitmods.data.stream import StreamSet, is_streamed, open_lazily
from vitmods.data.summary import facts, problems, unreadable_text
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

KEPT_RATIO = 224 / 256  # random crops are cut from images whose short side is 256 for views of 224


def load(
    spec: str | Path,
    *,
    img_size: int | Sequence[int],
    augment: Augment,
    in_chans: int = 3,
    split_seed: int = 0,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    unreadable: str = "stop",
    cache_dir: Path | str | None = None,
    limit_train: int | None = None,
    limit_val: int | None = None,
    workers: int = 0,
    target: str = "class",
    joint: Joint | None = None,
) -> ImageDataset:
    """Find a data set, split it, read every image once and return it ready to train on.

    spec: "digits", a folder, a known set ("imagenet:FOLDER"), "torchvision:NAME?root=FOLDER", "hf:NAME" or
    "wds:SHARDS". With "?stream=1" behind the last or a folder, and unasked where a split would fill more than 64 GiB,
    images are decoded when they are needed. img_size: (H, W) in pixels. in_chans: 3 (RGB) or 1 (gray). Splits that
    the source lacks are made from split_seed, stratified. unreadable "stop" refuses a set with images that cannot be
    read, "skip" leaves them out and says so. cache_dir keeps decoded images for later runs and other processes.
    limit_train: at most so many training images, classes in proportion; limit_val: so many for val, taken out of
    train first where there is no val split (VTAB: 800 and 200). workers: threads that prepare batches ahead (0: none;
    of streamed images: one a core). target: what is asked of each image, "class" or "labels"; joint: see ImageDataset
    (a task names both). Raises UserError with all that is wrong with the set at once.
    """
    size = _size(img_size)
    if in_chans not in (1, 3):
        raise UserError(f"Images are read with 1 channel (gray) or 3 (RGB), not {in_chans}: set in_chans to 1 or 3.")
    if unreadable not in ("stop", "skip"):
        raise UserError(f'unreadable must be "stop" or "skip", not "{unreadable}".')
    source = with_target(open_source(spec), target)
    records, origin = make_splits(source, split_seed, val_fraction, test_fraction, limit_val)
    if "train" in records:
        records["train"] = limit(records["train"], limit_train, split_seed)
    geometry = {name: _geometry(name, size, augment) for name in records}
    streamed = is_streamed(source.streaming, {name: (part, geometry[name]) for name, part in records.items()}, in_chans)
    cache = None if cache_dir is None else Path(cache_dir)
    splits = {name: _read(name, part, geometry[name], in_chans, cache, streamed) for name, part in records.items()}
    found = facts(source, records, splits, origin)
    _stop_on_problems(problems(source, splits), found["unreadable"] if unreadable == "stop" else [], source.spec)
    whole = ImageDataset(
        source.name,
        source.classes,
        splits,
        size,
        in_chans,
        augment,
        found,
        workers,
        class_map=source.class_map,
        target=target,
        joint=joint,
    )
    if not streamed:
        return whole
    return StreamSet(**{**vars(whole), "workers": workers or cores()}, buffer=source.streaming.buffer)


def _size(img_size: int | Sequence[int]) -> tuple[int, int]:
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if height < 1 or width < 1:
        raise UserError(f"img_size must be positive, not {(height, width)}.")
    return int(height), int(width)


def _geometry(split: str, size: tuple[int, int], augment: Augment) -> Geometry:
    """Random resized crops are cut from whole images; padded crops move the whole view; all else is centered."""
    if split == "train" and augment.crop in ("random_resized", "inception"):
        shrink = augment.resample != "big_vision"  # its crops are exact only if they are cut from the original
        return Geometry(size, KEPT_RATIO, whole=True, resample=augment.resample, shrink=shrink)
    if split == "train" and augment.crop == "pad":
        return Geometry(size, resample=augment.resample)
    return Geometry(size, augment.eval_crop, resample=augment.resample)


def _read(name: str, records: Records, geometry: Geometry, channels: int, cache: Path | None, streamed: bool) -> Split:
    store = (open_lazily if streamed else open_store)(records, geometry, channels, cache)
    kept = records.take(store.index.kept)
    return Split(name, kept.ids, kept.labels, store, geometry, kept.label_sets)


def _stop_on_problems(found: list[str], bad: list[dict[str, str]], spec: str) -> None:
    """Everything that is wrong, in one error, before anything is trained."""
    texts = list(found)
    if bad:
        remedy = 'Repair or remove them, or leave them out with unreadable="skip" (--unreadable skip).'
        texts.append(f"{unreadable_text(bad)}\n{remedy}")
    if texts:
        raise UserError(f"The images of {printable(spec)} cannot be used as they are.\n" + "\n".join(texts))
