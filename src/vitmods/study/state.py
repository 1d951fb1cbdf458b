"""The state of a study's folder: how every trial ended, which points are chosen, and what every trial scored."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitmods.study.arms import BASE, Arm
from vitmods.study.cells import MOST_SEEDS, Trial, images_key
from vitmods.study.grid import AS_IS, Grid, Point, choose
from vitmods.study.ledger import (
    Earlier,
    ShownTable,
    earlier_looks,
    enter,
    identities,
    is_own,
    ledger_of,
    ledgers_of,
    read_ledgers,
)
from vitmods.study.settings import VAL, Measure, Settings, options_from
from vitmods.study.store import Facts, StudyFolder, read_object, read_warnings
from vitmods.train.trial import WEIGHTS, read_scores
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.limits import parse_json, read_bytes
from vitmods.util.text import listing, plural, printable

Status = Literal["finished", "diverged", "failed", "damaged", "unfinished"]
NLL = "nll"  #: shown with any metric, if it is known of each image
REUSED = "reused.json"  #: in a trial that another study has trained: which one
HIDDEN = {"json": False}  # of a field that results.json leaves out


@dataclass(frozen=True)
class Curve:
    """The validation scores of one trial during training; all have the same length."""

    step: tuple[int, ...] = ()
    wall_s: tuple[float, ...] = ()
    score: tuple[float, ...] = ()


@dataclass(frozen=True)
class ImageScores:
    """A trial's score on each image, float64 (n,), and a digest of which images these are."""

    images: str
    values: NDArray[np.float64]


@dataclass(frozen=True)
class TrialRecord:
    """The state of a trial on the splits that it is read for.

    status:  `finished` with its metric known, `diverged`, `failed` (the next run tries again), `damaged` (a file of it
             cannot be read), or `unfinished`
    folder:  below the study's
    point:   values of the recipe fields that are tuned
    setting: values that a sweep sets
    steps_to_base: after how many steps its score on val first reached base's final mean; None: never, or unknown
    metrics: over all images of the splits if they are means over images, else of the last split
    constant: whether it predicts a single class for all images, as far as predictions are known
    images:  the study's metric of each image; None: it is not a mean over images
    counted: whether the answer counts its score; trials that only chose a point do not
    reused:  the study that trained it, if it is another one
    """

    arm: str
    seed: int
    status: Status
    folder: str
    point: Mapping[str, Any] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    wall_s: float | None = None
    message: str | None = None
    warnings: tuple[str, ...] = ()
    steps_to_base: int | None = None
    constant: bool = False
    reused: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict, metadata=HIDDEN)
    curve: Curve = field(default=Curve(), metadata=HIDDEN)
    counted: bool = field(default=True, metadata=HIDDEN)
    images: ImageScores | None = field(default=None, metadata=HIDDEN)

    def __str__(self) -> str:
        places = (str(Point.from_dict(self.setting)), self.arm, str(Point.from_dict(self.point)))
        return ", ".join(filter(None, (*places, f"seed {self.seed}")))

    @property
    def ended(self) -> bool:
        """Whether it has an outcome, so that no run repeats it."""
        return self.status in ("finished", "diverged")

    @property
    def for_tuning(self) -> bool:
        """As of its `Trial`."""
        return self.seed >= MOST_SEEDS

    def score(self, metric: str) -> float | None:
        return self.metrics.get(metric) if self.status == "finished" else None


@dataclass(frozen=True)
class Selection:
    """The points of an arm under one setting, and the one that validation chooses.

    scores: point -> seed -> the metric on val; None if the trial diverged or has not ended
    chosen: the best point once all trials have ended, else None; without tuning, the recipe as it is
    """

    arm: Arm
    setting: Point
    scores: Mapping[Point, Mapping[int, float | None]]
    chosen: Point | None


