"""Next steps: the arm to use, what would decide the open arms, and the checkpoint to deploy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from vitmods.report.text import LEANING, fresh_text, not_learned, points, ranked, ranked_effects
from vitmods.stats.gains import BELOW
from vitmods.stats.verdict import Verdict
from vitmods.study.answer import Answer
from vitmods.study.arms import BASE
from vitmods.study.checkpoints import seeds_of
from vitmods.study.grid import mean_of
from vitmods.study.prepare import trained_weights
from vitmods.study.results import ArmAnswer
from vitmods.study.retrain import (
    best_arm,
    cost_of,
    estimate_of,
    export_line,
    retrain_command,
)
from vitmods.study.store import StudyFolder
from vitmods.train.trial import WEIGHTS
from vitmods.util.remote import is_there
from vitmods.util.shorthand import without_options
from vitmods.util.text import duration, listing, plural

CHEAPER = 0.97  # of base's time: an arm that saves less is not called cheaper


class Step(NamedTuple):
    """A sentence, and the command that does it if there is one."""

    text: str
    command: str = ""


def next_steps(answer: Answer) -> list[Step]:
    """Recommend what to do; an unfinished study with fixed seeds is only to be finished."""
    if base := not_learned(answer):
        if answer.has_diverged:
            remedy = "a lower learning rate (--lr), a longer warm-up, or clipped gradients (--clip-norm)"
            return [Step(f"{base}, so arms cannot be compared. Try {remedy}, in a new folder.")]
        rate = "or another learning rate (--lr)"
        if BELOW in base:
            rate = "a layer decay (--layer-decay 0.7), or another learning rate (--lr), of which lower ones keep more"
        elif weights := trained_weights(answer.settings):
            rate = f"another learning rate (--lr), or trained weights to start from (--from {weights})"
        return [Step(f"{base}, so arms cannot be compared. Try more epochs (--epochs), {rate}, in a new folder.")]
    steps = []
    if not answer.complete:
        steps.append(Step("Finish the study: re-running the command resumes it.", answer.command))
    if not (answer.complete or answer.looks):
        return steps
    if not answer.arms:
        return [*steps, *map(Step, answer.headline.advice)]
    if not answer.headline.against:
        return [*steps, *_combination(answer)]
    arm = best_arm(answer)
    steps += _choice(answer, arm)
    if any(effect.verdict == Verdict.WITHHELD for effect in answer.effects.values()):
        rate = "it may need another learning rate. Tune the rate of base and arms alike (--tune lr=...)"
        steps.append(Step(f"{answer.base.name} has not learned where {arm.name} has: {rate} in a new folder."))
    for failing, effect in ranked(answer):
        if effect.fails_more:
            failed = f"{plural(effect.failures, 'trial')} failed, base {effect.base_failures}"
            remedy = "try a lower learning rate or a longer warm-up for both"
            steps.append(Step(f"{failing.name}: {failed}. Before dropping it, {remedy}."))
    return [*steps, *_open(answer), *_deploy(answer, arm)]


def _choice(answer: Answer, chosen: ArmAnswer) -> Iterator[Step]:
    best, beaten = answer.decision.best, answer.decision.ruled_out
    if chosen is not answer.base:
        others = [arm for arm in answer.arms if arm.name in best and arm is not chosen]
        cheapest = bool(others) and all(cost_of(chosen) < cost_of(arm) for arm in others)
        yield Step(f"Use {chosen.name}: {'it is the cheapest arm that may be best' if cheapest else 'it helps'}.")
    elif chosen.name in beaten:  # by a one-sided test
        text = f"No interval is above zero, but {chosen.name} is ruled out as the best arm: try "
        yield Step(f"{text}{' or '.join(best)}.")
    else:
        same = [arm for arm, effect in ranked(answer) if effect.verdict in (Verdict.NO_WORSE, Verdict.EQUIVALENT)]
        cheap = [f"{arm.name} {cost_of(arm):.2f}×" for arm in same if cost_of(arm) < CHEAPER]
        saves = f" No worse and cheaper (training time × inference time): {listing(cheap)}." if cheap else ""
        yield Step(f"No arm has been shown to beat {chosen.name}: keep it.{saves}")
    if best and len(best) + len(beaten) > 2:
        tie = " (no difference between them has been shown)" if len(best) > 1 else ""
        out = f" Ruled out: {', '.join(beaten)}." if beaten else ""
        yield Step(f"Best: {' or '.join(best)}{tie}.{out}")


def _open(answer: Answer) -> Iterator[Step]:
    """Forecast each open arm, and give one command for all arms that more seeds may decide."""
    forecasts = [(arm, expected) for arm, effect in ranked(answer) if (expected := answer.headline.forecast(effect))]
    for arm, expected in forecasts:
        time = ""
        means = [mean_of(trial.wall_s for trial in side.trials) for side in (answer.base, arm)]
        seconds = [mean for mean in means if mean is not None]
        if expected.seeds and len(seconds) == 2:  # one trial at a time, on a machine as fast as this one
            more = (expected.seeds - expected.effect.n) * len(answer.under) * sum(seconds)
            time = f"; {expected.seeds} seeds take {duration(more)} more"
        yield Step(f"{arm.name}{LEANING.get(expected.effect.leans, '')}: {expected}{time}.")
    most = max((expected.seeds for _, expected in forecasts), default=0)
    if most and answer.base.name == BASE:  # seeds are added against base
        start = answer.settings.get("start")
        seeds = seeds_of(start["source"]) if start else []
        before = f", after training weights for seeds {len(seeds)} to {most - 1} too" if 0 < len(seeds) < most else ""
        yield Step(f"To decide these arms{before}:", extended(answer.command, most, fixed=len(answer.under) > 1))
    elif answer.decision.overlap and any(effect.verdict == Verdict.OPEN for effect in answer.effects.values()):
        yield Step(
            "With folds, all seeds are trained on the same images, which limits what more seeds add. Open arms need "
            "more images."
        )
    elif forecasts and not most and not any(expected.images for _, expected in forecasts):
        yield Step("Leave open arms open, or reduce the variance: train longer, or on more images.")


def extended(command: str, seeds: int, fixed: bool = False) -> str:
    """Extend a command to at most `seeds` until decided, or to exactly `seeds` if fixed, as sweeps need."""
    decided = "" if fixed else ", until_decided=True"
    if not command.startswith("vitmods compare"):
        plain = re.sub(r", (seeds|until_decided)=(\[[^]]*\]|\w+)", "", command)
        return re.sub(r"\)(\.run\()", rf", seeds={seeds}{decided})\1", plain, count=1)
    words = [word for word in shlex.split(command) if word != "--until-decided"]
    kept = without_options(words, ("--seeds", "--max-seeds", "--budget"))
    return shlex.join([*kept, *(["--seeds"] if fixed else ["--until-decided", "--max-seeds"]), str(seeds)])


def _deploy(answer: Answer, chosen: ArmAnswer) -> Iterator[Step]:
    name = chosen.name
    if len(answer.under) > 1:
        return
    out = StudyFolder(answer.path).retrained(name)
    if is_there(out / WEIGHTS):
        text = f"To deploy {name}, use the model trained on all images. {estimate_of(answer, chosen)}"
        yield Step(text, export_line(out))
        return
    folders = [answer.path / trial.folder for trial in chosen.counted if trial.status == "finished"]
    retrain = bool(folders) and answer.complete
    if retrain:
        yield Step(
            f"To deploy {name}, train it on all images, including the test set. Its accuracy can then not be measured; "
            "use this study's score as the estimate.",
            retrain_command(answer.command, name),
        )
    kept = next((folder for folder in folders if not folder.is_dir() or is_there(folder / WEIGHTS)), None)
    if kept is not None:
        start = "Or use a trial of this study" if retrain else f"To deploy {name}, use a trial of this study"
        yield Step(f"{start}; pick a seed at random: the best test score is biased.", export_line(kept))
    elif folders and not retrain:
        yield Step(f"To deploy {name}, retrain it: this study did not keep its weights.")


def _combination(answer: Answer) -> Iterator[Step]:
    """Confirm the best combination or use it, and forecast the open changes."""
    question, base = answer.headline, answer.base.name
    best, fresh = "+".join(question.together), answer.questions.get("confirmed")
    if not best:
        yield Step(f"No {question.label} is predicted to help: keep {base}.")
    elif fresh is None:
        if answer.command.startswith("vitmods compare"):
            words = shlex.split(answer.command)
            command = shlex.join(words if "--confirm" in words else [*words, "--confirm"])
        else:
            command = answer.command.replace(").run(", ").confirm(", 1)
        yield Step(f"{question.predicts[0].upper()}{question.predicts[1:]}, before it is called better.", command)
    else:
        helps = all(effect.verdict == Verdict.HELPS for effect in fresh.effects.values())
        yield Step(f"{fresh_text(fresh)}{points(answer.metric)}: {f'use {best}' if helps else f'keep {base}'}.")
    for effect in ranked_effects(answer):
        if effect.fails_more:
            yield Step(f"{effect.arm}: runs with it failed ({effect.failures}). Compare it by itself.")
    for effect in ranked_effects(answer):
        if expected := question.forecast(effect):
            yield Step(f"{effect.arm}{LEANING.get(effect.leans, '')}: {expected} of every run.")
    yield from map(Step, question.advice)
