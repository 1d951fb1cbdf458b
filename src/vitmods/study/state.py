"""The state of a study's folder: how every trial ended, which points are chosen, and what every trial scored.

Decisions on a study's trials: their scores as `vitmods.stats` reads them, and the looks at which arms stop.

A fixed study is looked at once, when its seeds are done. One that runs until it is decided is looked at after 4, 5, 6,
8, ... seeds, each time at a level that keeps false claims of the whole study at 5 %. Looks follow from the scores
alone, so a study that was killed or extended has the same ones. A factorial study is looked at after 2, 3, 4, 6 and 8
seeds, and stops as a whole, since every run informs every change.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vitmods.stats.decide import decide
from vitmods.stats.decision import Decision, beats_both, of_both
from vitmods.stats.factorial import LOOKS as FACTORIAL_LOOKS
from vitmods.stats.factorial import Factorial, factorial
from vitmods.stats.sequential import LOOKS
from vitmods.stats.settings import OverSettings, over_settings
from vitmods.stats.verdict import FRACTION, Effect
from vitmods.study.arms import BASE, Arm
from vitmods.study.grid import AS_IS, Grid, Point, choose
from vitmods.study.ledger import Earlier, ShownTable, earlier_looks, enter, identities, is_own, ledger_of, read_ledgers
from vitmods.study.plan import MOST_SEEDS, VAL, Measure, Settings, Trial, images_key, options_from
from vitmods.study.store import Facts, StudyFolder, StudyPlan, read_object, read_warnings
from vitmods.train.trial import read_scores
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
    plan:    of its seeds
    fingerprints: `images_key` -> the images that trials are trained on
    level:   setting -> what a linear probe of the weights that base starts from reaches, as far as it is known
    created: when the study was
    """

    splits: tuple[str, ...]
    constant: Mapping[str, float] = field(default_factory=dict)
    groups: NDArray[Any] | None = None
    sizes: tuple[int, int] | None = None
    plan: StudyPlan = StudyPlan()  # noqa: RUF009, frozen
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
        return Evaluated(facts.splits, constant, None, sizes, facts.plan, facts.fingerprints, level, facts.created)
    groups = folder.images.groups({split: counts[split] for split in facts.splits})
    return Evaluated(facts.splits, constant, groups, None, facts.plan, facts.fingerprints, level, facts.created)


