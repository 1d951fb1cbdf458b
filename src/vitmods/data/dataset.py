"""ImageDataset: images ready for training and evaluation.

Images of a set that is too large to keep decoded are read and decoded when they are needed. Batches are bit-identical
to those of a kept set, except for the order of training images in shards: shards follow each other in a random order,
and images change places only with others nearby (a shuffle buffer).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitmods.data.augment import (
    Ints,
    crop_boxes,
    crops,
    draw_mixing,
    erase_boxes,
    flip,
    inception_boxes,
    mix_targets,
    normalize,
    pad_black,
    per_channel,
    resized_crops,
)
from vitmods.data.batch import Batch, DeferredTransforms, erasing
from vitmods.data.geometry import Geometry
from vitmods.data.randaugment import randaugment
from vitmods.data.read import Unreadable, decode
from vitmods.data.records import Records, Streaming, printable
from vitmods.data.rng import Stream, bits, permutation, uniform
from vitmods.data.sampler import apart, balanced, positions, repeated, shard_order
from vitmods.data.store import Index, Store, open_store
from vitmods.data.threads import busy_with, in_order
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

Change = Callable[[Tensor, Tensor], Tensor]
"""Images uint8 (B, C, H, W) and their positions in the split int64 (B,) -> changed images of that kind."""


@dataclass(frozen=True)
class Draw:
    """The inputs of the random numbers of a training batch: seed, epoch, and the views (B,) as `data.sampler` numbers
    them; `index`: the positions of their images in the split."""

    seed: int
    epoch: int
    views: Ints
    index: Ints
    augment: Augment
    img_size: tuple[int, int]


@dataclass(frozen=True)
class Annotated:
    """An image's annotation (None: to be predicted) and its size (height, width), both as in its file."""

    annotation: Any
    native: tuple[int, int]


Joint = Callable[[Sequence[NDArray[np.uint8]], Any, Draw], tuple[tuple[Tensor, ...], Any]]
"""Augments images and targets together: images as stored, uint8 (C, H, W) each, and the targets of a batch (a list of
Annotated where they are annotations) -> views of all images, uint8 (B, C, H, W) each, and their targets."""

JointView = Callable[[Sequence[NDArray[np.uint8]], Any, tuple[int, int], Augment], tuple[Tensor, Any]]
"""Prepares images and targets for evaluation: images as stored, targets, img_size and augmentation -> images uint8
(B, C, H, W), those of other sizes padded on the right and below, and their targets."""


_MOVED = 4096  # images that are moved to a device at once
_BOXES = {"random_resized": crop_boxes, "inception": inception_boxes}


@dataclass(frozen=True)
class Split:
    """The images (or other inputs) of one split, those that could be read; ids and labels (n,) are in the same order.

    label_sets: in the same order all right classes of an image, where that may be several; a prediction is correct if
    it is among them. labels then has the one that the set gave before (ImageNet's, for ReaL). Where the set's target is
    "labels", they are the labels of each image, and `labels` has the rarest of them.

    groups: in the same order, which images belong together (see `vitmods.data.splits`); None: none do.
    annotations: in the same order, where the target has facts beyond classes. geometry: a Geometry;
    None for other inputs."""

    name: str
    ids: tuple[str, ...]
    labels: NDArray[np.int64]
    store: Any
    geometry: Any = None
    label_sets: tuple[tuple[int, ...], ...] | None = None
    groups: tuple[str, ...] | None = None
    annotations: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)


def independent(splits: Iterable[Any]) -> tuple[int, bool]:
    """Count the independent images of splits, and report whether some belong together and count as one."""
    splits = list(splits)
    return sum(len(set(split.groups or split.ids)) for split in splits), any(split.groups for split in splits)


