"""Trials that another study has finished: found by what their numbers depend on, and copied instead of trained again.

config.json of a trial has a hash of all that decides its numbers (`vitmods.train.trial.identify`). A study looks for
its missing trials in the studies next to its folder, and in those that the user names. It copies their scores, metrics
and curves; weights only if a score has to be computed from them. reused.json names the study that trained a trial.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitmods.stats.sequential import LOOKS
from vitmods.study.arms import BASE
from vitmods.study.checkpoints import seeds_of
from vitmods.study.plan import VAL, Trial
from vitmods.study.prepare import PreparedStudy, say
from vitmods.study.state import REUSED, StudyState, read_trial, shared_trials
from vitmods.study.store import StudyFolder, read_object
from vitmods.study.trial import answer_splits, trial_scores
from vitmods.train.loop import METRICS
from vitmods.train.trial import CONFIG, MODULES, RESULT, WEIGHTS, decisive_settings
from vitmods.util.address import address_of, named
from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, make_folder, similar_folder, write_json
from vitmods.util.limits import parse_json
from vitmods.util.text import flatten, listing

SWITCH = "VITMODS_REUSE"
"""environment variable; 0: of other studies only those that are named are searched"""
NEAR = 8
"""settings in which a trial may differ that is named as the nearest one"""
_NOT_COPIED = shutil.ignore_patterns(CONFIG, RESULT, REUSED, "*.safetensors", "*.pt", "*.tmp", "tb", ".*")


@dataclass(frozen=True)
class FinishedTrial:
    """A trial of another study that has ended."""

    study: StudyFolder
    folder: Path
    config: Mapping[str, Any]


class Pool:
    """The trials that other studies have finished, by the hash of what their numbers depend on."""

    def __init__(self, study: PreparedStudy) -> None:
        """Raises UserError if a folder that is named does not hold a study."""
        self._study = study
        self._trials: dict[str, list[FinishedTrial]] = {}
        settings, is_recorded = study.settings, bool(study.options.record)  # what is recorded is not in every trial
        self._is_plain = not (settings.tune or settings.sweep or settings.design or settings.folds)
        for folder in find_studies(study.runner.folder, settings.reuse, settings.no_reuse or is_recorded):
            for result in sorted(folder.path.glob(f"trials/**/{RESULT}")):
                with suppress(UserError):  # a damaged trial
                    config = read_object(result.with_name(CONFIG))
                    if config.get("id"):
                        self._trials.setdefault(config["id"], []).append(FinishedTrial(folder, result.parent, config))
        self.count_known()

    def count_known(self) -> None:
        """Set how many trials of base, of the seeds 0, 1, ..., are finished here, for a study that has not begun."""
        settings, runner = self._study.settings, self._study.runner
        if self._trials and self._is_plain and runner.folder.facts() is None:
            start = settings.fixed.get("start")
            seeds = (start and seeds_of(start["source"])) or itertools.count()  # weights of several seeds are few
            base = (Trial(settings.arm(BASE), seed) for number, seed in enumerate(seeds) if number == seed)
            count = sum(1 for _ in itertools.takewhile(lambda trial: self.find([trial]), base))
            runner.settings = replace(settings, known=count)

    def find(self, trials: Iterable[Trial]) -> dict[Trial, FinishedTrial]:
        """Select the trials that are finished, whole, and have what the study needs of them."""
        matches = {}
        for trial in trials if self._trials else ():
            equal = self._trials.get(self._study.config(trial)["id"], ())
            if finished := next((other for other in equal if self._is_usable(trial, other.folder)), None):
                matches[trial] = finished
        return matches

    def analyzed(self) -> int:
        """Return with how many seeds of its arms, fewer than this study has, another study has shown verdicts first; 0
        if none has, or only at the looks of this study."""
        settings, first = self._study.settings, 0
        for arm in settings.arms if self._is_plain else ():
            finished = self.find(Trial(arm, seed) for seed in settings.seeds).values()
            for study, seeds in Counter(trial.study for trial in finished).items():
                with suppress(UserError):  # of another version
                    plan, count = study.known_facts().plan, len(settings.seeds)
                    looked = min(LOOKS[0], seeds) if plan.until_decided else plan.seeds
                    has_same_looks = settings.until_decided and plan.until_decided and plan.seeds == count
                    if looked <= seeds and looked < count and not has_same_looks:
                        first = max(first, looked)
        return first

    def copy(self, state: StudyState) -> None:
        """Copy the missing trials of a study that are finished elsewhere, and let its state read them."""
        folder = state.folder
        finished = self.find(t for t in state.missing if not (folder.trial(t) / CONFIG).exists())
        for trial, source in finished.items():
            self._copy(source, trial)
            state.read_again(trial)
        if finished:
            say(self._study.options, shared_trials(state.records.values()))
        # A metric that its training did not measure is computed from the weights.
        reused = [trial for trial in state.missing if (folder.trial(trial) / REUSED).exists()]
        for trial, source in self.find([*reused, *(finished if state.settings.same_seeds else ())]).items():
            for name in (WEIGHTS, MODULES):
                if (source.folder / name).exists() and not (folder.trial(trial) / name).exists():
                    _link(source.folder / name, folder.trial(trial) / name)

    def nearest(self, trials: Iterable[Trial]) -> Iterator[str]:
        """Yield, for arms whose trials are not found, the first setting in which the nearest trial differs."""
        finished = [(_comparable(other.config), other.study) for other, *_ in self._trials.values()]
        reasons: dict[str, list[str]] = {}
        for trial in {(trial.setting, trial.point, trial.arm.name): trial for trial in trials}.values():
            wanted = _comparable(self._study.config(trial))
            differing = [
                ([name for name in {**wanted, **other} if wanted.get(name) != other.get(name)], other, study)
                for other, study in finished
                if other["changes"] == wanted["changes"]
            ]
            counts = [len(names) for names, *_ in differing]
            if 0 < min(counts, default=0) <= NEAR:
                names, other, study = differing[counts.index(min(counts))]
                text = f"{names[0]} is {wanted.get(names[0])!r} here and {other.get(names[0])!r} in {named(study.path)}"
                reasons.setdefault(text, []).append(trial.arm.name)
        for text, arms in reasons.items():
            yield f"Not reused, {listing(list(dict.fromkeys(arms)))}: {text}."

    def _is_usable(self, trial: Trial, path: Path) -> bool:
        """Whether a finished trial is whole, of the same images, and has what the study asks for."""
        runner, settings = self._study.runner, self._study.settings
        splits = (VAL,) if settings.for_tuning(trial) else answer_splits(settings, self._study.dataset)
        record = read_trial(runner.folder, trial, splits, settings.measure, path)
        try:
            recipe, result = settings.at(trial.setting).recipe_of(trial.arm, trial.point), read_object(path / RESULT)
            rows = [parse_json(line) for line in (path / METRICS).read_text(encoding="utf-8").splitlines()]
            is_cut = result["status"] == "finished" and rows[-1]["step"] != result["steps"]
            if is_cut or record.status == "damaged" or result["status"] not in ("finished", "diverged"):
                return False
            images = runner.dataset(recipe, trial.setting, trial.seed).splits
            for split in splits:
                scores = trial_scores(path, split)
                if scores and scores["ids"].tolist() != [*images[split].ids]:
                    return False
        except (UserError, OSError, ValueError, LookupError, TypeError):
            return False
        is_evaluated = record.ended and not settings.same_seeds
        return is_evaluated or (result["status"] == "finished" and (path / WEIGHTS).exists())

    def _copy(self, source: FinishedTrial, trial: Trial) -> None:
        """Copy a trial in one step, under the arm's name in this study; without weights and TensorBoard files."""
        study, here = self._study.runner.folder, self._study.config(trial)
        target = study.trial(trial)
        temporary = target.with_name(f"{target.name}.tmp")
        with disk_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)
            make_folder(target.parent)
            shutil.copytree(source.folder, temporary, ignore=_NOT_COPIED)
        places = {name: here[name] for name in ("arm", "images", "start", "data") if name in here}
        write_json(temporary / CONFIG, {**source.config, **places})
        write_json(temporary / RESULT, {**read_object(source.folder / RESULT), "arm": trial.arm.name})
        origin = read_object(source.folder / REUSED).get("study")
        origin = os.path.normpath(source.study.path / origin) if origin and "://" not in origin else origin
        write_json(temporary / REUSED, {"schema": 1, "study": _place(study, origin or source.study.path)})
        with disk_errors(target):
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)


