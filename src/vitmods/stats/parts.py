"""Trials each of which is tested on another part of the images and trained on the rest.

Trainings then share images, so a mean over n of them varies more than the spread between them says. Nadeau and Bengio
(Machine Learning 52, 2003) take s^2 (1 / n + n_test / n_train) as its variance instead of s^2 / n: a variance over
independent trials times

    1 + n overlap,    overlap = n_test / n_train

It does not shrink to zero with more seeds. A claim with it is about other training images and other test images too.
"""

from __future__ import annotations

import dataclasses

from vitmods.stats.fit import Contrasts
from vitmods.util.errors import UserError


def overlap_of(n_test: float, n_train: float) -> float:
    """n_test / n_train, the images that a trial is tested on and those that it is trained on."""
    if not (n_test > 0 and n_train > 0):
        raise UserError(f"n_test and n_train are numbers of images, above 0, not {n_test} and {n_train}.")
    return n_test / n_train


def over_parts(found: Contrasts, overlap: float) -> Contrasts:
    """The same contrasts with variances for other training sets and other images."""
    factor = 1 + found.seeds * overlap
    return dataclasses.replace(found, pooled=found.pooled * factor, own=found.own * factor)
