"""After the study: the chosen arm once more, on all images."""

from __future__ import annotations

import shlex
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.stats.tables import with_unit
from vitmods.stats.verdict import Verdict
from vitmods.study.answer import Answer
from vitmods.study.arms import BASE
from vitmods.study.cells import Trial
from vitmods.study.grid import AS_IS, Point
from vitmods.study.results import ArmAnswer
from vitmods.study.settings import Settings, make_seeds
from vitmods.study.store import StudyFolder, StudyImages, read_object
from vitmods.tasks.base import DEFAULT, TASKS, Task
from vitmods.train.trial import MODULES, RESULT
from vitmods.util.address import named
from vitmods.util.errors import UserError, nearest
from vitmods.util.registry import plugin_options
from vitmods.util.remote import is_there
from vitmods.util.shorthand import without_options

if TYPE_CHECKING:
    from vitmods.study.executors import StudyOptions
    from vitmods.study.progress import Progress
    from vitmods.util.lease import Lease

BEST = "best"


@dataclass(frozen=True)
class Retrained:
    """A model that was trained on all images of a study; its own accuracy cannot be known.

    estimate: what the study says of its arm, in words
    result:   what result.json holds
    """

    arm: str
    folder: Path
    estimate: str
    result: dict[str, Any]

    @property
    def finished(self) -> bool:
        return bool(self.result["status"] == "finished")

    @property
    def images(self) -> str:
        """What it is trained on, in words."""
        with suppress(UserError):
            if (limit := read_object(self.folder / "config.json").get("images", {}).get("limit_train")) is not None:
                return f"val, test and the training images that limit_train={limit:g} leaves"
        return "all images"

    def __str__(self) -> str:
        if not self.finished:
            return f"{self.arm} on all images {self.result['status']}: {self.result['message']}"
        return (
            f"{self.arm} is trained on {self.images}: {named(self.folder)}\n"
            f"How good it is cannot be measured on images that it was trained on. {self.estimate}\n"
            f"To deploy it: {export_line(self.folder)}"
        )


@dataclass
class OneTrial:
    """A trial by itself, for an executor. failure: why it failed, or None."""

    trial: Trial
    progress: Progress
    lease: Lease
    failure: str | None = None
    _is_taken: bool = field(default=False, init=False)

    def take(self) -> Trial | None:
        if self._is_taken:
            return None
        self._is_taken = True
        self.progress.started(self.trial)
        return self.trial

    def ended(self, trial: Trial, failure: str | None) -> None:
        self.failure = failure

    def use_idle_core(self) -> bool:
        return False

    def waiting(self) -> None:
        self.lease.check()


def retrain_study(settings: Settings, path: Path, arm: str, seed: int, options: StudyOptions) -> Retrained:
    """Do what `Study.retrain` documents."""
    # They import torch, which a report does without.
    from vitmods.recipes.schedule import resolve_on
    from vitmods.study.executors.processes import get_template
    from vitmods.study.prepare import check_devices, threads_for
    from vitmods.study.progress import Progress
    from vitmods.study.run import make_executor, template_threads
    from vitmods.study.trial import TrialRunner

    folder = StudyFolder(path)
    path = folder.path
    folder.refresh()
    if folder.facts() is None:
        raise UserError(f"{named(folder.path)} is not a study yet: first run the same command without --retrain.")
    facts = folder.known_facts()
    settings = settings.continuing(facts.settings)
    recorded = {name: facts.settings[name] for name in ("images", "seeds")}
    folder.check_same_study({**settings.to_dict(), **recorded})
    if arm == BEST:  # which is of arms against base
        settings.refuse("retrain")
    if settings.sweep:
        raise UserError("--retrain does not support --sweep or several bases: run an ordinary study of the arm.")
    names = [BASE, *facts.settings["arms"]]
    if arm not in (*names, BEST):
        raise UserError(f"The study does not have an arm {arm!r}. {nearest(arm, [BEST, *names])}")
    options = replace(options, workers=1)
    check_devices(settings, options)
    with folder.lock() as lease, get_template(template_threads(options, 1)) as template:
        answer = Answer.load(path)
        if not answer.complete and (arm == BEST or settings.tune):
            raise UserError(
                f"{named(folder.path)} is not finished, so nothing is decided yet. First run: {answer.command}"
            )
        chosen = best_arm(answer) if arm == BEST and BEST not in names else arm_named(answer, arm)
        point = Point.from_dict(chosen.tuning.chosen or {}) if chosen.tuning else AS_IS
        cell = settings.cell(chosen.name, point=point).on_all_images()
        (seed,) = make_seeds([seed])
        trial, runner = Trial(cell, seed), TrialRunner(folder, settings.measure, replace(options, progress=False))
        images = runner.dataset(cell)
        if not folder.images.same_contents(images.splits):
            warnings.warn("The images are no longer those of the study, so its estimate may not hold.", stacklevel=3)
        steps = resolve_on(cell.recipe, images).steps
        progress = Progress(folder.trial, lambda _: steps, workers=1, quiet=not options.progress)
        source, out = OneTrial(trial, progress, lease), folder.trial(trial)
        try:
            make_executor(runner, settings, options, 1, threads_for(options, 0), template).run(source)
        finally:
            progress.close()
        if source.failure is not None:
            raise UserError(f"{chosen.name} on all images is not trained: {source.failure}")
        StudyImages(out).write(images.splits)  # all images are training images here
    return Retrained(chosen.name, out, estimate_of(answer, chosen), read_object(out / RESULT))


