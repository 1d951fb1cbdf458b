"""`vitmods base`: base alone, as the reference of later studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vitmods.cli import compare
from vitmods.util.errors import UserError

COMMON = "data base from task img-size recipe epochs seeds budget metric workers device out dry-run"
"""options that --help shows"""


@dataclass(frozen=True)
class Base(compare.Compare):
    """Train a model without changes on many seeds; report its spread, learning curve and time.

    Studies of the same images and recipe in folders next to it reuse its trials, so that they train arms alone.

    examples:
      vitmods base --data path/to/images --base Ti/16 --seeds 16
      vitmods compare --data path/to/images --base Ti/16 --arms dpn     (then: base is known from 16 trials)
    """

    alone: ClassVar[bool] = True

    seeds: int | None = 16
    """number of trials"""

    def __post_init__(self) -> None:
        """Raise UserError for options of arms."""
        if self.settings.until_decided or self.max_seeds is not None:
            raise UserError("`vitmods base` decides nothing: set the number of trials with --seeds.")
        of_arms = self.arms, self.pretrain, self.pretrain_data, self.match, self.retrain, self.pilot, self.confirm
        if any(of_arms) or len(self.base) > 1 or self.settings.design or self.settings.sweep or self.settings.tune:
            raise UserError("`vitmods base` trains one model: arms and stages are options of `vitmods compare`.")
        super().__post_init__()


def main(arguments: Sequence[str]) -> int:
    """Run `vitmods base`; returns the exit code."""
    return compare.main(arguments, Base, "base", COMMON)