class SplitDataset:
    """Classes and splits of data sets of images and of other inputs."""

    classes: tuple[str, ...]
    splits: Mapping[str, Any]
    facts: dict[str, Any]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def split(self, name: str) -> Any:
        """The split of this name. Raises UserError for others."""
        if name not in self.splits:
            raise UserError(f'This set does not have a split "{name}", only {", ".join(self.splits)}.')
        return self.splits[name]

    @property
    def eval_split(self) -> str:
        """The split whose numbers are reported: test, or val without a test split."""
        return "test" if "test" in self.splits else "val"

    @property
    def val_split(self) -> str:
        """The split to choose by: val, or test without a val split."""
        return "val" if "val" in self.splits else "test"

    def summary(self) -> dict[str, Any]:
        """The facts of the set, in plain types for JSON: see docs/data.md for the fields."""
        return self.facts

    def for_process(self, rank: int, world_size: int) -> Self:
        """The data set of process `rank` of `world_size`: each batch of batch_size images is dealt out to all. Raises
        UserError for a rank outside 0..world_size - 1."""
        if not 0 <= rank < world_size:
            raise UserError(f"rank must be between 0 and world_size - 1, not {rank} of {world_size}.")
        return replace(self, rank=rank, world_size=world_size)  # type: ignore[type-var]