class StudyState:
    """The folder of a study, read once; `read_again` after a trial has ended.

    images:     that the answer is about; `splits` for short
    tried:      the trials that points are chosen by, on val; empty without tuning
    selections: (setting, arm's name) -> its points and the chosen one, base first
    answered:   the planned trials of the chosen points, on the splits; seed by seed, base first
    matched:    likewise, those of base at the points that arms chose and base did not
    """

    def __init__(self, folder: StudyFolder, settings: Settings, images: Evaluated):
        self.folder, self.settings, self.images, self.splits = folder, settings, images, images.splits
        self._keys: dict[tuple[Point, int], str] = {}  # of the images of a setting and fold
        self.tried = {trial: self._read(trial) for trial in settings.tuning_trials()}
        self.answered: dict[Trial, TrialRecord] = {}
        self.matched: dict[Trial, TrialRecord] = {}
        self._choose()

    def trial(self, setting: Point, arm: str, seed: int) -> Trial | None:
        """The trial that an arm is answered by; None before its point is chosen."""
        selection = self.selections[setting, arm]
        return None if selection.chosen is None else Trial(selection.arm, seed, selection.chosen, setting)

    def beside(self, setting: Point, arm: str, seed: int) -> Trial | None:
        """The trial of base at the point of an arm; None if base chose the same, or before both are chosen."""
        own, base = self.trial(setting, arm, seed), self.trial(setting, BASE, seed)
        apart = own and base and own.point != base.point and not self.settings.design
        return replace(base, point=own.point) if own and base and apart else None

    def arms_of(self, trial: Trial) -> set[str]:
        """The arms that a trial is for: its own, or those at whose point base is trained."""
        if trial not in self.matched:
            return {trial.arm.name}
        return {a.name for a in self.settings.arms if self.beside(trial.setting, a.name, trial.seed) == trial}

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
        return [Trial(selection.arm, seed, AS_IS, selection.setting) for selection, seed in open_ones]

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
        if spare := self.images.plan.spare:
            settings = replace(settings, seeds=tuple(dict.fromkeys([*settings.seeds, *range(spare)])))
        seeds = settings.seeds if settings.until_decided else sorted(settings.seeds)  # whose looks follow their order
        return ShownTable(
            f"{self.images.created} {self.folder.path.name}", str(settings.measure), float(settings.margin),
            settings.generalize, settings.until_decided, tuple(seeds), tuple(sorted(settings.seeds_of(BASE))),
            bool(spare), settings.compared, tuple(sorted(images)), base, hashes,
            len(settings.sweep.points),
        )  # fmt: skip

    @cached_property
    def earlier(self) -> Earlier:
        """What was shown before of these trials, by the ledgers beside this study and those that shared trials."""
        table, shared = self.table(), (Path(record.reused) for record in self.records.values() if record.reused)
        places = dict.fromkeys(ledger_of(path) for path in (self.folder.path, *shared))
        return earlier_looks(table, read_ledgers([*places])) if table else Earlier(None, self.settings.compared)

    def enter_look(self) -> None:
        """Enter the table that is shown into the ledger, if this is the study's own user."""
        table = self.table()
        if table and is_own(self.folder.path):
            enter(table, ledger_of(self.folder.path))

    def chosen_before(self, selection: Selection) -> list[Point]:
        """Points with trials on test that are not planned: of earlier choices, with fewer seeds or values."""
        points, planned = selection.scores if selection.chosen else (), self.records
        trials = (Trial(selection.arm, s, p, selection.setting) for p, s in product(points, self.settings.seeds))
        others = (t for t in trials if t not in planned and self._read(t).status == "finished")
        return [*dict.fromkeys(trial.point for trial in others)]

    def _read(self, trial: Trial) -> TrialRecord:
        with self.folder.naming_damage():
            place = trial.setting, trial.seed % (self.settings.folds or 1)
            if place not in self._keys:
                self._keys[place] = images_key(self.settings.at(*place).fixed)
        images, splits = self.images.fingerprints.get(self._keys[place]), (VAL,) if trial.for_tuning else self.splits
        return read_trial(self.folder, trial, splits, self.settings.measure, images=images)

    def _choose(self) -> None:
        settings = self.settings
        places = list(product(settings.sweep.points, settings.every_arm))
        self.selections = {(setting, arm.name): self._selection(setting, arm) for setting, arm in places}
        order = product(settings.sweep.points, settings.seeds_of(BASE), settings.every_arm)
        wanted = [
            self.trial(setting, arm.name, seed) for setting, seed, arm in order if seed in settings.seeds_of(arm.name)
        ]
        beside = product(settings.sweep.points, settings.seeds, settings.arms if settings.tune else ())
        matched = [self.beside(setting, arm.name, seed) for setting, seed, arm in beside]
        known = {**self.answered, **self.matched}
        self.answered, self.matched = (
            {trial: known.get(trial) or self._read(trial) for trial in trials if trial} for trials in (wanted, matched)
        )

    def _selection(self, setting: Point, arm: Arm) -> Selection:
        settings, metric = self.settings, self.settings.measure.metric
        if not settings.tune:
            return Selection(arm, setting, {}, AS_IS)
        scores, ended = {}, True
        for point in settings.tune.points:
            records = [self.tried[Trial(arm, seed, point, setting)] for seed in settings.seeds_for_tuning]
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


Arguments = dict[str, Any]
"""of `decide`"""


def decision_at(
    state: StudyState,
    seeds: Sequence[int],
    setting: Point = AS_IS,
    frozen: Mapping[str, Effect] | None = None,
    base: str = BASE,
    without: Container[str] = (),
) -> Decision:
    """Decide on every arm from the finished trials of these seeds; `frozen` are the effects of arms that have stopped.

    Raises UserError if trials were evaluated on different images.
    """
    most, planned = _most(state, LOOKS), _planned(state, seeds)

    def against(beside: str = "") -> Decision:
        scores, criteria = _scores(state, seeds, [setting], without, beside)
        return decide(
            base=base, family=_family(state, base), frozen=frozen, most_seeds=most, planned=planned,
            resampled=state.images.sizes, **scores[setting], **criteria,
        )  # fmt: skip

    decision = against()
    for (point,), arms in _beside(state, [setting], base).items():
        compared = [arm for arm in arms if arm in decision.effects and arm not in (frozen or ())]
        decision = beats_both(decision, against(arms[0]), compared, str(point)) if compared else decision
    return decision


