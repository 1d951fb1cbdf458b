"""Arms that are switched on and off together, so that every trial speaks of every change.

A run is an ordinary arm, `dpn+rms`, with the edits and the recipe overrides of its changes joined. The runs are chosen
once, kept in study.json and never chosen again. The study stops as a whole, since every run informs every change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from vitmods.stats.runs import MOST_CHANGES, FactorialRuns, plan_factorial
from vitmods.study.arms import BASE, Arm, Replace
from vitmods.study.design import DESIGNS
from vitmods.study.designs.arms import Arms
from vitmods.study.grid import Point
from vitmods.util.errors import UserError
from vitmods.util.text import listing, plural

if TYPE_CHECKING:
    from vitmods.changes import Change
    from vitmods.stats.decision import Decision
    from vitmods.stats.factorial import Factorial
    from vitmods.stats.sample_size import Findable, Forecast
    from vitmods.stats.verdict import Effect
    from vitmods.study.bases import Base
    from vitmods.study.questions import Look, Question
    from vitmods.study.settings import Settings
    from vitmods.study.state import StudyState


@DESIGNS.register("factorial")
@dataclass(frozen=True)
class FactorialDesign(Arms):
    """The changes as arms, in the order in which a run has them, and which runs there are."""

    changes: tuple[Arm, ...]
    runs: FactorialRuns

    name = "factorial"
    is_implied = False
    usual_seeds = 3
    least_seeds = 2
    most_seeds = 8
    compares_arms = False
    options = ("runs",)
    excludes: ClassVar[Mapping[str, str]] = {
        "sweep": "--design factorial does not support {sweep}: run a factorial study for each value.",
        "folds": "--folds does not support --design factorial: drop one of the two.",
        "family": "family is for studies of arms: a factorial design has one effect for each change.",
        "retrain": "--retrain best does not support --design: confirm the best combination (--confirm), or name a run "
        "(--retrain dpn+rms).",
        "reference": "A factorial study compares each change with its absence: leave the reference out (--reference).",
    }
    needs_all = True
    adds_seeds = False  # each is a trial of every run
    tunes_base = False

    @classmethod
    def plan(cls, settings: Settings) -> FactorialDesign:
        """Choose the runs for the arms. Raises UserError if no design exists.

        Two arms cannot be one if their changes exclude each other, if both replace norms or set one field of the
        recipe, or if one starts from its own weights.
        """
        from vitmods.changes import Change
        from vitmods.changes.compose import conflicts, in_order
        from vitmods.model.config import ViTConfig
        from vitmods.study.bases import make_base

        arms, fixed = settings.arms, settings.fixed
        base = make_base(fixed["base"], 2, fixed["img_size"], fixed["in_chans"])
        config = base if isinstance(base, ViTConfig) else None
        changes = {arm.name: [edit for edit in arm.changes if isinstance(edit, Change)] for arm in arms}
        excluding = list(conflicts(changes, config))
        replaces = {arm.name for arm in arms if any(isinstance(edit, Replace) for edit in arm.changes)}
        for first, second in itertools.combinations(arms, 2):
            shared = set(first.recipe) & set(second.recipe) or {first.name, second.name} <= replaces
            if shared or first.start or second.start:
                excluding.append((first.name, second.name))
        by_name = {arm.name: arm for arm in arms}
        runs = plan_factorial(in_order(changes, config), excluding, settings.runs)
        return cls(tuple(by_name[name] for name in runs.changes), runs)

    def continuing(self, recorded: Mapping[str, Any]) -> FactorialDesign:
        """Return the recorded runs where they are as many, of the same changes; else these."""
        other = self.from_dict(recorded)
        changes, others = ({arm.name: arm.identity() for arm in design.changes} for design in (self, other))
        if changes != others or len(self.runs.runs) != len(other.runs.runs):
            return self
        by_name = {change.name: change for change in self.changes}
        return FactorialDesign(tuple(by_name[name] for name in other.runs.changes), other.runs)

    def to_dict(self) -> dict[str, Any]:
        runs = self.runs
        return {
            "kind": self.name,
            "factors": {change.name: change.identity() for change in self.changes},
            "runs": [[name for name in runs.changes if name in run] for run in runs.runs],
            "conflicts": [list(pair) for pair in runs.conflicts],
            "left_out": list(runs.left_out),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FactorialDesign:
        changes = tuple(Arm.from_identity(name, arm) for name, arm in values["factors"].items())
        runs = FactorialRuns(
            tuple(change.name for change in changes),
            tuple(map(frozenset, values["runs"])),
            tuple((first, second) for first, second in values["conflicts"]),
            tuple(values["left_out"]),
        )
        return cls(changes, runs)

    @classmethod
    def describe(cls, values: Mapping[str, Any]) -> str:
        changes = ", ".join(change["changes"] for change in values["factors"].values())
        return f"factorial of {changes} in {len(values['runs'])} runs"

    def arms(self, given: tuple[Arm, ...] = ()) -> tuple[Arm, ...]:
        """Return the runs, without base."""
        return tuple(self.combination(names) for name, names in self.runs.arms.items() if name != BASE)

    def factors(self, given: tuple[Arm, ...] = ()) -> tuple[Arm, ...]:
        return self.changes

    def combination(self, labels: Iterable[str]) -> Arm:
        """Return these changes together, whether that is one of the runs or not."""
        on = set(labels)
        chosen = [change for change in self.changes if change.name in on]
        recipe = {name: value for change in chosen for name, value in change.recipe.items()}
        return Arm("+".join(arm.name for arm in chosen), sum((arm.changes for arm in chosen), ()), recipe)

    @property
    def chosen_options(self) -> dict[str, Any]:
        return {"runs": len(self.runs.runs)}

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.runs.warnings

    def look_seeds(self, settings: Settings) -> tuple[int, ...]:
        from vitmods.stats.factorial import LOOK_SEEDS

        return LOOK_SEEDS

    @property
    def last_level(self) -> float:
        from vitmods.stats.factorial import LOOK_LEVEL

        return LOOK_LEVEL

    def look(
        self,
        state: StudyState,
        seeds: Sequence[int],
        setting: Point,
        frozen: Mapping[str, Effect],
        without: Container[str],
    ) -> tuple[Any, tuple[str, ...]]:
        effects = self._effects(state, seeds, setting)
        return effects, tuple(arm.name for arm in state.settings.arms if effects.is_decided)

    def questions(self, state: StudyState, looks: Sequence[Look], base: str) -> tuple[Decision, dict[str, Question]]:
        """Return the changes, what two of them do together, and every run against base."""
        from vitmods.stats.factorial import Factorial

        last = looks[-1].decision if looks else None
        effects = last if isinstance(last, Factorial) else self._effects(state, state.settings.seeds)
        decision, questions = super().questions(state, looks, base)
        family = "These intervals are a separate family, with fewer trials per interval than for a change."
        runs = replace(questions["arms"], title=f"Every run against {base}", notes=(family,), is_folded=True)
        return decision, {"changes": self._of_changes(effects), "pairs": self._of_pairs(effects), "arms": runs}

    def findable(self, settings: Settings, seeds: int, alpha: float, images: float) -> Findable:
        from vitmods.stats.factorial import detectable

        with_images = math.sqrt(1 + seeds * images**2 / 2)  # `images` is of a difference of two arms
        return detectable(self.runs, seeds, alpha) * with_images

    @classmethod
    def instead(cls, settings: Settings, base: Base, sd: float, unit: str) -> str:
        """Propose a design with about as many trials that finds smaller effects; empty if there is none, or if fewer
        than three arms are single changes of a ViT."""
        from vitmods.changes import Change
        from vitmods.changes.compose import conflicts
        from vitmods.model.config import ViTConfig
        from vitmods.stats.factorial import detectable
        from vitmods.stats.sample_size import detectable as detectable_alone

        changes: dict[str, tuple[Change, ...]] = {}
        for arm in settings.arms:
            if [isinstance(change, Change) for change in arm.changes] == [True] and not arm.recipe and not arm.start:
                changes[arm.name] = arm.changes  # type: ignore[assignment]
        k, seeds = len(settings.arms), len(settings.seeds)
        if not 3 <= len(changes) == k <= MOST_CHANGES or not isinstance(base, ViTConfig) or settings.tune:
            return ""
        try:
            runs = plan_factorial(list(changes), conflicts(changes, base))
        except UserError:  # no two of them go together
            return ""
        count, trials = len(runs.runs), (k + 1) * seeds
        repeats = max(2, round(trials / count))
        together, alone = detectable(runs, repeats).effect, detectable_alone(k, seeds).effect
        if not together < alone:
            return ""
        return (
            f"{listing(list(runs.changes))} can be switched on and off together: a factorial design (--design "
            f"factorial) of {count} runs x {repeats} seeds, {count * repeats} trials, finds effects above about "
            f"{together * sd:.2g} {unit}; one at a time, {trials} trials find {alone * sd:.2g}."
        )

    def _effects(self, state: StudyState, seeds: Sequence[int], setting: Point | None = None) -> Factorial:
        """Decide on the changes, on average over the other changes."""
        from vitmods.stats.factorial import factorial
        from vitmods.study.tables import criteria_of, tables_of

        setting = state.settings.sweep.points[0] if setting is None else setting
        table = tables_of(state, seeds, [setting])[setting]
        return factorial(table, self.runs, criteria_of(state, seeds, BASE, self.look_seeds(state.settings)))

    def _of_changes(self, effects: Factorial) -> Question:
        from vitmods.study.questions import Question

        runs, fewest = len(self.runs.runs), min((effect.n for effect in effects.effects.values()), default=0)
        smallest = {
            name: min((on for on in self.runs.arms.values() if name in on), key=len) for name in effects.effects
        }
        known = ("effects", "pairs", "notes", "best", "look")
        return Question(
            "change",
            "what a change adds, by least squares over the runs"
            if self.runs.conflicts
            else "means of the runs with a change minus those without",
            {"": effects.effects},
            scope="if changes add up" if self.runs.conflicts else "on average over the other changes on and off",
            facts=(effects.look, f"{runs} runs, {plural(fewest, 'seed')} each"),
            notes=effects.notes,
            methods=f"Changes were switched on and off together in {runs} combinations (a factorial design), base "
            "among them.",
            together=effects.best,
            predicts=effects.prediction,
            details={name: value for name, value in effects.to_dict().items() if name not in known},
            shown_by={change.name: ("+".join(smallest[change.name]), change.short) for change in self.changes},
            advice=tuple(
                f"No run contains {name}, since it excludes most other changes: compare it in its own study."
                for name in self.runs.left_out
            ),
            forecast=partial(_forecast, self.runs),
        )

    def _of_pairs(self, effects: Factorial) -> Question:
        from vitmods.study.questions import Question

        return Question(
            "pair",
            "half of how much one change alters the other's effect; above zero, the two work better together",
            {"": effects.pairs},
            title="Interactions",
            notes=(
                f"Simultaneous 95 % intervals for these {len(effects.pairs)} pairs.",
                *["Pairs in one row cannot be separated."] * bool(self.runs.aliases),
            ),
        )


def _forecast(runs: FactorialRuns, effect: Effect) -> Forecast | None:
    from vitmods.stats.factorial import LOOK_LEVEL, LOOK_SEEDS, detectable
    from vitmods.stats.sample_size import forecast

    scale = math.sqrt(len(runs.runs) / (2 * float(runs.relative_variance.max())))
    halves = {n: scale * detectable(runs, n, LOOK_LEVEL).half for n in LOOK_SEEDS if n > effect.n}
    return forecast(effect, {most: {n: half for n, half in halves.items() if n <= most} for most in LOOK_SEEDS[-3:]})