@dataclass(frozen=True)
class Evaluated:
    """The images, seeds and arms that a study's answer covers.

    splits:  test, or val and test together
    constant: metric -> the score of the best constant prediction, as far as it is known
    groups:  (n,) the group of each image; None: every image is its own group
    sizes:   with folds, the images that a trial is tested on and trained on; None: all trials share their images
    fingerprints: `images_key` -> the images that trials are trained on
    level:   setting -> what a linear probe of the weights that base starts from reaches, as far as it is known
    created: when the study was
    """

    splits: tuple[str, ...]
    constant: Mapping[str, float] = field(default_factory=dict)
    groups: NDArray[Any] | None = None
    sizes: tuple[int, int] | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    level: Mapping[str, float] = field(default_factory=dict)
    created: str = ""


def evaluated_of(folder: StudyFolder, facts: Facts) -> Evaluated:
    """Return what the answer of a study covers."""
    constant = facts.data.get("constant", {})
    frozen = facts.data.get("frozen", {}).items()
    level = {name: scores["probe"] for name, scores in frozen if isinstance(scores.get("probe"), float)}
    counts = {split: entry["count"] for split, entry in facts.data["splits"].items()}
    if facts.settings.get("folds"):
        sizes = counts["test"], counts["train"]
        return Evaluated(facts.splits, constant, None, sizes, facts.fingerprints, level, facts.created)
    groups = folder.images.groups({split: counts[split] for split in facts.splits})
    return Evaluated(facts.splits, constant, groups, None, facts.fingerprints, level, facts.created)


