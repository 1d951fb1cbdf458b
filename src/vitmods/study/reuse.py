"""Trials that another study has finished: found by what their numbers depend on, and copied instead of trained again.

config.json of a trial has a hash of all that decides its numbers (`vitmods.train.trial.identify`). A study looks for
its missing trials in the studies next to its folder, and in those that the user names. It copies their scores, metrics
and curves; weights only if a score has to be computed from them. reused.json names the study that trained a trial.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from vitmods.data.records import SPLITS
from vitmods.study.arms import BASE
from vitmods.study.cells import Trial
from vitmods.study.checkpoints import seeds_of
from vitmods.study.prepare import PreparedStudy, say
from vitmods.study.settings import VAL
from vitmods.study.state import REUSED, StudyState, read_rows, read_trial, shared_trials
from vitmods.study.store import WARNINGS, StudyFolder, read_object
from vitmods.study.trial import answer_splits, task_of, trial_scores
from vitmods.train.loop import METRICS
from vitmods.train.trial import CONFIG, EXAMPLES, MODULES, RESULT, WEIGHTS, decisive_settings, identify
from vitmods.util.address import address_of, named
from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, json_bytes, make_folder, similar_folder, write_atomically
from vitmods.util.limits import check_file, is_plain, open_file, parse_json, read_bytes
from vitmods.util.text import flatten, listing, plural, printable

SWITCH = "VITMODS_REUSE"
"""environment variable; 0: of other studies only those that are named are searched"""
NEAR = 8
"""settings in which a trial may differ that is named as the nearest one"""
NEAREST = 2000  # trials that are searched for it
MOST_EQUAL = 16  # trials of one id that are looked at
MOST_ENTRIES = 100_000  # files and folders of a folder
MOST_EXAMPLES = 100  # pictures of a trial
DEPTH = 4  # of a trial below `trials`
TOLERANCE = 5e-3  # by which two evaluations of one model may differ: rounding on a GPU moves single images
_EXAMPLES = f"{EXAMPLES}/examples.json"
_KINDS = {
    **dict.fromkeys((CONFIG, RESULT, WARNINGS, _EXAMPLES), "record"),
    **{f"{split}.json": "record" for split in SPLITS},
    **{f"{split}.npz": "scores" for split in SPLITS},
    METRICS: "scores",
}
"""the files of a trial that are copied, and what limits their size; the pictures of examples come to them"""
_KEPT = ("environment", "fitted_to_images")  # of config.json; all else is as this study would write it
_PANEL = re.compile(r"[\w-]{1,60}")
_ODD = (UserError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class FinishedTrial:
    """A trial of another study that has ended. owner: the user whose files it has to consist of; None: any, since the
    study was named."""

    study: StudyFolder
    folder: Path
    owner: int | None

    def read(self, name: str) -> bytes:
        """Read one of the files that are copied. Raises OSError, and ValueError for links, pipes, files of other users
        and too large ones."""
        try:
            if (self.folder / name).parent.is_symlink():
                raise ValueError("its folder is a link")
            with open_file(self.folder / name, _KINDS.get(name, "record"), self.owner, links=False) as file:
                return file.read()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def config(self) -> dict[str, Any]:
        """Read config.json. Raises one of _ODD."""
        return {**parse_json(self.read(CONFIG))}

    def contents(self) -> dict[str, bytes]:
        """Read all files that are copied. Raises one of _ODD."""
        names, contents = [*_KINDS], dict[str, bytes]()
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError):
                contents[name] = self.read(name)
            if name == _EXAMPLES and name in contents:
                for i, image in enumerate(parse_json(contents[name])["images"][:MOST_EXAMPLES]):
                    names += (f"{EXAMPLES}/{i}-{panel}.png" for panel in image["panels"] if _PANEL.fullmatch(panel))
        return contents


class Pool:
    """The trials that other studies have finished, by the hash of what their numbers depend on."""

    def __init__(self, study: PreparedStudy) -> None:
        """Raises UserError if a folder that is named does not hold a study."""
        self._study = study
        self._trials: dict[str, list[FinishedTrial]] = {}
        self._verdicts: dict[Path, bool | None] = {}
        self._refused: set[Path] = set()
        settings, is_recorded = study.settings, bool(study.options.record)  # what is recorded is not in every trial
        self._is_plain = settings.is_plain and not settings.tune
        only_named, refuse = settings.no_reuse or is_recorded, self._refuse
        for folder, owner in find_studies(study.runner.folder, settings.reuse, only_named, refuse):
            for path in _trials_in(folder.path / "trials", owner, refuse):
                trial = FinishedTrial(folder, path, owner)
                with _refusing(path, refuse):
                    if isinstance(name := trial.config().get("id"), str):
                        self._trials.setdefault(name, []).append(trial)

    def _refuse(self, folder: Path, reason: object) -> None:
        """Say once for each study why something of it is not reused."""
        above = next((parent for parent in folder.parents if parent.name == "trials"), folder / "trials").parent
        if above not in self._refused:
            self._refused.add(above)
            say(self._study.options, f"Not reused: {named(folder)}: {str(reason).rstrip('.')[:300]}.")

    def with_known_base(self, study: PreparedStudy) -> PreparedStudy:
        """Give a study that has not begun the trials of base, of the seeds 0, 1, ..., that are finished here."""
        settings = study.settings
        if not (self._trials and self._is_plain and study.runner.folder.facts() is None):
            return study
        cell = settings.cell(BASE)
        seeds = (cell.start and seeds_of(cell.start["source"])) or itertools.count()  # weights of several seeds are few
        base = (Trial(cell, seed) for number, seed in enumerate(seeds) if number == seed)
        count = sum(1 for _ in itertools.takewhile(lambda trial: self.find([trial]), base))
        return replace(study, settings=replace(settings, known=count))

    def find(self, trials: Iterable[Trial]) -> dict[Trial, FinishedTrial]:
        """Select the trials that are finished, whole, and have what the study needs of them."""
        matches = {}
        for trial in trials if self._trials else ():
            equal = self._trials.get(self._study.config(trial)["id"], ())[:MOST_EQUAL]
            if finished := next((other for other in equal if self._is_usable(trial, other)), None):
                matches[trial] = finished
        return matches

    def copy(self, state: StudyState, trials: Iterable[Trial] | None = None) -> None:
        """Copy the missing trials of a study, or some of them, that are finished elsewhere; its state reads them."""
        folder = state.folder
        for leftover in folder.path.glob("trials/**/seed*.tmp"):  # of a run that was killed while it copied
            shutil.rmtree(leftover, ignore_errors=True)
        wanted = state.missing if trials is None else trials
        finished = self.find(t for t in wanted if not (folder.trial(t) / CONFIG).exists())
        for trial, source in finished.items():
            if self._copy(source, trial):
                state.read_again(trial)
        if finished:
            say(self._study.options, shared_trials(state.records.values()))
        # A metric that its training did not measure is computed from the weights.
        reused = [trial for trial in state.missing if (folder.trial(trial) / REUSED).exists()]
        for trial, source in self.find(reused).items():
            for name in (WEIGHTS, MODULES):
                self._take_weights(source, name, folder.trial(trial) / name)

    def nearest(self, trials: Iterable[Trial]) -> Iterator[str]:
        """Yield, for arms whose trials are not found, the first setting in which the nearest trial differs."""
        finished = []
        for first, *_ in itertools.islice(self._trials.values(), NEAREST):
            with suppress(*_ODD):
                finished.append((_comparable(first.config()), first.study))
        reasons: dict[str, list[str]] = {}
        for trial in {trial.cell: trial for trial in trials}.values():
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

    def _is_usable(self, trial: Trial, other: FinishedTrial) -> bool:
        """Whether a finished trial is whole, of the same images, and has what the study asks for."""
        if other.folder not in self._verdicts:
            self._verdicts[other.folder] = None
            with _refusing(other.folder, self._refuse), TemporaryDirectory() as folder:
                self._verdicts[other.folder] = self._take(other, trial, Path(folder))
        has_score = self._verdicts[other.folder]
        return has_score or (has_score is not None and is_plain(other.folder / WEIGHTS, other.owner))

    def _take(self, source: FinishedTrial, trial: Trial, folder: Path) -> bool | None:
        """Copy a trial, without weights and TensorBoard files, and check the copy: whether it has its score. None: it
        is odd, or did not end."""
        here, copied = self._study.config(trial), dict[str, bytes]()
        with _refusing(source.folder, self._refuse):
            contents = source.contents()
            parsed = {name: _clean(parse_json(text)) for name, text in contents.items() if name.endswith(".json")}
            if odd := [name for name in parsed if name != WARNINGS and not isinstance(parsed[name], dict)]:
                raise ValueError(f"{odd[0]} is not a JSON object")
            if identify(_placed_like(dict(parse_json(contents[CONFIG])), here)) != here["id"]:
                raise ValueError(f"{CONFIG} describes another trial than its id names")
            parsed[CONFIG] = {**here, **{name: parsed[CONFIG][name] for name in _KEPT if name in parsed[CONFIG]}}
            parsed[RESULT] |= {"arm": trial.arm.name}
            parsed[REUSED] = {"schema": 1, "study": _place(self._study.runner.folder, source.study.path)}
            copied = {**contents, **{name: json_bytes(value) for name, value in parsed.items()}}
        with disk_errors(folder):
            for name, content in copied.items():
                make_folder((folder / name).parent)
                (folder / name).write_bytes(content)
        with _refusing(source.folder, self._refuse):
            return self._check(trial, folder) if copied else None
        return None

    def _check(self, trial: Trial, folder: Path) -> bool | None:
        """Whether a trial has its score; None: it did not end. Nothing is believed that is not computed again, as far
        as that is possible: its scores from those of its images. Raises one of _ODD for whatever is wrong."""
        runner, settings = self._study.runner, self._study.settings
        splits = (VAL,) if trial.for_tuning else answer_splits(settings, self._study.dataset)
        result, rows = read_object(folder / RESULT), [*read_rows(folder)]
        if result["status"] == "failed":
            return None
        numbers = [*(result[name] for name in ("steps", "epochs", "wall_s", "params")), *result["metrics"].values()]
        numbers += (value for row in rows for name, value in row.items() if name != "split")
        is_whole = len(read_bytes(folder / METRICS, "scores").splitlines()) == len(rows)
        is_whole &= result["split"] in SPLITS and isinstance(result["message"], str | None)
        if not (is_whole and all(map(math.isfinite, numbers))):
            raise ValueError(f"{RESULT} or {METRICS} is not as a trial writes it")
        record = read_trial(runner.folder, trial, splits, settings.measure, folder)
        if record.status == "damaged":
            raise ValueError(str(record.message).replace(f"{folder}/", ""))
        if record.status == "diverged":
            return True
        if result["status"] != "finished" or result["seed"] != trial.seed or rows[-1]["step"] != result["steps"]:
            raise ValueError(f"{METRICS} ends before the training")
        images = runner.dataset(trial.cell, trial.seed).splits
        for split in dict.fromkeys((VAL, *splits)):
            if split not in images:
                continue
            scores = {"ids": np.array(images[split].ids), **trial_scores(folder, split)}
            if len(scores) == 1 and type(task_of(trial.cell)).__module__.startswith("vitmods."):
                raise ValueError(f"{split}.npz is missing, so that its scores cannot be checked")
            if scores.pop("ids").tolist() != [*images[split].ids]:
                raise ValueError(f"{split}.npz is of images with other names")
            recorded = [row for row in rows if row.get("split") == split][-1:]
            recorded += [result["metrics"]] if result["split"] == split else []
            protocols = read_object(folder / f"{split}.json").get("protocols", {})
            recorded += [done["metrics"] for done in protocols.values()]
            labels, hits = images[split].labels, scores.get("top1")
            means = {
                name: np.nanmean(values) for name, values in scores.items() if values.shape == (len(images[split]),)
            }
            for name, value in ((name, value) for metrics in recorded for name, value in metrics.items()):
                if name in means and not abs(value - means[name]) <= TOLERANCE * max(1, abs(value)):
                    raise ValueError(f"{name} of {split} is {value}, and the mean of its images {means[name]}")
            is_told = hits is not None and labels.shape == scores.get("predicted", hits[:0]).shape
            if is_told and np.mean((scores["predicted"] == labels) != hits) > TOLERANCE:
                raise ValueError(f"top1 in {split}.npz is not that of the predictions")
        return record.ended

    def _copy(self, source: FinishedTrial, trial: Trial) -> bool:
        """Copy a trial in one step, under the arm's name in this study. False: it has changed and is odd by now."""
        target = self._study.runner.folder.trial(trial)
        temporary = target.with_name(f"{target.name}.tmp")
        try:
            if self._take(source, trial, temporary) is None:
                return False
            with disk_errors(target):
                shutil.rmtree(target, ignore_errors=True)
                temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return True

    def _take_weights(self, source: FinishedTrial, name: str, target: Path) -> None:
        """Give the user's own weights a second name; copy those of other users, and to another disk."""
        path = source.folder / name
        if target.exists() or not target.parent.exists() or not is_plain(path, source.owner):
            return
        with disk_errors(target), open_file(path, "weights", source.owner, links=False) as file:
            status = os.fstat(file.fileno())
            if status.st_size > self._study.trial_bytes:
                self._refuse(source.folder, f"{name} is larger than the memory of a trial")
                return
            if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_ISUID | stat.S_ISGID):
                with suppress(OSError):
                    os.link(path, target, follow_symlinks=False)
                    return
            write_atomically(target, lambda out: shutil.copyfileobj(file, out))


