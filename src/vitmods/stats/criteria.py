"""What is settled before scores are seen, and what follows from it for one analysis of a table."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from vitmods.stats.sequential import ALPHA, interim_level
from vitmods.stats.verdict import FRACTION, Claim
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class Criteria:
    """What was settled before the scores were seen: how they are read, what verdicts claim, and how often.

    Fields are explained in `vitmods.decide`. What belongs to the trials or their images is in `Table`.
    """

    margin: float = 0.5
    unit: str | None = None  #: None: a fraction, and no score is above 1
    higher_is_better: bool = True
    generalize: Claim = "images"
    family: int | Literal["pairs"] | None = None
    most_seeds: int | None = None
    planned: int | None = None
    looked: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.margin, Real):
            raise UserError(f"margin is a number, not {self.margin!r}.")
        for name in ("family", "most_seeds", "planned", "looked"):
            if (value := getattr(self, name)) not in (None, "pairs"):
                try:
                    object.__setattr__(self, name, operator.index(value))
                except TypeError:
                    raise UserError(f"{name} is a whole number, not {value!r}.") from None
                if value < 0:
                    raise UserError(f"{name} is a number of seeds or arms, not {value}.")
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise UserError(f"margin must be 0 or more, not {self.margin}: it is the difference that does not matter.")
        if self.generalize not in ("images", "seeds"):
            raise UserError(f"generalize must be 'images' or 'seeds', not {self.generalize!r}.")

    @property
    def is_fraction(self) -> bool:
        """Whether scores are fractions, which are shown in points."""
        return self.unit in (None, FRACTION)

    @property
    def sign(self) -> int:
        """Return 1 where more is better, else -1."""
        return 1 if self.higher_is_better else -1

    def contrasts(self, k: int) -> int:
        """Count the contrasts that hold together in a study of `k` arms. Raises UserError for a family of fewer."""
        if isinstance(self.family, int) and self.family < k:
            raise UserError(f"family must count all {k} arms, not {self.family}.")
        return k * (k + 1) // 2 if self.family == "pairs" else self.family or k

    def analysis(self, fewest: int, family: int, complete: float = ALPHA) -> Analysis:
        """Return how a table is read whose arms have `fewest` seeds or more. complete: alpha where none is missing."""
        planned = self.planned if self.most_seeds is None else None
        alpha = interim_level(fewest, planned, self.looked) or complete
        return Analysis(alpha, family, planned is not None and fewest < planned)


@dataclass(frozen=True)
class Analysis:
    """One reading of a table."""

    alpha: float  #: of its intervals
    family: int  #: contrasts whose intervals hold together
    provisional: bool = False  #: trials of a fixed number of seeds are missing
    too_early: bool = False  #: before the first look of a study that is looked at more than once
    look: str = ""  #: which look this is