class StudyState:
    """The folder of a study, read once; `read_again` after a trial has ended.

    images:     that the answer is about; `splits` for short
    tried:      the trials that points are chosen by, on val; empty without tuning
    selections: (setting, arm's name) -> its points and the chosen one, base first
    answered:   the planned trials of the chosen points, on the splits; seed by seed, base first
    matched:    likewise, those of base at the points that arms chose and base did not
    """

    @classmethod
    def of(cls, folder: StudyFolder, facts: Facts, settings: Settings | None = None) -> StudyState:
        """The state of a study that has begun, on the splits that its answer is about; `settings`: with other seeds or
        arms than its facts have."""
        return cls(folder, settings or facts.study(), evaluated_of(folder, facts))

    def __init__(self, folder: StudyFolder, settings: Settings, images: Evaluated):
        self.folder, self.settings, self.images, self.splits = folder, settings, images, images.splits
        self.tried = {trial: self._read(trial) for trial in settings.tuning_trials()}
        self.answered: dict[Trial, TrialRecord] = {}
        self.matched: dict[Trial, TrialRecord] = {}
        self._choose()

    def trial(self, setting: Point, arm: str, seed: int) -> Trial | None:
        """The trial that an arm is answered by; None before its point is chosen."""
        chosen = self.selections[setting, arm].chosen
        return None if chosen is None else Trial(self.settings.cell(arm, setting, chosen), seed)

    def matched_to(self, setting: Point, arm: str, seed: int) -> Trial | None:
        """The trial of base at the point that an arm chose; None if base chose the same, or before both are chosen.

        An arm whose point is better than base's, by the luck of the choice, would seem to help: it has to beat base at
        that point too.
        """
        own, base = self.trial(setting, arm, seed), self.trial(setting, BASE, seed)
        apart = own and base and own.point != base.point and self.settings.design.tunes_base
        return Trial(self.settings.cell(BASE, setting, own.point), seed) if own and apart else None

    def arms_of(self, trial: Trial) -> set[str]:
        """The arms that a trial is for: its own, or those at whose point base is trained."""
        if trial not in self.matched:
            return {trial.arm.name}
        return {a.name for a in self.settings.arms if self.matched_to(trial.setting, a.name, trial.seed) == trial}

    def read_again(self, trial: Trial) -> None:
        """Take in what happened to a trial."""
        for trials in (self.tried, self.answered, self.matched):
            if trial in trials:
                trials[trial] = self._read(trial)
        if trial.for_tuning:
            self._choose()

    @property
    def records(self) -> dict[Trial, TrialRecord]:
        """Every planned trial; those that the answer counts are read on its splits."""
        return {**self.tried, **self.answered, **self.matched}

    @property
    def unchosen(self) -> list[Trial]:
        """Planned trials whose point is not chosen yet; each has that of the recipe."""
        open_ones = product((s for s in self.selections.values() if s.chosen is None), self.settings.seeds)
        cells = ((self.settings.cell(one.arm.name, one.setting), seed) for one, seed in open_ones)
        return [Trial(cell, seed) for cell, seed in cells]

    @property
    def missing(self) -> list[Trial]:
        """Planned trials without an outcome; of a study that runs until it is decided, up to its maximum."""
        return [trial for trial, record in self.records.items() if not record.ended]

    def table(self) -> ShownTable | None:
        """The table that the study shows now, for the ledger; None where no trial has ended or is known by its
        settings."""
        settings, cells, images = self.settings, dict[str, set[str]](), set[str]()
        for trial, record in self.answered.items():
            with suppress(UserError, AttributeError, KeyError, TypeError, ValueError):  # a damaged trial
                if record.ended:
                    cell, tested = identities(read_object(self.folder.trial(trial) / "config.json"))
                    cells.setdefault(trial.arm.name, set()).add(cell)
                    images.add(tested)
        hashes = {name: tuple(sorted(found)) for name, found in cells.items()}
        base = hashes.pop(BASE, ())
        if not base or (settings.arms and not hashes):
            return None
        # Looks of a study that runs until it is decided follow the order of its seeds.
        seeds = settings.seeds if settings.until_decided else sorted(settings.most_seeds)
        return ShownTable(
            f"{self.images.created} {self.folder.path.name}", str(settings.measure), float(settings.margin),
            settings.generalize, settings.until_decided, tuple(seeds),
            tuple(sorted({*seeds, *settings.seeds_of(BASE)})),
            bool(settings.spare), settings.compared, tuple(sorted(images)), base, hashes,
            len(settings.sweep.points),
        )  # fmt: skip

    @cached_property
    def earlier(self) -> Earlier:
        """What was shown before of these trials, by the ledgers beside this study and those that shared trials."""
        table, shared = self.table(), (Path(record.reused) for record in self.records.values() if record.reused)
        places = dict.fromkeys(place for path in (self.folder.path, *shared) for place in ledgers_of(path))
        return earlier_looks(table, read_ledgers([*places])) if table else Earlier(None, self.settings.compared)

    def enter_look(self) -> None:
        """Enter the table that is shown into the ledger, if this is the study's own user."""
        table = self.table()
        if table and is_own(self.folder.path):
            enter(table, ledger_of(self.folder.path))

    def chosen_before(self, selection: Selection) -> list[Point]:
        """Points with trials on test that are not planned: of earlier choices, with fewer seeds or values."""
        points, planned, settings = selection.scores if selection.chosen else (), self.records, self.settings
        cells = [settings.cell(selection.arm.name, selection.setting, point) for point in points]
        trials = (Trial(cell, seed) for cell, seed in product(cells, settings.seeds))
        others = (t for t in trials if t not in planned and self._read(t).status == "finished")
        return [*dict.fromkeys(trial.point for trial in others)]

    def _read(self, trial: Trial) -> TrialRecord:
        with self.folder.naming_damage():
            images = self.images.fingerprints.get(images_key(trial.cell.images(trial.seed)))
        splits = (VAL,) if trial.for_tuning else self.splits
        return read_trial(self.folder, trial, splits, self.settings.measure, images=images)

    def _choose(self) -> None:
        settings = self.settings
        places = list(product(settings.sweep.points, settings.every_arm))
        self.selections = {(setting, arm.name): self._selection(setting, arm) for setting, arm in places}
        wanted = [self.trial(*place) for place in settings.places()]
        of_base = product(settings.sweep.points, settings.seeds, settings.arms if settings.tune else ())
        matched = [self.matched_to(setting, arm.name, seed) for setting, seed, arm in of_base]
        known = {**self.answered, **self.matched}
        self.answered, self.matched = (
            {trial: known.get(trial) or self._read(trial) for trial in trials if trial} for trials in (wanted, matched)
        )
        self._find_lost_scores()

    def _find_lost_scores(self) -> None:
        """Take trials for damaged whose file of scores is gone, where others have theirs: without it, all verdicts
        would be about these images alone."""
        if not any(record.images for record in self.answered.values()):
            return
        for trials in (self.answered, self.matched):
            for trial, record in trials.items():
                if record.status != "finished" or record.images is not None:
                    continue
                folder = self.folder.trial(trial)
                if lost := [file for split in self.splits if not (file := folder / f"{split}.npz").exists()]:
                    first = "" if (folder / WEIGHTS).exists() else "Remove that folder. "
                    text = f"{named(lost[0])} is missing. {first}Run the study's command again."
                    trials[trial] = replace(record, status="damaged", message=text)

    def _selection(self, setting: Point, arm: Arm) -> Selection:
        settings, metric = self.settings, self.settings.measure.metric
        if not settings.tune:
            return Selection(arm, setting, {}, AS_IS)
        scores, ended = {}, True
        for point in settings.tune.points:
            cell = settings.cell(arm.name, setting, point)
            records = [self.tried[Trial(cell, seed)] for seed in settings.seeds_for_tuning]
            scores[point] = {record.seed: record.score(metric.name) for record in records}
            ended &= all(record.ended for record in records)
        return Selection(arm, setting, scores, choose(scores, metric.higher_is_better) if ended else None)