def factorial_at(state: StudyState, seeds: Sequence[int], setting: Point = AS_IS) -> Factorial:
    """Decide on the changes of a factorial study, on average over the other changes."""
    assert state.settings.design is not None
    scores, criteria = _scores(state, seeds, [setting])
    return factorial(
        design=state.settings.design.design, most_seeds=_most(state, FACTORIAL_LOOKS), planned=_planned(state, seeds),
        **scores[setting], **criteria,
    )  # fmt: skip


def over_settings_at(state: StudyState, base: str = BASE) -> OverSettings:
    """Decide on every arm on average over the settings of a sweep, and under each."""
    seeds, points = state.settings.seeds, state.settings.sweep.points
    planned = _planned(state, seeds)

    def against(beside: str = "") -> OverSettings:
        scores, criteria = _scores(state, seeds, points, beside=beside)
        by_setting: Arguments = {
            name: {str(point): scores[point][name] for point in points}
            for name in ("scores", "failed", "constant", "level")
        }
        return over_settings(base=base, family=_family(state, base), planned=planned, **by_setting, **criteria)

    over = against()
    for chosen, arms in _beside(state, points, base).items():
        other = against(arms[0])
        each = dict(over.each)
        for arm, (point, at) in product(arms, zip(points, chosen, strict=True)):
            if at:
                effect, beside = each[arm][str(point)], other.each[arm][str(point)]
                each[arm] = {**each[arm], str(point): of_both(effect, beside, str(at))}
        over = replace(over, decision=beats_both(over.decision, other.decision, arms, "its points"), each=each)
    return over


def over_studies(folders: Iterable[str | Path]) -> OverSettings:
    """Decide on the same arms in studies of different data sets: on average, in each, and how far these differ.

    Raises UserError for a folder without a plain study of a fixed number of seeds, and for studies that cannot be
    averaged: of another task, other arms, seeds, metric, margin or claim, or of the same data set twice.
    """
    shared: dict[str, Any] = {}
    by_set: Arguments = {name: {} for name in ("scores", "failed", "constant", "level", "chance", "groups")}
    criteria: Arguments = {}
    fingerprints, looked = set(), [0]
    for path in folders:
        folder = StudyFolder(path)
        folder.refresh()
        facts = folder.known_facts()
        settings = Settings.from_dict(facts.settings)
        state = StudyState(folder, settings, evaluated_of(folder, facts))
        if settings.sweep or settings.design or settings.folds or settings.until_decided:
            raise UserError(
                f"{named(folder.path)} is not a study of arms on one data set with a fixed number of seeds."
            )
        compared = {name: facts.settings[name] for name in ("task", "arms", "seeds", "metric", "margin", "generalize")}
        if different := [name for name, value in compared.items() if shared.setdefault(name, value) != value]:
            raise UserError(f"{named(folder.path)} has another {listing(different)} than the first study.")
        name, images = settings.fixed["data"], settings.fixed["images"]
        if name in by_set["scores"] or images in fingerprints:
            raise UserError(f"Two studies are of {name}: give one study for each data set.")
        fingerprints.add(images)
        scores, criteria = _scores(state, settings.seeds, [AS_IS])
        for key, value in {**scores[AS_IS], "chance": criteria["chance"], "groups": criteria["groups"]}.items():
            by_set[key][name] = value
        looked.append(state.earlier.most or 0)
        criteria |= {"planned": _planned(state, settings.seeds), "family": _family(state, BASE)}
    return over_settings(**{**criteria, **by_set, "looked": max(looked) or None}, shared_images=False)


