"""Next steps: the arm to use, what would decide the open ones, and the checkpoint to deploy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from vitmods.report.designs import Step, factorial_steps
from vitmods.report.text import LEANING, not_learned, ranked
from vitmods.stats.plan import Forecast, forecast
from vitmods.stats.verdict import Verdict
from vitmods.study.answer import Answer, ArmAnswer
from vitmods.study.arms import BASE
from vitmods.study.plan import mean_of
from vitmods.study.retrain import (
    best_arm,
    cost_of,
    estimate_of,
    export_line,
    is_retrained,
    retrain_command,
    retrained_folder,
)
from vitmods.study.warnings import trained_weights
from vitmods.train.trial import WEIGHTS
from vitmods.util.remote import is_there
from vitmods.util.shorthand import without_options
from vitmods.util.text import duration, listing, plural

CHEAPER = 0.97  # of base's time, from where it is worth a word


def what_now(answer: Answer) -> list[Step]:
    """Of a study with fixed seeds that is not finished, only to finish it: its verdicts are provisional."""
    if base := not_learned(answer):
        return [Step(f"{base}, so arms cannot be compared. {_remedies(answer)}")]
    steps = []
    if not answer.complete:
        steps.append(Step("Finish the study: re-running the command resumes it.", answer.command))
    if answer.factorial:
        return [*steps, *(factorial_steps(answer) if answer.complete or answer.looks else ())]
    if answer.complete or answer.looks:
        chosen = best_arm(answer)
        steps += [*_choice(answer, chosen), *_stability(answer), *_open(answer)]
        steps += [] if answer.sweep else _deploy(answer, chosen)
    return steps


def _remedies(answer: Answer) -> str:
    rate = "or another learning rate (--lr)"
    if weights := trained_weights(answer.settings):
        rate = f"another learning rate (--lr), or trained weights to start from (--from {weights})"
    return f"Try more epochs (--epochs), {rate}, in a new folder."


def _choice(answer: Answer, chosen: ArmAnswer) -> Iterator[Step]:
    best, beaten = answer.decision.best, answer.decision.ruled_out
    if chosen is answer.base:
        same = [arm for arm, effect in ranked(answer) if effect.verdict in (Verdict.NO_WORSE, Verdict.EQUIVALENT)]
        cheap = [f"{arm.name} {cost_of(arm):.2f}×" for arm in same if cost_of(arm) < CHEAPER]
        saves = f" No worse, and cheaper in time of training times inference: {listing(cheap)}." if cheap else ""
        if chosen.name in beaten:  # a test to one side alone
            text = f"No interval lies above zero, yet {chosen.name} is ruled out as the best arm: try "
            yield Step(f"{text}{' or '.join(best)}.")
        else:
            yield Step(f"No arm has been shown to beat {chosen.name}: keep it.{saves}")
    else:
        others = [arm for arm in answer.arms if arm.name in best and arm is not chosen]
        cheapest = bool(others) and all(cost_of(chosen) < cost_of(arm) for arm in others)
        why = "it is the cheapest arm that may be best" if cheapest else "it helps"
        yield Step(f"Use {chosen.name}: {why}.")
    if best and len(best) + len(beaten) > 2:
        tie = " (no difference between them has been shown)" if len(best) > 1 else ""
        out = f" Ruled out: {', '.join(beaten)}." if beaten else ""
        yield Step(f"Best: {' or '.join(best)}{tie}.{out}")


def _stability(answer: Answer) -> Iterator[Step]:
    for arm, effect in ranked(answer):
        if effect.failures > effect.base_failures:
            yield Step(
                f"{arm.name}: {plural(effect.failures, 'trial')} failed, base {effect.base_failures}. Try a lower "
                "learning rate or a longer warm-up, also for base, before you drop it."
            )


def _open(answer: Answer) -> Iterator[Step]:
    """The forecast for each open arm, and one command for all arms that more seeds may decide."""
    forecasts = [(arm, found) for arm, effect in ranked(answer) if (found := forecast(effect))]
    for arm, found in forecasts:
        leaning = LEANING.get(found.effect.leans, "")
        yield Step(f"{arm.name}{leaning}: {found}{_time(answer, arm, found)}.")
    most = max((found.seeds for _, found in forecasts), default=0)
    if most and answer.base.name == BASE:  # seeds are added against base
        yield Step("To decide these arms:", extended(answer.command, most, fixed=bool(answer.sweep)))
    elif answer.decision.overlap and any(effect.verdict == Verdict.OPEN for effect in answer.effects.values()):
        yield Step(
            "With folds, all seeds are trained on the same images, which limits what more seeds add. Open arms need "
            "more images."
        )
    elif forecasts and not most and not any(found.images for _, found in forecasts):
        yield Step("Leave open arms open, or compare where trials vary less: train longer, or on more images.")


def _time(answer: Answer, arm: ArmAnswer, found: Forecast) -> str:
    """Time for the missing trials, one at a time on a machine as fast as this one."""
    seconds = [mean_of(trial.wall_s for trial in one.trials) for one in (answer.base, arm)]
    known = [value for value in seconds if value is not None]
    if not found.seeds or len(known) < 2:
        return ""
    more = (found.seeds - found.effect.n) * max(len(answer.sweep), 1) * sum(known)
    return f"; {found.seeds} seeds take {duration(more)} more"


def extended(command: str, seeds: int, fixed: bool = False) -> str:
    """The same study until it is decided, with at most so many seeds; or with as many, as a sweep needs them."""
    decided = "" if fixed else ", until_decided=True"
    if not command.startswith("vitmods compare"):
        plain = re.sub(r", (seeds|until_decided)=(\[[^]]*\]|\w+)", "", command)
        return re.sub(r"\)(\.run\()", rf", seeds={seeds}{decided})\1", plain, count=1)
    words = [word for word in shlex.split(command) if word != "--until-decided"]
    kept = without_options(words, ("--seeds", "--max-seeds", "--budget"))
    return shlex.join([*kept, *(["--seeds"] if fixed else ["--until-decided", "--max-seeds"]), str(seeds)])


def _deploy(answer: Answer, chosen: ArmAnswer) -> Iterator[Step]:
    if is_retrained(answer.path, chosen.name):
        folder = retrained_folder(answer.path, chosen.name)
        text = f"To deploy {chosen.name}, use the model that was trained on all images. {estimate_of(answer, chosen)}"
        yield Step(text, export_line(folder))
        return
    folders = [answer.path / trial.folder for trial in chosen.counted if trial.status == "finished"]
    kept = next((folder for folder in folders if not folder.is_dir() or is_there(folder / WEIGHTS)), None)
    name, any_seed = chosen.name, "pick a seed at random: the best test score is biased"
    again = bool(folders) and answer.complete
    if again:
        yield Step(
            f"To deploy {name}, train it on all images, including the test set. Its accuracy can then not be measured; "
            "use this study's score as the estimate.",
            retrain_command(answer.command, name),
        )
    if kept is not None:
        how = f"Or use a trial of this study; {any_seed}." if again else f"To deploy {name}, {any_seed}."
        yield Step(how, export_line(kept))
    elif folders and not again:
        yield Step(f"To deploy {name}, train it again: this study did not keep its weights.")