def arm_named(answer: Answer, name: str) -> ArmAnswer:
    return next(arm for arm in answer.every_arm if arm.name == name)


def best_arm(answer: Answer) -> ArmAnswer:
    """The cheapest of the arms that help and may be best; base where none helps."""
    helping = [arm for arm in answer.arms if arm.effect and arm.effect.verdict == Verdict.HELPS]
    helping.sort(key=lambda arm: -answer[arm.name].gain)
    best = [arm for arm in helping if arm.name in answer.decision.best] or helping
    return min(best, key=cost_of, default=answer.base)  # the first, of equal ones, has the largest effect


def cost_of(arm: ArmAnswer) -> float:
    """Time of training times that of inference, 1 being base's."""
    return round(arm.cost.infer_n.ratio * arm.cost.train_step.ratio, 2) if arm.cost else 1.0


def estimate_of(answer: Answer, arm: ArmAnswer) -> str:
    """Report the study's score of an arm, which was trained on fewer images."""
    if arm.mean is None:
        return "The study does not have a finished trial of it."
    metric = answer.metric
    seeds = sum(score is not None for score in arm.scores.values())
    text = f"The study's estimate, of trainings on its training images alone: {metric.shown(arm.mean)} {metric.title}"
    effect = f"; against {answer.base.name} {with_unit(arm.effect)}" if arm.effect else ""
    if arm.effect and arm.effect.expects:
        effect += f", of which {arm.effect.expects} is to be expected, since an arm that helps was lucky too"
    return f"{text} (mean of {seeds} {'seed' if seeds == 1 else 'seeds'}){effect}."


def uses_of(folder: Path, model: Path | None = None) -> dict[str, str]:
    """What a trial's model is used for -> the command; a task's modules and models of sequences are not exported.

    model: the folder that the model was written to; None: the trial's.
    """
    task, name = None, named(model or folder)
    with suppress(UserError):  # a damaged file, which the report names
        task = TASKS.get(read_object(folder / "config.json").get("task", DEFAULT))
    uses = {
        "export": ["export", name, "--to", "onnx"],
        "predict": ["predict", name, "path/to/images"],
        "evaluate": ["evaluate", name, "--data", "path/to/images"],
    }
    if task is not None and task.inputs != "images":
        uses = {"predict": ["predict", name, "path/to/sequences.txt"]}
    elif is_there(folder / MODULES):
        uses = {"predict": uses["predict"]}
        if task is not None and task.predictions is Task.predictions:  # features, for a task that follows
            uses = {"finetune": ["finetune", "--model", name, "--data", "path/to/images"]}
    return {use: shlex.join(["vitmods", *words, *plugin_options()]) for use, words in uses.items()}


def export_line(folder: Path) -> str:
    """The command that takes a trial's model further."""
    return next(iter(uses_of(folder).values()))


def retrain_command(command: str, arm: str) -> str:
    """The command or Python call of a study, as that which trains an arm on all images."""
    if not command.startswith("vitmods compare"):
        before, _, arguments = command.rpartition(".run(")
        return f"{before}.retrain({arguments.removesuffix(')')}, arm={arm!r})"
    return shlex.join([*without_options(shlex.split(command), ("--retrain", "--budget")), "--retrain", arm])
