"""Stages of a study: tables of which each is trained before the next is known, or one for each data set.

A study that is pre-trained has two stages: base and every arm are trained without labels in `out/pretraining`, and
then compared from these weights. A study over data sets has a table in a folder of its own for each.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from vitmods.recipes.recipe import fields_by_name
from vitmods.recipes.registry import RECIPES, evidence
from vitmods.stats import tables
from vitmods.stats.settings import OverSettings
from vitmods.stats.verdict import Effect
from vitmods.study.answer import Answer
from vitmods.study.arms import BASE
from vitmods.study.defaults import RecipeChoice
from vitmods.study.estimate import Estimate
from vitmods.study.executors import StudyOptions
from vitmods.study.grid import make_grid
from vitmods.study.prepare import open_study, say
from vitmods.study.settings import Settings
from vitmods.study.store import StudyFolder, read_object, slug
from vitmods.study.tables import over_studies
from vitmods.study.trial import already_reported
from vitmods.tasks.base import TASKS, WITHOUT_LABELS
from vitmods.util.address import address_of, named, place
from vitmods.util.errors import UserError
from vitmods.util.files import write_json
from vitmods.util.shorthand import read_settings, split_form
from vitmods.util.text import duration, listing

PRETRAINING = "pretraining"
"""the first stage's folder, in that of the study"""


class Stage(Protocol):
    """A `Study` of one table."""

    settings: Settings

    def run(self, out: Path, *, options: StudyOptions, command: str | None) -> Any:
        """Train what is missing in a folder; returns its `Answer`."""

    def dry_run(self, out: Path | None, *, options: StudyOptions, command: str | None) -> Any:
        """Return its `Estimate`."""


@dataclass(frozen=True)
class TwoStages:
    """The stages of a study that is pre-trained.

    first:        trains base and every arm without labels
    from_scratch: the settings with new weights, which are checked before the first stage trains
    from_weights: makes the study that starts from the weights of a folder
    as_long:      makes the study of new weights that trains as long as from trained ones, for estimates
    """

    first: Stage
    from_scratch: Settings
    from_weights: Callable[[Path], Stage]
    as_long: Callable[[], Stage]
    option: ClassVar = "--pretrain"

    def run(self, out: Path, options: StudyOptions, command: str | None) -> Answer:
        """Run the first stage, and then the study from its weights; the first stage's answer if it is not complete.

        Raises UserError before the first stage trains if its weights would not suit the second, and after it if a trial
        has none.
        """
        _check_second_stage(self.from_scratch, out, options)
        folder = out / PRETRAINING
        keeping = replace(options, keep_weights="all")  # the second stage starts from them
        before: Answer = self.first.run(folder, options=keeping, command=command)
        if not before.complete:
            return before
        report = named(before.report())
        if lost := [trial for trial in before.trials if trial.status != "finished"]:
            trials = "; ".join(f"{trial} ({trial.status})" for trial in lost)
            remedy = "" if BASE in {trial.arm for trial in lost} else ", or leave these arms out"
            raise UserError(
                f"These trials of the first stage have no weights to start from: {trials}. Choose other settings in "
                f"--pretrain{remedy}, and another --out. Report: {report}"
            )
        say(options, f"The first stage is complete: {report}")
        answer: Answer = self.from_weights(folder).run(out, options=options, command=command)
        return answer

    def estimate(self, out: Path | None, options: StudyOptions, command: str | None) -> Estimates:
        """Estimate both stages without writing a file."""
        if out is not None:
            _check_second_stage(self.from_scratch, out, options)
        folder = out and out / PRETRAINING
        first: Estimate = self.first.dry_run(folder, options=options, command=command)
        if first.total_s or folder is None:  # the same models with new weights: a step takes as long
            is_another = out is not None and StudyFolder(out).facts()  # that of trained weights
            second = self.as_long().dry_run(None if is_another else out, options=options, command=command)
        else:
            second = self.from_weights(folder).dry_run(out, options=options, command=command)
        return Estimates({f"Pre-training ({self.first.settings.fixed['task']})": first, "Then": second})