def _beside(state: StudyState, points: Sequence[Point], base: str) -> dict[tuple[Point | None, ...], list[str]]:
    """The arms by their points under each setting that base did not choose (None: it did)."""
    arms: dict[tuple[Point | None, ...], list[str]] = {}
    for arm in state.settings.arms if base == BASE and state.matched else ():
        trials = [state.beside(point, arm.name, state.settings.seeds[0]) for point in points]
        arms.setdefault(tuple(trial.point if trial else None for trial in trials), []).append(arm.name)
    return {chosen: names for chosen, names in arms.items() if any(chosen)}


def _family(state: StudyState, base: str) -> int | Literal["pairs"]:
    """The arms that were planned or shown; all pairs for a reference that was chosen after the scores."""
    return max(len(state.settings.arms), state.earlier.family) if base == BASE else "pairs"


def _planned(state: StudyState, seeds: Sequence[int]) -> int:
    """Seeds without which verdicts are provisional: all that may be run, as long as their number is not settled."""
    return max(len(seeds), state.images.plan.spare)


def _scores(
    state: StudyState, seeds: Sequence[int], points: Sequence[Point], without: Container[str] = (), beside: str = ""
) -> tuple[dict[Point, Arguments], Arguments]:
    """Return `scores`, `failed`, `constant` and `level` of `decide` for each setting, and the shared criteria. An arm
    does not have trials before its point is chosen. `beside`: an arm at whose point base is read."""
    settings, metric, known = state.settings, state.settings.measure.metric, state.records
    by_setting: dict[Point, dict[str, list[TrialRecord]]] = {}
    for point in points:
        for arm in (arm.name for arm in settings.every_arm if arm.name not in without):
            of_arm = dict.fromkeys([*seeds, *range(settings.known)]) if arm == BASE else seeds
            trials = [
                (beside and arm == BASE and state.beside(point, beside, seed)) or state.trial(point, arm, seed)
                for seed in of_arm
            ]
            by_setting.setdefault(point, {})[arm] = [known[trial] for trial in trials if trial is not None]
    records = [trial for arms in by_setting.values() for trials in arms.values() for trial in trials]
    finished = [trial for trial in records if trial.status == "finished"]
    folds = settings.folds or 1  # trials of one fold, or all, have the same images
    # A score without those of images is of the last split alone.
    comparable = [trial for trial in finished if trial.images is not None or len(state.splits) > 1]
    evaluated = {(trial.seed % folds, trial.images and trial.images.images) for trial in comparable}
    if len(evaluated) > len({fold for fold, _ in evaluated}):
        raise UserError(
            f"Trials in {named(state.folder.path)} were evaluated on different images, so they cannot be compared. Run "
            "the study again in another folder."
        )
    has_images = all(trial.images is not None for trial in finished)
    arguments: dict[Point, Arguments] = {}
    for setting, arms in by_setting.items():
        scores: dict[str, dict[int, Any]] = {arm: {} for arm in arms}
        failed: dict[str, dict[int, str]] = {arm: {} for arm in arms}
        constant: dict[str, set[int]] = {arm: set() for arm in arms}
        for arm, records in arms.items():
            for trial in records:
                by_image = trial.images if trial.status == "finished" and has_images else None
                scores[arm][trial.seed] = trial.score(metric.name) if by_image is None else by_image.values
                if trial.status == "diverged":
                    failed[arm][trial.seed] = trial.message or "diverged"
                if trial.constant:
                    constant[arm].add(trial.seed)
        level = state.images.level.get(str(setting)) if metric.name == "top1" else None
        arguments[setting] = {"scores": scores, "failed": failed, "constant": constant, "level": level}
    criteria = {
        "margin": settings.margin,
        "unit": FRACTION if metric.unit == "%" else metric.unit,
        "higher_is_better": metric.higher_is_better,
        "generalize": settings.generalize,
        "looked": state.earlier.most,
        "chance": state.images.constant.get(metric.name),
        "groups": state.images.groups if has_images and finished else None,
    }
    return arguments, criteria


def _most(state: StudyState, looks: Sequence[int]) -> int | None:
    """The maximum of a study that runs until it is decided; None if its seeds were fixed before."""
    count = len(state.settings.seeds)
    return min(max(count, looks[0]), looks[-1]) if state.settings.until_decided else None