def read_trial(
    folder: StudyFolder,
    trial: Trial,
    splits: Sequence[str],
    measure: Measure,
    path: Path | None = None,
    images: str | None = None,
) -> TrialRecord:
    """Read a trial from its folder. Results of a protocol with other options than the measure's do not count.

    path: the folder of an equal trial in another study, to read that. images: the fingerprint of those that it has to
    be trained on.
    """
    path, split = path or folder.trial(trial), splits[-1]
    record = TrialRecord(
        trial.arm.name,
        trial.seed,
        "unfinished",
        folder.trial(trial).relative_to(folder.path).as_posix(),
        trial.point.to_dict(),
        trial.setting.to_dict(),
    )
    try:
        result, evaluated = read_object(path / "result.json"), folder.evaluation(trial, split, path)
        config = read_object(path / "config.json")
        environment = config.get("environment", {})
        if images and "data" in config and config["data"]["fingerprint"] != images:
            raise UserError(f"{named(path)} was trained on other images. Remove it and run the same command again.")
        warned, origin = tuple(read_warnings(path)), printable(str(read_object(path / REUSED).get("study", "")))
        reused = origin if not origin or "://" in origin else os.path.normpath(folder.path / origin)
        status: Status = result["status"] if (path / "result.json").exists() else "unfinished"
        if status not in ("finished", "diverged", "failed", "unfinished"):
            raise ValueError(f"the status {status!r}")
        message = result.get("message")
        asked = [
            protocol["metrics"]
            for protocol in evaluated["protocols"].values()
            if options_from(protocol["options"]) == measure.options
        ]
        trained = result.get("metrics", {}) if result.get("split") == split and status != "failed" else {}
        metrics = {str(name): float(value) for some in (*asked, trained) for name, value in some.items()}
        scores, constant = None, False
        if status == "finished" and measure.name in metrics:
            of_images = _of_images(path, splits)
            names = [name for name in of_images if name in metrics or name == NLL]
            metrics |= {name: float(np.nanmean(of_images[name][1])) for name in names}
            scores = ImageScores(*of_images[measure.name]) if measure.name in of_images else None
            predicted = of_images["predicted"][1] if "predicted" in of_images else np.arange(2)
            constant = len(predicted) > 1 and predicted[0] >= 0 and not np.ptp(predicted)
    except UserError as error:
        return replace(record, status="damaged", message=str(error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = f"a file in {named(path)} is damaged ({error!r}). Remove that folder and run the same command again."
        return replace(record, status="damaged", message=text)
    if status == "finished" and measure.name not in metrics:
        status, message = "failed" if evaluated["failed"] else "unfinished", evaluated["failed"]
    return replace(
        record, status=status, metrics=metrics, wall_s=result.get("wall_s"), message=message, warnings=warned,
        constant=bool(constant), environment=environment, images=scores, reused=reused,
    )  # fmt: skip


def shared_trials(records: Iterable[TrialRecord]) -> str:
    """Return `16 of 22 trials were trained in runs/pets-base.`; empty without any."""
    listed = list(records)
    counts = Counter(record.reused for record in listed if record.reused)
    studies = [f"{study} ({count})" if len(counts) > 1 else study for study, count in counts.items()]
    return f"{counts.total()} of {plural(len(listed), 'trial')} were trained in {listing(studies)}." if counts else ""


def _of_images(path: Path, splits: Sequence[str]) -> dict[str, tuple[str, NDArray[np.float64]]]:
    """Return a digest of the images and the values (n,) of each score that all of the splits have."""
    columns = [read_scores(path / f"{split}.npz") for split in splits]
    if not all(columns):
        return {}
    ids = [f"{split}/{name}" for split, scores in zip(splits, columns, strict=True) for name in scores["ids"]]
    digest = hashlib.blake2b("\n".join(ids).encode(), digest_size=16).hexdigest()
    names = [name for name in columns[0] if name != "ids" and all(name in scores for scores in columns)]
    joined = {name: np.concatenate([scores[name] for scores in columns]).astype(np.float64) for name in names}
    return {name: (digest, values) for name, values in joined.items() if values.shape == (len(ids),)}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows that a trial's training logged; damaged rows are left out."""
    try:
        lines = read_bytes(path / "metrics.jsonl", "text").decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:  # the last line of a trial that is being written, or was killed
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def read_curves(path: Path, metrics: Iterable[str]) -> dict[str, Curve]:
    """Read what a trial's training logged on val, for each of the metrics that it logged."""
    rows, curves = [row for row in read_rows(path) if row.get("split") == VAL], {}
    for name in metrics:
        points = [row for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])]
        if points:
            curves[name] = Curve(*zip(*((row["step"], row.get("wall_s", math.nan), row[name]) for row in points)))
    return curves


