"""ImageNet's 1,000 classes: WordNet numbers in their order, which is the order of the models' logits, and names."""

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np

from vitmods.data.records import Source


@cache
def wnids() -> tuple[str, ...]:
    """n01440764, n01443537, ...: the name at position i is class i."""
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


@cache
def titles() -> tuple[str, ...]:
    """A readable name for each class, no two alike: the first of its WordNet lemmas, with more where that is shared."""
    from timm.data import ImageNetInfo

    lemmas = ImageNetInfo("imagenet-1k").label_descriptions()
    first = [text.split(", ")[0] for text in lemmas]
    shared, twice = Counter(first), Counter(lemmas)
    return tuple(
        short if shared[short] == 1 else text if twice[text] == 1 else f"{text} ({wnid})"
        for short, text, wnid in zip(first, lemmas, wnids(), strict=True)
    )


def present(source: Source, names: Sequence[str]) -> Source:
    """The source, whose labels are positions in `names`, with the classes alone that have an image; class_map has
    their positions where some are left out."""
    used = np.unique(np.concatenate([records.labels for records in source.splits.values()]))
    source.classes = tuple(names[i] for i in used)
    if len(used) == len(names):
        return source
    source.class_map = tuple(used.tolist())
    for records in source.splits.values():
        records.labels[:] = np.searchsorted(used, records.labels)
    return source
