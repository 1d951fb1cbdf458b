"""The answer of a study, read from its trials: effects, costs, the outcome of every trial, and caveats to know before
acting on a verdict."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from vitmods import __version__
from vitmods.stats.decision import Decision
from vitmods.stats.factorial import Factorial
from vitmods.stats.verdict import POINTS_PER_FRACTION, Effect
from vitmods.study.arms import BASE
from vitmods.study.cells import Trial
from vitmods.study.doubts import outcome_doubts, planning_doubts
from vitmods.study.grid import mean_of, show_value
from vitmods.study.questions import Look, Question, confirmation, looks, remarks_on_controls, spare_trials
from vitmods.study.results import (
    ArmAnswer,
    BaseCost,
    Costs,
    SettingAnswer,
    Tuning,
    arm_answer,
    metric_called,
    read_costs,
    setting_answer,
    with_curves,
)
from vitmods.study.settings import Settings
from vitmods.study.state import HIDDEN, StudyState, TrialRecord, evaluated_of, with_begun_seeds
from vitmods.study.store import SCHEMA, Facts, Sample, StudyFolder
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import write_atomically, write_json
from vitmods.util.registry import Registry
from vitmods.util.text import listing, no_formula, without_folders


def outcomes(state: StudyState) -> Iterator[str]:
    """Failures and warnings of trials; in tuning, trials of points that are not chosen may diverge."""
    for trial, record in state.records.items():
        if record.status == "failed" or (record.status == "diverged" and not trial.for_tuning):
            yield f"{record} {record.status}: {record.message}"
    for record in state.records.values():
        yield from (f"{record}: {warning}" for warning in record.warnings)


@dataclass(frozen=True)
class Running:
    """A run that works on the study of an answer.

    written: when the answer was read
    left_s:  seconds until the last trial ends; None: unknown
    due:     if the report is not written again by then, the run has stopped; None: unknown
    """

    written: datetime
    left_s: float | None = None
    due: datetime | None = None


VIEWS: Registry[Callable[..., Any]] = Registry("view of an answer", "vitmods.report")
"""text, latex, bibtex, methods: Answer -> str; html, paper: (Answer, where to, or None) -> path of what was written"""


@dataclass(frozen=True, repr=False)
class Answer:
    """The results of a study. Prints itself as the table of verdicts; `answer["dpn"]` is that arm's `Effect`.

    metric, splits:  what is compared, and on which images
    margin:          a smaller difference does not matter; in points if the metric is a fraction
    base:            base, or the arm that the others are compared with instead
    arms:            in the order of the study
    decision:        the effects of the arms, and what holds for all of them; of a sweep, on average over its settings
    questions:       what was asked of the trials, by name; the first is the headline
    sweep:           the results under each setting of a sweep
    looks:           of a study that runs until it is decided: the decision at each number of seeds
    tuned:           recipe fields and the values that every arm was trained with; None if nothing was tuned
    complete:        whether every trial has been run
    doubts:          what to know before acting on a verdict; part of the warnings
    path:            the study's folder
    curves:          the metric of `trials[...].curve`
    running:         the run that works on the study, if it wrote this answer; part of the report alone
    """

    created: str
    metric: Metric
    splits: tuple[str, ...]
    margin: float
    base: ArmAnswer
    arms: tuple[ArmAnswer, ...]
    decision: Decision
    complete: bool
    command: str
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    resolved: Mapping[str, Any]
    environment: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    other_metrics: Mapping[str, Metric] = field(default_factory=dict)
    base_cost: BaseCost | None = None
    questions: Mapping[str, Question] = field(default_factory=dict)
    sweep: tuple[SettingAnswer, ...] = ()
    looks: tuple[Look, ...] = ()
    tuned: Mapping[str, Sequence[Any]] | None = None
    vitmods: str = __version__
    curves: Metric | None = field(default=None, metadata=HIDDEN)
    samples: tuple[Sample, ...] = field(default=(), metadata=HIDDEN)
    path: Path = field(default=Path(), metadata=HIDDEN)
    running: Running | None = field(default=None, metadata=HIDDEN)

    @classmethod
    def load(cls, path: str | Path, reference: str = BASE) -> Answer:
        """Read the answer of the study in a folder or at an address, finished or not.

        reference: the arm that all others, including base, are compared with. Raises UserError without such a study or
        arm.
        """
        folder = StudyFolder(path)
        folder.refresh()
        return read_answer(folder, folder.known_facts(), reference=reference)

    @property
    def is_of_chosen(self) -> bool:
        """Whether its arm was chosen by trainings with other seeds that were judged on these images."""
        return StudyFolder(self.path).confirmed_study is not None and not self.settings.get("answer_on")

    @property
    def effects(self) -> dict[str, Effect]:
        """Arm -> Effect, in the order of the study."""
        return {arm.name: arm.effect for arm in self.arms if arm.effect}

    @property
    def headline(self) -> Question:
        """The question whose effects are the verdicts of the study."""
        return next(iter(self.questions.values()))

    @property
    def each(self) -> Mapping[str, Mapping[str, Effect]]:
        """Setting of a sweep, or "" -> arm -> its effect there."""
        if not self.sweep:
            return {"": self.effects}
        asked = self.questions["settings"].groups if "settings" in self.questions else {}  # a design may not ask it
        return {setting.name: asked.get(setting.name, {}) for setting in self.sweep}

    @property
    def every_arm(self) -> tuple[ArmAnswer, ...]:
        """Base and the arms."""
        return (self.base, *self.arms)

    @property
    def under(self) -> tuple[SettingAnswer, ...]:
        """The results under each setting; a study that is no sweep has one, without a name."""
        arms = self.every_arm
        scores = {arm.name: arm.scores for arm in arms}
        tuning = {arm.name: arm.tuning for arm in arms if arm.tuning}
        costs = {arm.name: arm.cost for arm in arms if arm.cost}
        return self.sweep or (SettingAnswer("", {}, scores, tuning, self.base_cost, costs),)

    @property
    def bases(self) -> list[str]:
        """The models of base; of weights in a folder its name alone, as titles and pictures are shown to others."""
        names = (str(setting.values.get("base", self.base.model.name)) for setting in self.under)
        return [*dict.fromkeys(map(without_folders, names))]

    @property
    def varied(self) -> set[str]:
        """Fields that are tuned or swept, whose values in the recipe are not those of every trial."""
        return {*(self.tuned or {}), *(name for setting in self.under for name in setting.values)}

    @property
    def length(self) -> str:
        """How long a trial trains: `20 epochs`, `3,000 steps`, or the several lengths of a sweep or of tuning."""
        several = {**(self.tuned or {}), **self.settings.get("sweep", {})}
        recipe = self.settings["recipe"]
        unit = "steps" if "steps" in several or recipe["steps"] is not None else "epochs"
        lengths = several.get(unit) or [
            self.resolved.get("epochs", recipe["epochs"]) if unit == "epochs" else recipe[unit]
        ]
        shown = [f"{length:,}" if isinstance(length, int) else f"{length or 0:,g}" for length in lengths]
        return f"{listing(shown)} {unit if lengths != [1] else unit[:-1]}"

    @property
    def stopped(self) -> dict[str, int]:
        """Arm that was decided before the last seed -> its seeds."""
        return {arm: look.seeds for look in self.looks for arm in look.stopped}

    @property
    def seeds(self) -> list[int]:
        """The seeds of base that the effects are read from, but for known ones: those of the last look, or all."""
        return list(self.base.scores)[: self.looks[-1].seeds if self.looks else None]

    @property
    def base_mean(self) -> float | None:
        """The mean of base over the seeds that the effects are read from, and known ones."""
        known = range(self.settings.get("known", 0)) if self.base.name == BASE else ()
        return mean_of(score for seed, score in self.base.scores.items() if seed in self.seeds or seed in known)

    @property
    def trials(self) -> list[TrialRecord]:
        return [trial for arm in self.every_arm for trial in arm.trials]

    @property
    def has_diverged(self) -> bool:
        """Whether every trial of base that has ended diverged, so that nothing can be compared."""
        ended = [trial.status for trial in self.base.counted if trial.ended]
        return bool(ended) and set(ended) == {"diverged"}

    @property
    def failed(self) -> list[str]:
        """A line for each trial that failed in the last run, or is damaged."""
        return [f"{trial}: {trial.message}" for trial in self.trials if trial.status in ("failed", "damaged")]

    @property
    def chosen(self) -> dict[str, Mapping[str, Any] | None]:
        """Arm, including base -> the values of its chosen point, None before the choice; in a sweep the keys are
        `SETTING, ARM`. Empty without tuning."""
        pairs = ((setting, arm, tuning) for setting, arms in self.tunings.items() for arm, tuning in arms.items())
        return {", ".join(filter(None, (setting, arm))): tuning.chosen for setting, arm, tuning in pairs}

    @property
    def tunings(self) -> dict[str, Mapping[str, Tuning]]:
        """Setting of a sweep, or "" -> arm, including base -> its tuning. Empty without tuning."""
        return {setting.name: setting.tuning for setting in self.under if setting.tuning}

    def __getitem__(self, arm: str) -> Effect:
        if arm not in (effects := self.headline.effects):
            raise UserError(f"The study does not have {self.headline.one} {arm!r}. {nearest(arm, effects)}")
        return effects[arm]

    def __repr__(self) -> str:
        return str(VIEWS["text"](self))

    def _repr_html_(self) -> str:
        return str(VIEWS["notebook"](self))

    @property
    def _table(self) -> Decision:
        if not self.arms:
            raise UserError("Base alone has no effects: results.csv has its scores (answer.trials_table()).")
        return self.headline.decision(self.decision)

    def to_markdown(self) -> str:
        """Format the effects as a table for a README."""
        return self._table.to_markdown()

    def to_latex(self) -> str:
        """Format each question as a table that fits a column: base, scores, effects, verdicts, costs, and a caption."""
        return str(VIEWS["latex"](self))

    def to_bibtex(self) -> str:
        """Format the papers of the changes and of the reproduced table, and vitmods itself, as BibTeX."""
        return str(VIEWS["bibtex"](self))

    def to_methods(self) -> str:
        """Describe models, images, recipe, seeds and statistics in a paragraph for a paper."""
        return str(VIEWS["methods"](self))

    def to_pandas(self) -> Any:
        """Return the effects as a data frame. Raises UserError without pandas."""
        return self._table.to_pandas()

    def to_dict(self) -> dict[str, Any]:
        """Return the content of results.json."""
        fields: dict[str, Any] = _plain(self)
        return {"schema": SCHEMA, **fields}

    def trials_table(self) -> list[dict[str, Any]]:
        """Return a row for each trial, base first, as for `pandas.DataFrame`; all have the same columns.

        They are the setting of a sweep and the tuned point, a column for each field; arm, changes, seed, status; every
        metric (fractions as fractions) and the paired difference to base in the first one; seconds of training, the
        folder, and the study that trained it. Trials that only chose a point have just the metric on val, and others
        the metric on val only if they did. None: not measured.
        """
        return [*_rows(self)]

    def to_csv(self) -> str:
        """Return the content of results.csv, which is `trials_table`."""
        text, rows = io.StringIO(), self.trials_table()
        values = ((show_value(v) if name in self.varied else v for name, v in row.items()) for row in rows)
        cells = ([no_formula(value) if isinstance(value, str) else value for value in row] for row in values)
        csv.writer(text, lineterminator="\n").writerows([list(rows[0]), *cells])
        return text.getvalue()

    def write(self) -> None:
        """Write results.json and results.csv to the study's folder. Raises UserError if that fails."""
        write_json(self.path / "results.json", self.to_dict())
        write_atomically(self.path / "results.csv", lambda file: file.write(self.to_csv().encode()))

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report as one HTML file, or as a figure of the verdicts if the name ends with .svg, .pdf or .png;
        returns its path, whose content a notebook shows. The default is report.html in the study's folder, or
        report-dpn.html with the reference dpn.

        results.json and results.csv, which are always against base, are written too; failing to write them is only a
        warning if the report goes elsewhere. Raises UserError if the report cannot be written.
        """
        try:
            self.write() if self.base.name == BASE else None
        except UserError as error:
            if path is None:
                raise
            warnings.warn(f"{error} The report is of what results.json would hold.", stacklevel=2)
        return VIEWS["html"](self, path)

    def paper(self, folder: str | Path) -> Path:
        """Write what a paper in LaTeX needs to a folder, which it returns: table.tex, methods.tex, refs.bib, and
        main.tex, which shows them, if there is none. Raises UserError rather than replace files of others."""
        written: Path = VIEWS["paper"](self, folder)
        return written


def read_answer(folder: StudyFolder, facts: Facts, settings: Settings | None = None, reference: str = BASE) -> Answer:
    """Read the answer from a study's folder, finished or not; a damaged trial is reported in it.

    reference: the arm that the others are compared with. Raises UserError if a file that the whole answer depends on
    is damaged, or the study does not have the arm.
    """
    with folder.naming_damage():
        settings = with_begun_seeds(folder, facts, settings or facts.study())
        evaluated, first = evaluated_of(folder, facts), settings.sweep.points[0]
        models = {cell.arm.name: facts.models[cell.name] for cell in settings.cells_at(first)}
    _check_reference(settings, reference)
    state = StudyState(folder, settings, evaluated)
    taken, is_of_one_base = tuple(looks(state)), "base" not in first.to_dict()
    records, curves = with_curves(state, _without_spare(state, taken))
    decision, questions = settings.design.questions(state, taken, reference)
    (first_name, headline), costs = next(iter(questions.items())), _costs(folder, settings, reference)
    if is_of_one_base:  # several may differ in what an arm brings along
        remarks = remarks_on_controls(settings.arms, models[BASE].config, decision)
        questions[first_name] = headline = headline.with_remarks(remarks)
    base_cost, arm_costs = costs[first] if is_of_one_base else (None, {})
    arms = {
        arm.name: arm_answer(state, models[arm.name], records, arm, decision, arm_costs) for arm in settings.every_arm
    }
    base = arms.pop(reference)
    doubts = (*planning_doubts(state), *outcome_doubts(headline.decision(decision), base.counted, curves))
    state.enter_look()
    of_facts = ("created", "command", "data", "settings", "resolved", "environment")
    return Answer(
        **{name: getattr(facts, name) for name in of_facts},
        metric=settings.measure.metric,
        splits=state.splits if any(record.images for record in records.values()) else state.splits[-1:],
        margin=settings.margin,
        base=base,
        arms=tuple(arms.values()),
        decision=decision,
        questions={**questions, **_confirmed(folder, headline)},
        complete=_is_complete(state, {arm for look in taken for arm in look.stopped}),
        warnings=(*doubts, *facts.data.get("warnings", ()), *facts.warnings, *outcomes(state)),
        doubts=doubts,
        other_metrics={name: metric_called(name) for arm in (base, *arms.values()) for name in arm.other_metrics},
        base_cost=base_cost,
        sweep=tuple(setting_answer(state, point, *costs[point]) for point in settings.sweep.points if point),
        looks=taken,
        tuned=settings.tune.to_dict() or None,
        curves=curves,
        samples=tuple(folder.samples()),
        path=folder.path,
    )


def _check_reference(settings: Settings, reference: str) -> None:
    if reference not in (names := [arm.name for arm in settings.every_arm]):
        raise UserError(f"The study does not have an arm {reference!r}. {nearest(reference, names)}")
    if reference != BASE:
        settings.refuse("reference")


def _without_spare(state: StudyState, taken: Sequence[Look]) -> list[Trial]:
    """Take the trials that no look counts for unfinished: whether one has ended depends on the time that trials take.
    Returns them."""
    for trial in (spare := spare_trials(state, taken)):
        record = state.answered[trial]
        place = record.folder, record.point, record.setting
        state.answered[trial] = TrialRecord(record.arm, record.seed, "unfinished", *place)
    return spare


def _is_complete(state: StudyState, stopped: Set[str]) -> bool:
    ended = all(record.ended or state.arms_of(trial) <= stopped for trial, record in state.records.items())
    return not state.settings.spare and (ended or 0 < len(stopped) == len(state.settings.arms))


def _costs(folder: StudyFolder, settings: Settings, reference: str) -> Costs:
    """The costs of arms, which are ratios to base; none beside another reference."""
    if reference != BASE:
        return {point: (None, {}) for point in settings.sweep.points}
    return read_costs(folder, settings)[1]


def _confirmed(folder: StudyFolder, headline: Question) -> dict[str, Question]:
    """Read the effect of the best combination on fresh seeds; empty unless it was trained on all of them."""
    name = "+".join(headline.together)
    try:
        facts = (confirmed := folder.confirmation(name)).facts() if name else None
        answer = read_answer(confirmed, facts) if facts else None
    except UserError as error:  # the study itself is not damaged
        warnings.warn(f"What was confirmed is not known: {error}", stacklevel=3)
        return {}
    effect = answer.effects.get(name) if answer and answer.complete else None
    return {"confirmed": confirmation(effect, BASE)} if effect else {}


def _rows(answer: Answer) -> Iterator[dict[str, Any]]:
    metric, tuned = answer.metric, list(answer.tuned or {})
    scale, unit = (POINTS_PER_FRACTION, "_points") if metric.unit == "%" else (1, "")
    bases = {(str(trial.setting), trial.seed): trial.score(metric.name) for trial in answer.base.counted}
    for arm in answer.every_arm:
        for trial in arm.trials:
            row = {**trial.setting, "arm": arm.name, "changes": arm.changes}
            if tuned:
                row |= {name: trial.point[name] for name in tuned}
                row[f"val_{metric.name}"] = trial.score(metric.name) if trial.for_tuning else None
            metrics = {} if trial.for_tuning else trial.metrics
            score, base = metrics.get(metric.name), bases.get((str(trial.setting), trial.seed))
            difference = None
            if arm is not answer.base and score is not None and base is not None:
                difference = scale * (score - base)
            yield {
                **row,
                "seed": trial.seed,
                "status": trial.status,
                **{name: metrics.get(name) for name in (metric.name, *answer.other_metrics)},
                f"difference{unit}": difference,
                "steps_to_base": trial.steps_to_base,
                "wall_s": trial.wall_s,
                "folder": trial.folder,
                "reused": trial.reused,
            }


def _plain(value: Any) -> Any:
    """Convert to what JSON returns: None if not finite, fields as keys, without fields that only the report needs."""
    if isinstance(value, Decision | Effect | Factorial | Question):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.metadata.get("json", True)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
