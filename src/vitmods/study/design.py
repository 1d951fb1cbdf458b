"""Designs: the trials of a study, how many seeds they have, and what is asked of them.

Each design is one class in one file of `vitmods.study.designs`, or of a plugin, registered under its name. Everything
else asks the design of the study: settings for its arms and seeds, the schedule for the looks at which arms stop,
the estimate for what it would find, and the answer for its questions. Designs are read before torch is
imported, since they refuse settings: their methods import what they compute with.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitmods.study.arms import Arm
from vitmods.util.errors import UserError
from vitmods.util.registry import Registry

if TYPE_CHECKING:
    from vitmods.stats.sample_size import Findable

DESIGNS: Registry[type[Design]] = Registry(
    "design",
    "vitmods.study.designs",
    advice="docs/plugins.md shows how to add one.",
    check="vitmods.study.design:check_designs",
)


@dataclass(frozen=True)
class Design:
    """How the trials of a study are laid out, and what is asked of them.

    Methods get the `Settings` of the study, as `settings`, and the `StudyState` of its folder, as `state`. The defaults
    are those of arms that are compared with base one by one.

    name:         that `--design` takes
    is_implied:   whether other settings imply it, so that study.json does not name it
    usual_seeds:  if their number is not given
    least_seeds:  that it needs
    most_seeds:   of a study that runs until it is decided, if their number is not given
    compares_arms: whether the headline is each arm against base
    options:      the settings that only this design has
    excludes:     setting, or option of the shell -> why this design does not go with it, for an error. `{sweep}` is
                  how the settings are swept over
    needs_all:    whether a look needs every arm, so that none may fail
    adds_seeds:   whether a time budget may end with more or fewer seeds than planned
    tunes_base:   whether base is also trained at the points that arms choose and base does not, to be beaten there too
    """

    name: ClassVar[str] = ""
    is_implied: ClassVar[bool] = False
    usual_seeds: ClassVar[int] = 5
    least_seeds: ClassVar[int] = 1
    most_seeds: ClassVar[int] = 16
    compares_arms: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ()
    excludes: ClassVar[Mapping[str, str]] = {
        "confirm": 'Only the best combination of a factorial study is confirmed: design="factorial" (--confirm needs '
        "--design factorial).",
        "until_decided": "This design has a fixed number of seeds: set --seeds, not --until-decided.",
    }
    needs_all: ClassVar[bool] = False
    adds_seeds: ClassVar[bool] = True
    tunes_base: ClassVar[bool] = True

    @classmethod
    def plan(cls, settings: Any) -> Design:
        """Make the design of these settings, whose `arms` are as they were given. Raises UserError if there is none."""
        return cls()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Design:
        """The inverse of `to_dict`. Raises KeyError or TypeError for other values."""
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which study.json keeps; empty if other settings imply it."""
        return {} if self.is_implied else {"kind": self.name}

    @classmethod
    def describe(cls, values: Mapping[str, Any]) -> str:
        """Name in words what `to_dict` returned."""
        return "each arm against base" if cls.is_implied else cls.name

    def continuing(self, recorded: Mapping[str, Any]) -> Design:
        """Return the design that study.json has, if it is of the same arms; else this one."""
        return self

    def arms(self, given: tuple[Arm, ...]) -> tuple[Arm, ...]:
        """Return the arms that are trained."""
        return given

    def factors(self, given: tuple[Arm, ...]) -> tuple[Arm, ...]:
        """Return the arms as they were given; the inverse of `arms`."""
        return given

    @property
    def chosen_options(self) -> dict[str, Any]:
        """Return the values of `options`, for a study that is made again."""
        return {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what this design cannot show."""
        return ()

    def trains(self, settings: Any, setting: Any, arm: str, seed: int) -> bool:
        """Whether an arm is trained under a setting of the sweep with a seed. All are, unless a design leaves some
        out."""
        return True

    def look_seeds(self, settings: Any) -> tuple[int, ...]:
        """The numbers of seeds at which a study that runs until it is decided may be looked at."""
        from vitmods.stats.sequential import steps_of

        return steps_of(settings.known)

    @property
    def last_level(self) -> float:
        """Alpha of the last look of such a study."""
        from vitmods.stats.sequential import LAST_LEVEL

        return LAST_LEVEL

    def looks(self, settings: Any) -> tuple[int, ...]:
        """Return those of the study. UserError for too few or too many seeds."""
        from vitmods.stats import sequential

        kind = "study" if self.is_implied else f"{self.name} study"
        return sequential.looks(len(settings.seeds), self.look_seeds(settings), kind)

    def look(
        self, state: Any, seeds: Sequence[int], setting: Any, frozen: Mapping[str, Any], without: Container[str]
    ) -> tuple[Any, tuple[str, ...]]:
        """Return the decision of a look, and the arms that need no more seeds.

        seeds: those of the look. setting: of the sweep. frozen: arms that have stopped -> their effects.
        without: arms that cannot be looked at, since a trial failed.
        """
        raise NotImplementedError

    def questions(self, state: Any, looks: Sequence[Any], base: str) -> tuple[Any, dict[str, Any]]:
        """Return the decision on every arm against `base`, and the questions by name; the first is the headline.

        looks: those that were taken.
        """
        raise NotImplementedError

    def findable(self, settings: Any, seeds: int, alpha: float, images: float) -> Findable:
        """Return the effects that so many seeds find, in standard deviations of a trial.

        alpha: level of the last look. images: what the choice of test images adds to the standard error, likewise.
        """
        from vitmods.stats.sample_size import detectable

        return detectable(settings.compared, seeds, alpha, images, settings.known)

    @classmethod
    def instead(cls, settings: Any, base: Any, sd: float, unit: str) -> str:
        """Propose this design, in a sentence, for a study of another one that would find less; empty if it would not.

        base: its config. sd: of a trial. unit: of sd.
        """
        return ""

    def combination(self, labels: Iterable[str]) -> Arm:
        """Return the arm that has several of the factors together."""
        raise NotImplementedError


def check_designs() -> None:
    """Raise UserError for a user's design that study.json would not name as it is registered."""
    for name, kind in DESIGNS.items():
        if DESIGNS.is_from_outside(name) and (kind.name != name or kind.is_implied):
            raise UserError(f"The design '{name}' needs the class attributes name = '{name}' and is_implied = False.")
