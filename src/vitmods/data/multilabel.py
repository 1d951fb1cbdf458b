"""Images with any number of labels: what a task asks of a source, and what there is to say of such a set."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from vitmods.data.objects import with_instances
from vitmods.data.records import Records, Source, printable
from vitmods.util.errors import UserError

_SHOWN = 5
_HAS = {
    "nothing": "no class",
    "class": "a class",
    "labels": "labels",
    "mask": "a mask",
    "boxes": "boxes",
    "instances": "a mask of each object",
}
"""target -> what images have; those of a user's own sources and tasks are named as they are"""
_REMEDIES = {
    "nothing": "Put the images of each class into a folder of its own.",
    "labels": "Train it with --task multilabel.",
    "mask": "Train it with --task segmentation, or multilabel.",
    "boxes": "Train it with --task detection, or multilabel.",
}
Sets = tuple[tuple[int, ...], ...]


def with_target(source: Source, target: str) -> Source:
    """The source with what a task asks of it; "labels" are given by classes, masks and boxes too, "instances" by boxes
    whose objects have outlines, and "nothing" by all images.

    Classes called as several joined by + are several labels. Raises UserError where it has not what is asked.
    """
    if source.target == target:
        return source
    if target == "nothing":
        splits = {
            name: replace(part, labels=np.zeros_like(part.labels), label_sets=None, annotations=None)
            for name, part in source.splits.items()
        }
        return replace(source, classes=("image",), splits=splits, target=target)
    if target == "labels" and source.target in ("mask", "boxes"):
        return replace(source, target="labels")
    if target == "instances" and source.target == "boxes":
        return with_instances(source)
    if target != "labels" or source.target != "class":
        raise UserError(
            f"{printable(source.spec)} gives {_HAS.get(source.target, source.target)} of each image, not "
            f"{_HAS.get(target, target)}. {_REMEDIES.get(source.target, 'Choose another task or data set.')}"
        )
    if source.class_map is not None:
        raise UserError(f"{printable(source.spec)} evaluates models of other classes; it has no labels to train on.")
    parts = [frozenset(part.strip() for part in name.split("+") if part.strip()) for name in source.classes]
    labels = sorted(frozenset[str]().union(*parts)) if any(len(part) > 1 for part in parts) else list(source.classes)
    number = {label: i for i, label in enumerate(labels)}
    of_class = [tuple(sorted(number[label] for label in part)) for part in parts]
    if labels == list(source.classes):
        of_class = [(i,) for i in range(len(labels))]
    splits = {
        name: replace(part, label_sets=part.label_sets or tuple(of_class[int(label)] for label in part.labels))
        for name, part in source.splits.items()
    }
    return with_rarest(replace(source, classes=tuple(labels), splits=splits, target="labels"))


def label_counts(sets: Iterable[tuple[int, ...]], labels: int) -> list[int]:
    """How many images have each label."""
    found = Counter(label for some in sets for label in some)
    return [found[label] for label in range(labels)]


def label_problems(sets: Sets, labels: tuple[str, ...]) -> list[str]:
    """What makes training images unfit to learn labels from."""
    counts = label_counts(sets, len(labels))
    if any(0 < count < len(sets) for count in counts):
        return []
    return [
        f"No label tells training images apart: all {len(sets)} have the same ({', '.join(labels[:_SHOWN])}). Give "
        "some that other images lack; an image may also have none."
    ]


def with_rarest(source: Source) -> Source:
    """Labels are split and limited in proportion by the rarest that each image has; those without any by themselves."""
    every = [some for part in source.splits.values() for some in part.label_sets or ()]
    counts = label_counts(every, len(source.classes))

    def rarest(part: Records) -> Records:
        none = len(source.classes)
        keys = [min(some, key=lambda label: (counts[label], label), default=none) for some in part.label_sets or ()]
        return replace(part, labels=np.array(keys, dtype=np.int64))

    return replace(source, splits={name: rarest(part) for name, part in source.splits.items()})
