"""Arms in several settings: base models, fractions of the data, lengths of training. Per setting, on average, and whether
the effect depends on the setting.

Every setting b of B has its own base and is fitted by itself. Settings are fixed, not a sample of others: what is said
holds for these. With d[a,b] the effect of arm a in setting b and V[a,b] its variance,

    average     mean over b of d[a,b],         weights 1/B
    departure   d[a,b] minus the average,      weights delta - 1/B;   the effect depends on the setting if one is not zero
    variance    sum over b of weight^2 V[a,b], df = (sum)^2 / sum((weight^2 V)^2 / df)    (Satterthwaite)

The images part is that of the same sum of per-image differences, since all settings are tested on the same images.
Averages, single settings and departures are three families; the intervals of each hold together by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats.contrast import Gains, Reading, effects_of
from vitmods.stats.fit import Array, Contrasts, Mask, fit
from vitmods.stats.images import ImagesPart, images_part
from vitmods.stats.read import Scores, Table, table_of
from vitmods.stats.verdict import FRACTION, Claim, Effect
from vitmods.stats.width import HalfWidth, half_width
from vitmods.util.errors import UserError

ALPHA = 0.05
MANY_ARMS_DF = 4  # of the errors of a setting, from which two seeds have an interval there


@dataclass(frozen=True, repr=False)
class OverSettings:
    """Effects of arms in several settings."""

    averages: dict[str, Effect]  #: arm -> its effect on average over the settings: the headline
    each: dict[str, dict[str, Effect]]  #: arm -> setting -> its effect there
    departures: dict[str, dict[str, Effect]]  #: arm -> setting -> how far that is from the average
    without_images: bool  #: no per-image scores: the intervals are for these test images alone
    notes: tuple[str, ...]  #: failures first

    def depends(self, arm: str) -> bool:
        """Whether the arm's effect is shown to depend on the setting."""
        return any(effect.low > 0 or effect.high < 0 for effect in self.departures[arm].values())

    def range(self, arm: str) -> str:
        """`from +0.31 (S/16) to +2.10 (Ti/16)`, the effects that were estimated."""