def find_studies(
    folder: StudyFolder,
    named_studies: Iterable[str] = (),
    only_named: bool = False,
    refuse: Callable[[Path, object], None] = lambda path, reason: None,
) -> list[tuple[StudyFolder, int | None]]:
    """Find the studies whose trials may be reused: those that are named, or in a folder that is named, and the user's
    own next to a study's folder. Studies that a run works in are left out.

    refuse: gets a study that is odd, with the reason. Returns each with the user whose files count; None: all.
    Raises UserError if a name is not that of a study.
    """
    studies: list[tuple[StudyFolder, int | None]] = []
    for name in named_studies:
        study = StudyFolder(name)
        study.refresh()
        inside = [study] if study.facts() else _studies_in(study.path)
        if not inside:
            raise UserError(f"{name} does not hold a study whose trials could be reused. {similar_folder(study.path)}")
        studies += ((study, None) for study in inside)
    if not only_named and os.environ.get(SWITCH) != "0" and str(folder.path) != os.devnull:
        parent, user, others = folder.path.absolute().parent, os.geteuid(), 0
        for study in _studies_in(parent):
            with _refusing(study.path, refuse):
                if {study.path.lstat().st_uid, study.path.stat().st_uid} != {user}:
                    others += 1
                    continue
                check_file(study.settings_file, "settings", user, links=False)
                studies.append((study, user))
        if others:
            whose = f"{plural(others, 'study', 'studies')} of other users; name those that you trust with --reuse"
            refuse(parent, whose)
    unique = {study.path.resolve(): (study, owner) for study, owner in reversed(studies)}
    unique.pop(folder.path.resolve(), None)
    idle = []
    for study, owner in reversed(unique.values()):
        with _refusing(study.path, refuse):
            if not study.is_at_work():
                idle.append((study, owner))
    return idle