def at_the_edge(grid: Grid, chosen: Point) -> list[str]:
    """Fields whose chosen number is the smallest or the largest that was tried: a wider grid may hold a better one."""
    numbers = {name: values for name, values in grid.fields if all(isinstance(v, int | float) for v in values)}
    tried = {name: values for name, values in numbers.items() if len(values) > 1}
    return [name for name, value in chosen.values if name in tried and value in (min(tried[name]), max(tried[name]))]


def with_begun_seeds(folder: StudyFolder, facts: Facts, settings: Settings) -> Settings:
    """Add the seeds after the planned ones, of which a trial has ended while their number is not settled."""
    more = replace(settings, seeds=settings.most_seeds)
    if len(more.seeds) == len(settings.seeds):
        return settings
    records = StudyState.of(folder, facts, more).answered.values()
    begun = {record.seed for record in records if record.ended}
    return replace(settings, seeds=tuple(seed for seed in more.seeds if seed in {*settings.seeds, *begun}))


def enter_shown(folder: StudyFolder) -> None:
    """Enter a study of this user, whose answer was shown before, into the ledger: it may be older, or moved here."""
    with suppress(UserError, OSError):
        if is_own(folder.path) and (folder.path / "results.json").exists() and (facts := folder.facts()):
            StudyState.of(folder, facts).enter_look()