def with_begun_seeds(folder: StudyFolder, facts: Facts, settings: Settings) -> Settings:
    """Add the seeds after the planned ones, of which a trial has ended while their number is not settled."""
    more = replace(settings, seeds=tuple(dict.fromkeys([*settings.seeds, *range(facts.plan.spare)])))
    if len(more.seeds) == len(settings.seeds):
        return settings
    records = StudyState(folder, more, evaluated_of(folder, facts)).answered.values()
    begun = {record.seed for record in records if record.ended}
    return replace(settings, seeds=tuple(seed for seed in more.seeds if seed in {*settings.seeds, *begun}))


def enter_shown(folder: StudyFolder) -> None:
    """Enter a study of this user, whose answer was shown before, into the ledger: it may be older, or moved here."""
    with suppress(UserError, OSError):
        if is_own(folder.path) and (folder.path / "results.json").exists() and (facts := folder.facts()):
            StudyState(folder, Settings.from_dict(facts.settings), evaluated_of(folder, facts)).enter_look()


@dataclass(frozen=True)
class Look:
    """The decision on the first `seeds` seeds; `stopped` are the arms that end there."""

    seeds: int
    decision: Decision | Factorial
    stopped: tuple[str, ...]


def looks(
    state: StudyState, setting: Point = AS_IS, retried: Container[Trial] | None = None, known: Sequence[Look] = ()
) -> list[Look]:
    """Return the looks of a study that runs until it is decided, as far as its trials reach; none of a fixed study.

    An arm one of whose trials failed, e.g. for lack of memory, is left out of a look: no verdict waits for it.

    Args:
        retried: trials that a run has tried; trials that failed earlier are waited for. None: not waited for.
        known: the first looks, from an earlier call of the same run.
    """
    settings, taken, records = state.settings, list(known), state.records
    frozen: dict[str, Effect] = {}
    if not settings.design:
        frozen = {arm: look.decision.effects[arm] for look in known for arm in look.stopped}
    if known and (known[-1].stopped if settings.design else len(frozen) == len(settings.arms)):
        return taken
    for count in settings.looks[len(known) :]:
        seeds = settings.seeds[:count]
        failed, is_complete = set(), True
        for arm in (arm.name for arm in settings.every_arm if arm.name not in frozen):
            trials = [trial for seed in seeds if (trial := state.trial(setting, arm, seed)) is not None]
            matched = [trial for seed in seeds if (trial := state.beside(setting, arm, seed)) is not None]
            unfinished = [trial for trial in (*trials, *matched) if not records[trial].ended]
            if any(
                records[trial].status in ("failed", "damaged") and (retried is None or trial in retried)
                for trial in unfinished
            ):
                failed.add(arm)
            elif unfinished or len(trials) < count:
                is_complete = False
        if taken and len(frozen) + len(failed - {BASE}) == len(settings.arms):
            break
        if BASE in failed or (settings.design and failed) or not is_complete:
            break
        if settings.design is not None:
            changes = factorial_at(state, seeds, setting)
            taken.append(Look(count, changes, tuple(arm.name for arm in settings.arms if changes.is_decided)))
            if changes.is_decided:
                break
            continue
        decision = decision_at(state, seeds, setting, frozen, without=failed)
        effects = {arm: effect for arm, effect in decision.effects.items() if arm not in frozen}
        stopped = {arm: effect for arm, effect in effects.items() if effect.stops or effect.futile}
        taken.append(Look(count, decision, tuple(stopped)))
        frozen |= stopped
        if len(frozen) + len(failed) == len(settings.arms):
            break
    return taken


def spare_trials(state: StudyState, taken: Sequence[Look]) -> list[Trial]:
    """List the trials that no look counts: of seeds after the look at which their arm stopped, and of base once all
    arms have. Workers that were free had begun them."""
    settings = state.settings
    seeds = {arm: settings.seeds[: look.seeds] for look in taken for arm in look.stopped}
    if taken and len(seeds) == len(settings.arms):
        seeds[BASE] = (*settings.seeds[: taken[-1].seeds], *range(settings.known))
    return [trial for trial in state.answered if trial.seed not in seeds.get(trial.arm.name, (trial.seed,))]
