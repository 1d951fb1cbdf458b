"""Each arm against base, under one setting."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from vitmods.study.arms import BASE
from vitmods.study.design import DESIGNS, Design
from vitmods.study.grid import Point

if TYPE_CHECKING:
    from vitmods.stats.decision import Decision
    from vitmods.stats.verdict import Effect
    from vitmods.study.questions import Look, Question
    from vitmods.study.state import StudyState


@DESIGNS.register("arms")
class Arms(Design):
    """Each arm against base; of a study that runs until it is decided, an arm gets seeds until it is."""

    name = "arms"
    is_implied = True
    excludes: ClassVar[Mapping[str, str]] = {
        "confirm": Design.excludes["confirm"],
        "sweep": "--design arms compares under one setting: leave it out, or {sweep}.",
    }

    def look(
        self,
        state: StudyState,
        seeds: Sequence[int],
        setting: Point,
        frozen: Mapping[str, Effect],
        without: Container[str],
    ) -> tuple[Decision, tuple[str, ...]]:
        from vitmods.study.tables import decision_at

        decision = decision_at(state, seeds, setting, frozen, without=without)
        open_ones = {arm: effect for arm, effect in decision.effects.items() if arm not in frozen}
        return decision, tuple(arm for arm, effect in open_ones.items() if effect.stops or effect.futile)

    def questions(self, state: StudyState, looks: Sequence[Look], base: str) -> tuple[Decision, dict[str, Question]]:
        from vitmods.stats.decision import Decision
        from vitmods.study.questions import arms_question
        from vitmods.study.tables import decision_against

        decision = looks[-1].decision if looks and base == BASE else None
        if not isinstance(decision, Decision):
            decision = decision_against(state, base, {arm for look in looks for arm in look.stopped})
        return decision, {"arms": arms_question(decision)}