def find_studies(folder: StudyFolder, named_studies: Iterable[str] = (), only_named: bool = False) -> list[StudyFolder]:
    """Find the studies whose trials may be reused: those that are named, or in a folder that is named, and those next
    to a study's folder. Studies that a run works in are left out.

    Raises UserError if a name is not that of a study.
    """
    studies = []
    for name in named_studies:
        study = StudyFolder(name)
        study.refresh()
        inside = [study] if study.facts() else _studies_in(study.path)
        if not inside:
            raise UserError(f"{name} does not hold a study whose trials could be reused. {similar_folder(study.path)}")
        studies += inside
    if not only_named and os.environ.get(SWITCH) != "0" and str(folder.path) != os.devnull:
        studies += _studies_in(folder.path.absolute().parent)
    unique = {study.path.resolve(): study for study in reversed(studies)}
    unique.pop(folder.path.resolve(), None)
    return [study for study in reversed(unique.values()) if not study.is_at_work()]


def _studies_in(path: Path) -> list[StudyFolder]:
    return [StudyFolder(file.parent) for file in sorted(path.glob("*/study.json"))]


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten what a trial's numbers depend on, except for its seed."""
    settings = flatten(decisive_settings(config))
    return {name: value for name, value in settings.items() if name != "seed"}


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it to another disk."""
    with disk_errors(target):
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _place(study: StudyFolder, other: str | Path) -> str:
    """Return the address of another study, or its path relative to this one."""
    address = str(other) if "://" in str(other) else address_of(Path(other))
    if address or address_of(study.path):
        return address or os.path.abspath(other)
    return os.path.relpath(other, study.path)
