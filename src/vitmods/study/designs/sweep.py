"""Each arm against base under every setting of a sweep, and on average over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from vitmods.study.design import DESIGNS, Design
from vitmods.study.designs.arms import Arms
from vitmods.util.errors import UserError
from vitmods.util.text import listing, plural

if TYPE_CHECKING:
    from vitmods.stats.decision import Decision
    from vitmods.stats.settings import OverSettings
    from vitmods.stats.verdict import Effect
    from vitmods.study.questions import Look, Question
    from vitmods.study.settings import Settings
    from vitmods.study.state import StudyState


@DESIGNS.register("sweep")
class Sweep(Arms):
    """Every arm under every setting. Its questions are the average, each setting, and what differs between them."""

    name = "sweep"
    excludes: ClassVar[Mapping[str, str]] = {
        **Design.excludes,
        "until_decided": "With {sweep} the number of seeds is fixed: set --seeds, not --until-decided.",
        "folds": "--folds does not support {sweep}: drop one of the two.",
    }

    @classmethod
    def plan(cls, settings: Settings) -> Sweep:
        if not settings.sweep:
            raise UserError("--design sweep needs settings: name values, as --sweep epochs=10,30, or leave it out.")
        return cls()

    def questions(self, state: StudyState, looks: Sequence[Look], base: str) -> tuple[Decision, dict[str, Question]]:
        from vitmods.study.tables import over_settings_at

        over = over_settings_at(state, base)
        names = [str(point) for point in state.settings.sweep.points]
        return over.decision, _questions_over(over, f"{plural(len(names), 'setting')} ({'; '.join(names)})")


def _questions_over(over: OverSettings, under: str) -> dict[str, Question]:
    """The average over several settings, each of them, and how far it is from the average.

    under: `2 settings (epochs=10; epochs=30)`
    """
    from vitmods.study.questions import Question, arms_question

    arms, (count, _, _) = arms_question(over.decision), under.partition(" (")

    def by_setting(effects: Mapping[str, Mapping[str, Effect]]) -> dict[str, dict[str, Effect]]:
        names = dict.fromkeys(name for of_arm in effects.values() for name in of_arm)
        return {name: {arm: of_arm[name] for arm, of_arm in effects.items()} for name in names}

    dependent = {arm: over.range(arm) for arm in over.each if over.depends(arm)}
    others = [arm for arm in over.each if arm not in dependent]
    notes = [f"The effect of {listing([*dependent])} depends on the setting."] * bool(dependent)
    notes += [f"No difference between settings was shown for {listing(others)}."] * bool(others)
    average = replace(
        arms,
        meaning=f"{arms.meaning}, on average over the settings",
        scope=f"on average over {count}",
        remarks=dependent,
        methods=f"Base and every arm were trained under {under}; effects are averages over the settings.",
    )
    family = "Simultaneous 95 % intervals over all settings, a separate family from the averages."
    settings = replace(
        arms,
        groups=by_setting(over.each),
        title="Under each setting",
        facts=(),
        notes=(family, *notes, "The claims are limited to these settings."),
    )
    departures = Question(
        "arm",
        "differences between an effect and its average over the settings",
        by_setting(over.departures),
        title="minus its average",
        column_of="settings",
    )
    return {"arms": average, "settings": settings, "departures": departures}
