"""The verdicts of a complete study for loggers: a run an arm, beside those of its trials."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vitmods.stats.verdict import Effect
from vitmods.study.answer import Answer
from vitmods.study.arms import Arm
from vitmods.study.plan import Settings
from vitmods.study.store import Facts, StudyFolder, read_object
from vitmods.study.trial import logged_run
from vitmods.train.loggers import Logs
from vitmods.util.errors import UserError
from vitmods.util.files import write_json

NOTED = "logged_verdicts.json"  # of the study's folder: logger -> arm -> what it was sent last


def log_verdicts(names: Iterable[str], folder: StudyFolder, facts: Facts, settings: Settings, answer: Answer) -> None:
    """Write each verdict, with its interval in numbers, to those of the loggers that do not have it yet. One that fails
    is warned of, and sent again by the next run. Local files lie in the study's folder."""
    arms = {arm.name: arm for arm in (*settings.arms, *settings.factors)}
    path = folder.path / NOTED
    noted: dict[str, Any] = {}
    with suppress(UserError):  # a damaged one is written again
        noted = read_object(path)
    for name, effect in answer.headline.items():
        fields = {
            "verdict": str(effect.verdict),
            "effect": repr(effect),
            "metric": answer.metric.name,
            "seeds": len(settings.seeds),
        }
        sent = {**fields, **_numbers(effect)}
        lacking = [logger for logger in names if noted.get(logger, {}).get(name) != sent]
        if not lacking:
            continue
        run = logged_run(folder, facts, arms.get(name, Arm(name)), f"verdict of {name}", fields)
        for logger in Logs(lacking, replace(run, folder=folder.path)).close("finished", _numbers(effect)):
            noted.setdefault(logger, {})[name] = sent
        write_json(path, noted)


def _numbers(effect: Effect) -> dict[str, float]:
    low, high = effect.interval
    numbers = {"effect": effect.effect, "low": low, "high": high, "margin": effect.margin}
    return {f"verdict/{name}": value for name, value in numbers.items() if math.isfinite(value)}