def _studies_in(path: Path) -> list[StudyFolder]:
    return [StudyFolder(file.parent) for file in sorted(path.glob("*/study.json"))]


@contextmanager
def _refusing(path: Path, refuse: Callable[[Path, object], None]) -> Iterator[None]:
    try:
        yield
    except _ODD as error:
        refuse(path, error)


def _trials_in(
    folder: Path, owner: int | None, refuse: Callable[[Path, object], None], depth: int = DEPTH
) -> Iterator[Path]:
    """Yield the folders with a result below one, which are no links."""
    try:
        with os.scandir(folder) as listed:
            entries = sorted(itertools.islice(listed, MOST_ENTRIES), key=lambda entry: entry.name)
        if owner is not None and os.stat(folder).st_uid != owner:
            raise ValueError("it is another user's folder")
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        refuse(folder, error)
        return
    if any(entry.name == RESULT for entry in entries):
        yield folder
    elif depth:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _trials_in(Path(entry.path), owner, refuse, depth - 1)
            elif entry.is_symlink():
                refuse(Path(entry.path), f"{entry.name} is a link")


def _placed_like(config: dict[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Give a trial's config the place of the images here, if they are files: theirs may be gone, or elsewhere."""
    if not os.path.exists(str(here["images"].get("data"))):
        return config
    return {**config, "images": {**config["images"], "data": here["images"]["data"]}}


def _clean(value: Any) -> Any:
    """Escape control characters in what is copied of a file."""
    if isinstance(value, dict):
        return {printable(name): _clean(item) for name, item in value.items()}
    return printable(value) if isinstance(value, str) else [*map(_clean, value)] if isinstance(value, list) else value


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten what a trial's numbers depend on, except for its seed."""
    settings = flatten(decisive_settings(config))
    return {name: value for name, value in settings.items() if name != "seed"}


def _place(study: StudyFolder, other: str | Path) -> str:
    """Return the address of another study, or its path relative to this one."""
    address = str(other) if "://" in str(other) else address_of(Path(other))
    if address or address_of(study.path):
        return address or os.path.abspath(other)
    return os.path.relpath(other, study.path)
