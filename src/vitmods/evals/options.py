"""The options of the protocols. Imports without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitmods.util.errors import UserError

SHOTS, SEVERITIES = (1, 5, 10, 25), (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Options:
    """Settings of evaluation protocols; the defaults are those of the papers.

    Raises:
        UserError: a value is out of its range.
    """

    shots: tuple[int, ...] = SHOTS
    """training images per class for few-shot transfer"""
    corruptions: tuple[str, ...] | None = None
    """names of `vitmods.papers.corruptions`; None: the 15 that count in ImageNet-C"""
    severities: tuple[int, ...] = SEVERITIES
    """severities of each corruption, 1 to 5"""
    linear_epochs: int = 100
    """passes over the training images of the protocol linear"""
    temperature: Literal["val"] | None = None
    """split on which one temperature is fitted that divides the logits before their calibration is measured; None: 1"""
    textures: Path | None = None
    """folder of the images that the corruption `frost` blends in; None: $VITMODS_FROST"""

    def __post_init__(self) -> None:
        for name in ("shots", "corruptions", "severities"):
            values = getattr(self, name) or ()
            if len(set(values)) < len(values):
                raise UserError(f"{name} names something twice: {', '.join(map(str, values))}.")
        if not self.shots or min(self.shots) < 1:
            raise UserError(f"shots are numbers of images of each class, 1 or more, not {self.shots}.")
        if self.linear_epochs < 1:
            raise UserError(
                f"linear_epochs is a number of passes over the images, 1 or more, not {self.linear_epochs}."
            )
        if not self.severities or not set(self.severities) <= set(SEVERITIES):
            raise UserError(f"severities are among 1 to 5, not {self.severities}.")
        if self.corruptions is not None and not self.corruptions:
            raise UserError("corruptions is empty: leave it out for all of ImageNet-C.")
