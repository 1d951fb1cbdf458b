"""What the report and the table say of factorial studies and of sweeps, beyond what they say of every study."""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vitmods.report.text import LEANING, numbers, points, ranked_effects, verb
from vitmods.stats.factorial import LOOKS, NOMINAL, detectable
from vitmods.stats.plan import forecast
from vitmods.stats.verdict import Effect, Verdict
from vitmods.study.answer import Answer, ArmAnswer, SettingAnswer
from vitmods.study.plan import mean_of
from vitmods.study.state import TrialRecord


class Step(NamedTuple):
    """A sentence, and the command that does it, if there is one."""

    text: str
    command: str = ""


class Row(NamedTuple):
    """An arm under one setting of a sweep; `effect` None: base."""

    setting: SettingAnswer
    arm: ArmAnswer
    mean: float | None
    effect: Effect | None
    steps: str


def sweep_rows(answer: Answer) -> list[Row]:
    """Of each setting base, and the arms in the order of the study."""
    assert answer.over_settings is not None
    rows = []
    for setting in answer.sweep:
        for arm in answer.every_arm:
            effect = answer.over_settings.each[arm.name][setting.name] if arm is not answer.base else None
            trials = [trial for trial in arm.counted if trial.setting == setting.values]
            rows.append(Row(setting, arm, mean_of(setting.scores[arm.name].values()), effect, steps_to_base(trials)))
    return rows


def several_bases(answer: Answer) -> bool:
    """Whether base is swept over: then there are costs for each."""
    return any("base" in setting.values for setting in answer.sweep)


def short_name(setting: SettingAnswer) -> str:
    """`0.25` where one field is swept over; else `lr=0.001,limit_train=0.25`."""
    return setting.name.partition("=")[2] if len(setting.values) == 1 else setting.name


def steps_to_base(trials: Iterable[TrialRecord]) -> str:
    """After how many steps trials first reached base's score at the end: `120 (90 to 150), 3 of 5 seeds`."""
    followed = [trial for trial in trials if trial.status == "finished" and trial.curve.step]
    steps = [trial.steps_to_base for trial in followed if trial.steps_to_base is not None]
    if not steps:
        return f"in none of {len(followed)}" if followed else "–"
    spread = f" ({min(steps):,} to {max(steps):,})" if len(set(steps)) > 1 else ""
    few = f", {len(steps)} of {len(followed)} seeds" if len(steps) < len(followed) else ""
    return f"{statistics.median(steps):,.0f}{spread}{few}"


def all_steps_to_base(answer: Answer) -> list[tuple[str, str]]:
    """(arm, its steps), base first; of a study of one setting whose trials were followed on val."""
    found = [(arm.name, steps_to_base(arm.counted)) for arm in answer.every_arm]
    return [] if answer.sweep or all(text == "–" for _, text in found) else found


def factorial_steps(answer: Answer) -> Iterator[Step]:
    """What to do after a factorial study: confirm the best combination, or take it; what open changes need."""
    assert answer.factorial is not None
    best, confirmed = "+".join(answer.factorial.best), answer.confirmed
    if not best:
        yield Step(f"No change is predicted to help: keep {answer.base.name}.")
    elif confirmed is None:
        yield Step(
            f"{answer.factorial.prediction[0].upper()}{answer.factorial.prediction[1:]}, before it is called better.",
            confirming(answer.command),
        )
    else:
        found = f"On {confirmed.n} fresh seeds {best} {verb(confirmed.verdict, answer.base.name)}: {numbers(confirmed)}"
        take = f"take {best}" if confirmed.verdict == Verdict.HELPS else f"keep {answer.base.name}"
        yield Step(f"{found}{points(answer.metric)}: {take}.")
    for effect in ranked_effects(answer):
        if effect.failures:
            yield Step(f"{effect.arm}: runs with it failed ({effect.failures}). Compare it by itself.")
    yield from _open_changes(answer)
    for name in answer.factorial.design.left_out:
        yield Step(f"{name} is in no run, since it excludes most of the others: compare it in a study of its own.")


def _open_changes(answer: Answer) -> Iterator[Step]:
    assert answer.factorial is not None
    design = answer.factorial.design
    scale = math.sqrt(len(design.runs) / (2 * float(design.relative_variance.max())))  # V = 2 sd^2 / n of an effect
    for effect in ranked_effects(answer):
        halves = {n: scale * detectable(design, n, NOMINAL).half for n in LOOKS[-3:]}
        if expected := forecast(effect, halves):
            yield Step(f"{effect.arm}{LEANING.get(effect.leans, '')}: {expected} of every run.")


def confirming(command: str) -> str:
    """The command that goes on to confirm the best combination."""
    if command.startswith("vitmods compare"):
        words = shlex.split(command)
        return shlex.join(words if "--confirm" in words else [*words, "--confirm"])
    return command.replace(").run(", ").confirm(", 1)


def factor_arms(answer: Answer) -> list[tuple[ArmAnswer, bool]]:
    """Each change of a factorial study as an arm, and whether there is a run that has it alone, whose model this is."""
    assert answer.factorial is not None
    design = answer.factorial.design
    by_name = {arm.name: arm for arm in answer.every_arm}
    found = []
    for effect in ranked_effects(answer):
        runs = sorted((names for names in design.arms.values() if effect.arm in names), key=len)
        run = by_name["+".join(runs[0])]
        edits = answer.settings["design"]["factors"][effect.arm]["changes"]
        changes = tuple(one for one in run.model.changes if one.short in edits)
        model = dataclasses.replace(run.model, changes=changes)
        found.append((dataclasses.replace(run, name=effect.arm, model=model, effect=effect), len(runs[0]) == 1))
    return found
