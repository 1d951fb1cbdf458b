"""The verdicts of a complete study for loggers: a run an arm, beside those of its trials."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vitmods.stats.verdict import Effect
from vitmods.study.answer import Answer
from vitmods.study.arms import Arm
from vitmods.study.plan import Settings
from vitmods.study.store import Facts, StudyFolder
from vitmods.study.trial import logged_run
from vitmods.train.loggers import Logs


def log_verdicts(names: Iterable[str], folder: StudyFolder, facts: Facts, settings: Settings, answer: Answer) -> None:
    """Write each verdict, with its interval in numbers, to each of the loggers. One that fails is warned of."""
    known = {arm.name: arm for arm in (*settings.arms, *settings.factors)}
    for name, effect in answer.headline.items():
        fields = {
            "verdict": str(effect.verdict),
            "effect": repr(effect),
            "metric": answer.metric.name,
            "seeds": len(settings.seeds),
        }
        run = logged_run(folder, facts, known.get(name, Arm(name)), f"verdict of {name}", fields)
        Logs(tuple(names), run).close("finished", _numbers(effect))


def _numbers(effect: Effect) -> dict[str, float]:
    low, high = effect.interval
    found = {"effect": effect.effect, "low": low, "high": high, "margin": effect.margin}
    return {f"verdict/{name}": value for name, value in found.items() if math.isfinite(value)}
