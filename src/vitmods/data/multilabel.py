"""The target that a task asks of a source, and images with any number of labels."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from vitmods.data.dataset import Split
from vitmods.data.records import Records, Source, printable
from vitmods.util.errors import UserError
from vitmods.util.registry import Registry


@dataclass(frozen=True)
class Target:
    """The fact that a task asks of each image: a class, a mask.

    title: in words, for messages. remedy: how images with it can be used otherwise. conversions: the target that a
    source has -> the function that makes a source of this one. located: whether it has places in the image, which is
    then kept whole. check: what is wrong with splits of it.
    """

    title: str
    remedy: str = "Choose another task or data set."
    conversions: Mapping[str, Callable[[Source], Source]] = field(default_factory=dict)
    located: bool = True
    check: Callable[[Mapping[str, Split]], list[str]] | None = None


TARGETS: Registry[Target] = Registry("target", "vitmods.tasks.*.sources")
TARGETS.add("none", Target("no class", "Put the images of each class into a folder.", located=False))
TARGETS.add("any", Target("a class or none", located=False))
TARGETS.add("class", Target("a class", located=False))
TARGETS.add("labels", Target("labels", "Train it with --task multilabel.", located=False))


def target_named(name: str) -> Target:
    """The target of this name; an unregistered one is called by its name."""
    return TARGETS.get(name) or Target(name)


def with_target(source: Source, target: str) -> Source:
    """Convert a source to the target of a task: "labels" from classes, masks and boxes, "instances" from boxes whose
    objects have outlines, "none" from all images, and "any" to "class" if images have several classes, else to "none".

    A class name with + means several labels. Raises UserError if the source lacks the target.
    """
    if target == "any":
        numbers = np.concatenate([part.labels for part in source.splits.values()])
        target = "class" if source.target == "class" and len(np.unique(numbers)) > 1 else "none"
    if source.target == target:
        return source
    if target == "none":
        splits = {
            name: replace(part, labels=np.zeros_like(part.labels), label_sets=None, annotations=None)
            for name, part in source.splits.items()
        }
        return replace(source, classes=("image",), splits=splits, target=target)
    present, wanted = target_named(source.target), target_named(target)
    if source.target in wanted.conversions:
        return wanted.conversions[source.target](source)
    sets = [part.label_sets for part in source.splits.values()]
    if target == "labels" and source.target not in ("class", "none") and None not in sets:
        return replace(source, target=target)
    if source.target == "none":
        raise UserError(f"{printable(source.spec)} does not say the {target} of its images. {present.remedy}")
    if target != "labels" or source.target != "class":
        raise UserError(
            f"{printable(source.spec)} gives {present.title} of each image, not {wanted.title}. {present.remedy}"
        )
    if source.class_map is not None:
        raise UserError(f"{printable(source.spec)} evaluates models of other classes; it is without training labels.")
    parts = [{part.strip() for part in name.split("+") if part.strip()} for name in source.classes]
    if not any(len(part) > 1 for part in parts):
        parts = [{name} for name in source.classes]
    labels = sorted(set().union(*parts)) if any(len(part) > 1 for part in parts) else list(source.classes)
    number = {label: i for i, label in enumerate(labels)}
    of_class = [tuple(sorted(number[label] for label in part)) for part in parts]
    splits = {
        name: replace(part, label_sets=part.label_sets or tuple(of_class[int(label)] for label in part.labels))
        for name, part in source.splits.items()
    }
    return with_rarest(replace(source, classes=tuple(labels), splits=splits, target="labels"))


def label_counts(sets: Iterable[tuple[int, ...]], labels: int) -> list[int]:
    """Count the images with each label."""
    counts = Counter(label for image in sets for label in image)
    return [counts[label] for label in range(labels)]


def with_rarest(source: Source) -> Source:
    """Set each image's class to its rarest label (or none), by which splits and limits keep proportions."""
    sets = [labels for part in source.splits.values() for labels in part.label_sets or ()]
    counts, none = label_counts(sets, len(source.classes)), len(source.classes)

    def rarest(part: Records) -> Records:
        sets = part.label_sets or ()
        keys = [min(labels, key=lambda label: (counts[label], label), default=none) for labels in sets]
        return replace(part, labels=np.array(keys, dtype=np.int64))

    return replace(source, splits={name: rarest(part) for name, part in source.splits.items()})