@dataclass(frozen=True, repr=False)
class AnswerOverData:
    """The answers of a study over data sets. Prints itself as their tables; `answer["dpn"]` is an average effect.

    answers: data set -> its answer
    over:    averages, the effects on each data set, and whether they differ
    path:    the folder that has the studies, and over_data.json
    looks:   other collections of data sets whose average was shown in this folder before
    """

    answers: Mapping[str, Answer]
    over: OverSettings
    path: Path
    looks: tuple[tuple[str, ...], ...] = ()

    def __getitem__(self, arm: str) -> Effect:
        return self.over[arm]

    def __repr__(self) -> str:
        each = [f"{arm} on each data set:\n{tables.text([*by_set.values()])}" for arm, by_set in self.over.each.items()]
        count = len(self.answers) - len(self.over.left_out)
        over = f"On average over {count} data sets:\n{self.over}" if count > 1 else "\n".join(self.over.decision.notes)
        parts = [*each, over]
        if self.looks:
            parts.append(
                f"The average was shown before over {'; '.join(map(listing, self.looks))}. Sets that are chosen or "
                "added after an average was seen make a false verdict on it likelier, which these intervals do not "
                "count (docs/sweeps.md): name all of them at the start."
            )
        return "\n\n".join(parts)

    @property
    def complete(self) -> bool:
        """Whether every trial has been run."""
        return all(answer.complete for answer in self.answers.values())

    @property
    def has_diverged(self) -> bool:
        """Whether every trial of base on one of the data sets diverged."""
        return any(answer.has_diverged for answer in self.answers.values())

    @property
    def failed(self) -> list[str]:
        """A line for each trial that failed in the last run, or is damaged."""
        return [f"{name}: {line}" for name, answer in self.answers.items() for line in answer.failed]

    def report(self) -> list[Path]:
        """Write the report of each data set; returns the paths."""
        return [answer.report() for answer in self.answers.values()]


@dataclass(frozen=True)
class Estimates:
    """The estimates of a study of several stages, or over data sets, by their titles."""

    stages: Mapping[str, Estimate]

    @property
    def total_s(self) -> float:
        """Seconds of training in all stages."""
        return sum(estimate.total_s for estimate in self.stages.values())

    def __str__(self) -> str:
        each = [f"{title}:\n{estimate}" for title, estimate in self.stages.items()]
        return "\n\n".join([*each, f"In all: about {duration(self.total_s)}."])


def read_pretraining(text: str) -> tuple[str, RecipeChoice, str | None]:
    """Read the task, the recipe and the metric of a first stage: a task without labels or one of its recipes, as
    `dino` or `beit(epochs=50,codes=512)`. Raises UserError for other names and settings."""
    name, inside = split_form(text) or (text, "")
    task = name if name in TASKS else evidence(name).task if name in RECIPES else None
    tasks = [other for other in TASKS if TASKS[other].target in WITHOUT_LABELS]
    if task is None or task not in tasks:
        raise UserError(
            f"--pretrain is a task without labels ({', '.join(tasks)}) or one of its recipes, not '{name}'."
        )
    chosen = read_settings(name, "recipe", inside, dict.fromkeys((*fields_by_name(), "metric"), str))
    metric = chosen.pop("metric", None)
    for field, value in chosen.items():
        text = "none" if value == "None" else value.strip("()").replace(",", ":")  # (0.1,0.4)
        chosen |= make_grid({field: [text]}, "--pretrain").points[0].values
    return task, RecipeChoice(None if name in TASKS else name, chosen), metric


def _check_second_stage(settings: Settings, out: Path, options: StudyOptions) -> None:
    if address_of(place(out)):
        raise UserError(f"--pretrain does not support addresses such as {out}: choose a folder on this disk.")
    folder = StudyFolder(out)
    folder.check_place(settings.fixed["data"])
    if not folder.facts():
        with already_reported():
            open_study(StudyFolder(os.devnull), settings, options)


@dataclass(frozen=True)
class OverData:
    """The study of each data set of a sweep over data."""

    studies: Mapping[str, Stage]
    option: ClassVar = "--sweep data=..."

    def run(self, out: Path, options: StudyOptions, command: str | None) -> AnswerOverData:
        """Run the study of each data set, all of which are checked before the first one, and average over them."""
        for name, study in self.studies.items():
            with warnings.catch_warnings():  # which come again
                warnings.simplefilter("ignore")
                open_study(StudyFolder(out / slug(name)), study.settings, replace(options, progress=False))
        answers: dict[str, Answer] = {}
        file = out / "over_data.json"
        if not file.exists():  # by which the studies know that they are one
            out.mkdir(parents=True, exist_ok=True)
            write_json(file, {"shown": []})
        for name, study in self.studies.items():
            say(options, f"{name}:")
            answers[name] = study.run(out / slug(name), options=options, command=command)
        over = over_studies(answer.path for answer in answers.values())
        shown = [tuple(map(str, sets)) for sets in read_object(file).get("shown", ()) if isinstance(sets, list)]
        found = AnswerOverData(answers, over, out, tuple(sets for sets in shown if {*sets} != {*self.studies}))
        now = [tuple(self.studies)] * found.complete
        write_json(file, {**over.to_dict(), "shown": [*dict.fromkeys([*shown, *now])]})
        return found

    def estimate(self, out: Path | None, options: StudyOptions, command: str | None) -> Estimates:
        """Estimate the study of each data set without writing a file."""
        return Estimates(
            {
                name: study.dry_run(out and out / slug(name), options=options, command=command)
                for name, study in self.studies.items()
            }
        )