@dataclass(frozen=True)
class ImageDataset(SplitDataset):
    """A data set at one image size, with one augmentation.

    Order, augmentation and mixing are pure functions of (seed, epoch, sample or batch number): workers, prefetching and
    resuming change nothing. A set without a train split is for evaluation only. class_map: positions of `classes` among
    those of the evaluated model, where they are some of a larger set's; None: they are the model's. target: the fact
    that batches have of each image, such as "class" or "labels". joint: augments images and targets together; None:
    only images, by `augment`. joint_view: prepares them for evaluation; None: only images, resized and cropped in the
    center. buffer: the number of places that a streamed image of shards may move. on_device: the training images
    that crops are cut from, uint8 (n, C, H', W') on a GPU; None: they are read from the store.
    """

    name: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    img_size: tuple[int, int]
    in_chans: int
    augment: Augment
    facts: dict[str, Any]
    workers: int = 0
    rank: int = 0
    world_size: int = 1
    class_map: tuple[int, ...] | None = None
    target: str = "class"
    joint: Joint | None = None
    joint_view: JointView | None = None
    uint8: bool = False
    buffer: int = Streaming.buffer
    on_device: Tensor | None = None

    def as_uint8(self) -> Self:
        """The same set, whose batches hold images as uint8 until `Batch.to` makes inputs of them on the device."""
        return replace(self, uint8=True)

    def kept_on(self, device: torch.device, most_bytes: int) -> Self:
        """The same set, whose training images are kept on a device, where batches are cropped and mirrored, to the same
        bits. The set itself where they take more, or are changed in ways that are computed on a CPU alone: resized
        crops, RandAugment, and those of tasks that change targets too."""
        augment, n = self.augment, len(self.train)
        size = n * self.in_chans * prod(side + 2 * pad for side, pad in zip(self.img_size, self._pad, strict=True))
        by_cpu = augment.crop in _BOXES or augment.randaugment is not None or self.joint is not None
        if by_cpu or size > most_bytes or isinstance(self.train.store, LazyStore):
            return self
        parts = [self._centre_views(self.train, np.arange(i, min(i + _MOVED, n))) for i in range(0, n, _MOVED)]
        return replace(self, uint8=True, on_device=torch.cat([pad_black(p.to(device), self._pad) for p in parts]))

    def in_random_crops(self) -> Self:
        """The same set, whose training images are seen in random crops (8 to 100 % of the area) and mirror images, and
        not augmented otherwise."""
        kept = {name: getattr(self.augment, name) for name in ("resample", "eval_crop", "mean", "std")}
        return replace(self, augment=Augment(crop="random_resized", flip=0.5, **kept), joint=None)

    @property
    def train(self) -> Split:
        """The split to train on. UserError where the set is for evaluation only."""
        if "train" not in self.splits:
            raise UserError(f"{self.name} is an evaluation set without training images: train on another set.")
        return self.splits["train"]

    def samples(self, n: int) -> list[tuple[str, NDArray[np.uint8]]]:
        """n training images (or test images) with their class names, taking classes in turn; uint8 (H, W, 3)."""
        train = self.splits["train" if "train" in self.splits else self.eval_split]
        rank = np.zeros(len(train), dtype=np.int64)
        for label in range(self.num_classes + 1):  # the last: images without any label
            members = train.labels == label
            rank[members] = np.arange(members.sum())
        chosen = np.lexsort((train.labels, rank))[:n]
        stored = [train.store.image(int(i)) for i in chosen]
        if not train.geometry.shrink:  # originals may be large, and are shown small
            stored = [replace(train.geometry, shrink=True).store(image) for image in stored]
        several = None if self.target == "class" else train.label_sets
        sets = [(train.labels[i],) if several is None else several[i] for i in chosen]
        names = [" + ".join(self.classes[label] for label in labels) or "no label" for labels in sets]
        pixels = [np.broadcast_to(p, (3, *p.shape[1:])).transpose(1, 2, 0) for p in stored]
        return [(name, np.ascontiguousarray(p)) for name, p in zip(names, pixels, strict=True)]

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches in an epoch; 1 where the set is smaller than a batch."""
        return max(1, len(self.train) // batch_size)

    def train_batches(self, *, seed: int, epoch: int, batch_size: int, start: int = 0) -> Iterator[Batch]:
        """The epoch's batches from number `start` on. An incomplete last batch is dropped; a set smaller than a batch
        gives one batch of all. With repeats, the same number of batches has correspondingly fewer images."""
        views = self.views(seed, epoch)
        if (largest := min(batch_size, len(views))) < self.world_size:
            raise UserError(f"A batch of {largest} images is too small for {self.world_size} processes.")

        def make(number: int) -> Batch:
            part = apart(views[number * batch_size : (number + 1) * batch_size])
            return self._train_batch(part, seed, epoch, number)

        return in_order(make, range(start, self.steps_per_epoch(batch_size)), self.workers)

    def eval_batches(self, split: str, batch_size: int, change: Change | None = None) -> Iterator[Batch]:
        """All images of a split in order: resized, center cropped, not augmented. change: applied to the view, such as
        a corruption, before normalization."""
        images = self.split(split)
        n = len(images)

        def make(start: int) -> Batch:
            index = self._own(np.arange(start, min(start + batch_size, n)))
            pixels, targets = self._views(images, index)
            numbers = torch.from_numpy(index)
            return self._made(pixels if change is None else change(pixels, numbers), targets, numbers)

        starts = [start for start in range(0, n, batch_size) if self.rank < min(batch_size, n - start)]
        return in_order(make, starts, self.workers)

    def plain_images(self, split: str, most: int, batch_size: int) -> Iterator[Tensor]:
        """Up to `most` evaluation views of a split, evenly spread: float32 (B, C, H, W), all in every process."""
        return (pixels for pixels, _ in self.plain_batches(split, most, batch_size))

    def plain_batches(self, split: str, most: int, batch_size: int) -> Iterator[tuple[Tensor, Any]]:
        """`plain_images` with their targets."""
        count = len(self.splits[split])
        chosen = np.linspace(0, count - 1, min(most, count)).round().astype(np.int64)
        for start in range(0, len(chosen), batch_size):
            pixels, targets = self._views(self.splits[split], chosen[start : start + batch_size])
            yield normalize(pixels, *self._mean_and_std), targets

    def views(self, seed: int, epoch: int) -> Ints:
        """The views (n,) that an epoch visits, in order. UserError for balanced classes of shards, which are read in
        turn."""
        store = self.train.store
        if self.augment.sampler == "balanced":
            if isinstance(store, LazyStore) and store.records.shards is not None:
                raise UserError(
                    f"{self.name} is streamed shard by shard, which balanced classes would undo: take "
                    "class_weights=balanced (--class-weights balanced) instead of sampler=balanced."
                )
            return balanced(self.order(seed, epoch), self.train.labels, seed, epoch)
        return repeated(self.order(seed, epoch), self.augment.repeats)

    def order(self, seed: int, epoch: int) -> Ints:
        """The order (n,) in which an epoch visits the training images."""
        store = self.train.store
        if isinstance(store, LazyStore) and (shards := store.records.shards) is not None:
            return shard_order(seed, epoch, shards, store.records.keys, self.buffer)
        return permutation(seed, epoch, len(self.train))

    def _own(self, index: Ints) -> Ints:
        """Select the part of a batch for this process."""
        return index[self.rank :: self.world_size]

    def _train_batch(self, views: Ints, seed: int, epoch: int, number: int) -> Batch:
        augment = self.augment
        if self.joint is not None:
            views = self._own(views)
            index = positions(views)
            stored = [self.train.store.image(i) for i in index.tolist()]
            draw = Draw(seed, epoch, views, index, self.augment, self.img_size)
            (first, *others), targets = self.joint(stored, self._targets("train", index), draw)
            return self._made(first, targets, torch.from_numpy(index), tuple(others))
        mixes, is_part = augment.mixup > 0 or augment.cutmix > 0, self.world_size > 1
        if is_part:  # images are mixed with their predecessors, which another process has
            views = np.concatenate([self._own(views), self._own(np.roll(views, 1))]) if mixes else self._own(views)
        pixels = self._cropped(views, seed, epoch)
        if augment.flip > 0:
            pixels = flip(pixels, uniform(seed, Stream.FLIP, epoch, views) < augment.flip)
        if augment.randaugment is not None:
            pixels = randaugment(pixels, seed, epoch, views, augment)
        index, deferred = positions(views), DeferredTransforms(*self._mean_and_std)
        targets = self._targets("train", index)
        if augment.erasing > 0:
            chosen, boxes = erase_boxes(seed, epoch, views, self.img_size, augment.erasing)
            seeds = bits(seed, Stream.ERASE_NOISE, epoch, views[chosen])
            deferred = replace(deferred, erased=erasing(pixels.shape, chosen, boxes, seeds))
        if mixes:
            counters = {"seed": seed, "epoch": epoch, "batch": number}
            mixing = draw_mixing(self.img_size, mixup=augment.mixup, cutmix=augment.cutmix, **counters)
            targets = mix_targets(mixing, targets, self.num_classes, is_part)
            deferred = replace(deferred, mixing=mixing)
            if is_part:  # the second half are the predecessors
                own, before = slice(len(pixels) // 2), slice(len(pixels) // 2, None)
                before_erased = deferred.part(before).erased
                deferred = replace(deferred.part(own), before=pixels[before], before_erased=before_erased)
                pixels, index = pixels[own], index[own]
        batch = Batch(pixels, targets, torch.from_numpy(index), deferred=deferred)
        return batch if self.uint8 else batch.transformed()

    def _cropped(self, views: Ints, seed: int, epoch: int) -> Tensor:
        """Training views, uint8 (B, C, H, W), which the caller may change."""
        train, index = self.train, positions(views)
        if self.augment.crop in _BOXES:
            images = [train.store.image(i) for i in index.tolist()]
            sizes = np.array([image.shape[1:] for image in images])
            draw = _BOXES[self.augment.crop]
            boxes = draw(seed, epoch, views, sizes, self.augment.crop_scale, self.augment.crop_ratio)
            return resized_crops(images, boxes, self.img_size, train.geometry.crop_method)
        if self.augment.crop == "none" and self.on_device is None:
            return self._centre_views(train, index)
        top, left = (
            (uniform(seed, stream, epoch, views) * (2 * pad + 1)).astype(np.int64)
            for stream, pad in zip((Stream.CROP_TOP, Stream.CROP_LEFT), self._pad, strict=True)
        )
        if self.on_device is not None:
            return crops(self.on_device, index, top, left, self.img_size)
        padded = pad_black(self._centre_views(train, index), self._pad)
        return crops(padded, np.arange(len(index)), top, left, self.img_size)

    @property
    def _pad(self) -> tuple[int, int]:
        """Black rows and columns on each side, out of which padded crops are cut."""
        height, width = self.img_size
        return (height // 8, width // 8) if self.augment.crop == "pad" else (0, 0)

    def _views(self, split: Split, index: Ints) -> tuple[Tensor, Any]:
        """The views of evaluation, uint8 (B, C, H, W), and the targets."""
        targets = self._targets(split.name, index)
        if self.joint_view is None:
            return self._centre_views(split, index), targets
        stored = [split.store.image(i) for i in index.tolist()]
        return self.joint_view(stored, targets, self.img_size, self.augment)

    def _centre_views(self, split: Split, index: Ints) -> Tensor:
        """Copies, uint8 (B, C, H, W)."""
        geometry: Geometry = split.geometry
        if (stack := split.store.batch(index)) is not None:
            return geometry.view(torch.from_numpy(stack)).contiguous()
        pixels = (torch.from_numpy(split.store.image(i).copy())[None] for i in index.tolist())
        return torch.cat([geometry.view(image) for image in pixels])

    def _made(self, pixels: Tensor, targets: Any, index: Tensor, views: tuple[Tensor, ...] = ()) -> Batch:
        """The batch of images that are only normalized, now or on the device."""
        batch = Batch(pixels, targets, index, views, DeferredTransforms(*self._mean_and_std))
        return batch if self.uint8 else batch.transformed()

    @cached_property
    def _mean_and_std(self) -> tuple[Tensor, Tensor]:
        return per_channel(self.augment.mean, self.in_chans), per_channel(self.augment.std, self.in_chans)

    def _targets(self, split: str, index: Ints) -> Any:
        """Classes int64 (B,); labels float32 (B, K), 1 for each label of an image; or a list of Annotated."""
        images = self.splits[split]
        if self.target in ("class", "none"):
            return torch.from_numpy(images.labels[index])
        if self.target != "labels":
            assert images.annotations is not None
            native = images.store.index.native
            return [Annotated(images.annotations[i], (int(native[i, 0]), int(native[i, 1]))) for i in index.tolist()]
        assert images.label_sets is not None
        targets = torch.zeros(len(index), self.num_classes)
        for row, i in enumerate(index.tolist()):
            targets[row, list(images.label_sets[i])] = 1.0
        return targets


@dataclass(frozen=True)
class LazyStore(Store):
    """The readable images of one split, without their pixels."""

    records: Records
    geometry: Geometry
    channels: int

    def image(self, i: int) -> NDArray[np.uint8]:
        """Image i (C, H, W) as a store would have it. Raises UserError if it can no longer be read."""
        name = printable(self.records.ids[i])
        try:
            with busy_with(name):
                return self.geometry.store(decode(self.records.fetch(int(self.records.keys[i])), self.channels))
        except Unreadable as error:
            raise UserError(f"{name} cannot be read any more: {error}. Repair it and resume.") from error

    def batch(self, index: Ints) -> None:
        """None, since the images are not kept."""
        return None


def open_lazily(records: Records, geometry: Geometry, channels: int, cache_dir: Path | None) -> LazyStore:
    """The records' images, decoded when they are needed. Unless the source knows which can be read, each is decoded now
    once."""
    if records.native is None or records.digests is None:
        index = open_store(records, None, 3, cache_dir).index
    else:
        native = records.native[records.native.min(axis=1, initial=1) > 0]
        index = Index(np.arange(len(records)), records.digests, native)
    return LazyStore(np.empty(0, np.uint8), index, records.take(index.kept), geometry, channels)
