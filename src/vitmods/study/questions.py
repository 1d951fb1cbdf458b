"""What is asked of a study's finished trials: their scores as `vitmods.stats` reads them, decisions, the looks at which
arms stop, and the questions that a report shows.

A fixed study is looked at once, when its seeds are done. One that runs until it is decided is looked at after 4, 5, 6,
8, ... seeds, each time at a level that keeps false claims of the whole study at 5 %. Looks follow from the scores
alone, so a study that was killed or extended has the same ones. A factorial study is looked at after 2, 3, 4, 6 and 8
seeds, and stops as a whole, since every run informs every change.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from vitmods.stats.criteria import Criteria
from vitmods.stats.decide import decide_table
from vitmods.stats.decision import Decision, beats_both, of_both
from vitmods.stats.design import Design
from vitmods.stats.factorial import LOOK_LEVEL, Factorial, detectable, factorial
from vitmods.stats.factorial import LOOK_SEEDS as FACTORIAL_LOOKS
from vitmods.stats.read import Table
from vitmods.stats.sample_size import Forecast, forecast
from vitmods.stats.sequential import LOOK_SEEDS
from vitmods.stats.settings import OverSettings, over_settings
from vitmods.stats.verdict import FRACTION, Effect
from vitmods.study.arms import BASE
from vitmods.study.cells import Trial
from vitmods.study.grid import AS_IS, Point
from vitmods.study.settings import Settings
from vitmods.study.state import HIDDEN, StudyState, TrialRecord, evaluated_of
from vitmods.study.store import StudyFolder
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.text import listing, plural


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
    criteria = _criteria(state, seeds, base, LOOK_SEEDS)

    def against(beside: str = "") -> Decision:
        return decide_table(_tables(state, seeds, [setting], base, without, beside)[setting], criteria, frozen)

    decision = against()
    for (point,), arms in _beside(state, [setting], base).items():
        compared = [arm for arm in arms if arm in decision.effects and arm not in (frozen or ())]
        decision = beats_both(decision, against(arms[0]), compared, str(point)) if compared else decision
    return decision


def factorial_at(state: StudyState, seeds: Sequence[int], setting: Point = AS_IS) -> Factorial:
    """Decide on the changes of a factorial study, on average over the other changes."""
    assert state.settings.design is not None
    table = _tables(state, seeds, [setting])[setting]
    return factorial(table, state.settings.design.design, _criteria(state, seeds, BASE, FACTORIAL_LOOKS))


def over_settings_at(state: StudyState, base: str = BASE) -> OverSettings:
    """Decide on every arm on average over the settings of a sweep, and under each."""
    seeds, points = state.settings.seeds, state.settings.sweep.points
    criteria = _criteria(state, seeds, base)

    def against(beside: str = "") -> OverSettings:
        tables = _tables(state, seeds, points, base, beside=beside)
        return over_settings({str(point): table for point, table in tables.items()}, criteria)

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
    tables: dict[str, Table] = {}
    criteria, fingerprints, looked = Criteria(), set(), [0]
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
        if name in tables or images in fingerprints:
            raise UserError(f"Two studies are of {name}: give one study for each data set.")
        fingerprints.add(images)
        tables[name] = _tables(state, settings.seeds, [AS_IS])[AS_IS]
        looked.append(state.earlier.most or 0)
        criteria = replace(_criteria(state, settings.seeds), looked=max(looked) or None)
    return over_settings(tables, criteria, shared_images=False)


def _beside(state: StudyState, points: Sequence[Point], base: str) -> dict[tuple[Point | None, ...], list[str]]:
    """The arms by their points under each setting that base did not choose (None: it did)."""
    arms: dict[tuple[Point | None, ...], list[str]] = {}
    for arm in state.settings.arms if base == BASE and state.matched else ():
        trials = [state.beside(point, arm.name, state.settings.seeds[0]) for point in points]
        arms.setdefault(tuple(trial.point if trial else None for trial in trials), []).append(arm.name)
    return {chosen: names for chosen, names in arms.items() if any(chosen)}


def _criteria(state: StudyState, seeds: Sequence[int], base: str = BASE, looks: Sequence[int] = ()) -> Criteria:
    """What the study settled before its scores were seen. `looks`: at which one that runs until it is decided is read.

    The family is the arms that were planned or shown; all pairs for a reference that was chosen after the scores.
    Verdicts are provisional without all seeds that may be run, as long as their number is not settled.
    """
    settings, metric = state.settings, state.settings.measure.metric
    return Criteria(
        settings.margin, FRACTION if metric.unit == "%" else metric.unit, metric.higher_is_better, settings.generalize,
        family=max(len(settings.arms), state.earlier.family) if base == BASE else "pairs",
        most_seeds=min(max(len(settings.seeds), looks[0]), looks[-1]) if looks and settings.until_decided else None,
        planned=max(len(seeds), state.images.plan.spare), looked=state.earlier.most,
    )  # fmt: skip


def _tables(
    state: StudyState, seeds: Sequence[int], points: Sequence[Point], base: str = BASE, without: Container[str] = (),
    beside: str = "",
) -> dict[Point, Table]:  # fmt: skip
    """Return the table of each setting. An arm does not have trials before its point is chosen. `beside`: an arm at
    whose point base is read."""
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

    def score(trial: TrialRecord) -> ArrayLike | None:
        of_images = trial.images if trial.status == "finished" and has_images else None
        return trial.score(metric.name) if of_images is None else of_images.values

    return {
        setting: Table.of(
            {arm: {trial.seed: score(trial) for trial in trials} for arm, trials in arms.items()}, base,
            {
                arm: {trial.seed: trial.message or "diverged" for trial in trials if trial.status == "diverged"}
                for arm, trials in arms.items()
            },
            {arm: {trial.seed for trial in trials if trial.constant} for arm, trials in arms.items()},
            resampled=state.images.sizes, chance=state.images.constant.get(metric.name),
            level=state.images.level.get(str(setting)) if metric.name == "top1" else None,
            groups=state.images.groups if has_images and finished else None,
        )
        for setting, arms in by_setting.items()
    }  # fmt: skip


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


@dataclass(frozen=True)
class Question:
    """Something asked of a study's finished trials. The intervals of its effects hold together.

    label:    what an effect is of, in the singular
    meaning:  what an effect is, as in "Effects are differences to base"
    groups:   heading -> label -> Effect; without headings it is empty
    title:    of its section in a report; empty for the first question, the headline
    against:  the arm that its arms are compared with; empty: its labels are not arms
    scope:    where its verdicts hold, as a sentence begins
    facts:    of all its intervals, beside their level and claim
    notes:    failures first
    remarks:  label -> what its effect does not say alone; part of the headline
    methods:  how the trials were planned for it, in a sentence for a paper
    together: the labels that are predicted to be best together, where effects add up
    predicts: what that is chosen by
    beside:   the question in whose table this one is a column, under its title
    has_fresh_seeds: whether it confirms something on seeds that the headline does not have
    is_folded: whether readers open it themselves
    details:  more facts for results.json
    design:   of a factorial study, for the precision of more seeds
    """

    label: str
    meaning: str
    groups: Mapping[str, Mapping[str, Effect]]
    title: str = ""
    against: str = ""
    scope: str = ""
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)
    methods: str = ""
    together: tuple[str, ...] = ()
    predicts: str = ""
    beside: str = field(default="", metadata=HIDDEN)
    has_fresh_seeds: bool = field(default=False, metadata=HIDDEN)
    is_folded: bool = field(default=False, metadata=HIDDEN)
    details: Mapping[str, Any] = field(default_factory=dict)
    design: Design | None = field(default=None, metadata=HIDDEN)

    @property
    def effects(self) -> dict[str, Effect]:
        """Label -> Effect; under a heading the label is `dpn at epochs=30`."""
        pairs = ((group, *effect) for group, effects in self.groups.items() for effect in effects.items())
        return {f"{label} at {group}" if group else label: effect for group, label, effect in pairs}

    @property
    def one(self) -> str:
        """`an arm`"""
        return f"{'an' if self.label[0] in 'aeiou' else 'a'} {self.label}"

    @property
    def has_headings(self) -> bool:
        return "" not in self.groups

    @property
    def is_shown(self) -> bool:
        """Whether a report has a table of it."""
        return any(self.groups.values()) and not (self.beside or self.has_fresh_seeds)

    def to_dict(self) -> dict[str, Any]:
        """For results.json: all but what only a report needs."""
        names = [field.name for field in fields(self) if field.metadata.get("json", True)]
        return {"effects": self.effects, **{name: getattr(self, name) for name in names if name != "groups"}}

    def decision(self, of_arms: Decision) -> Decision:
        """What holds for all effects, which are those of the arms unless the labels are others."""
        if self.against:
            return of_arms
        notes = (*self.notes, *filter(None, [self.predicts]))
        cleared: dict[str, Any] = {"best": (), "ruled_out": (), "pairs": {}, "look": self.facts[0]}
        return replace(of_arms, effects=self.effects, family=len(self.effects), notes=notes, **cleared)

    def forecast(self, effect: Effect) -> Forecast | None:
        """What more seeds would decide; None for a decided effect."""
        if self.design is None:
            return forecast(effect)
        scale = math.sqrt(len(self.design.runs) / (2 * float(self.design.relative_variance.max())))
        halves = {n: scale * detectable(self.design, n, LOOK_LEVEL).half for n in FACTORIAL_LOOKS if n > effect.n}
        return forecast(
            effect, {most: {n: half for n, half in halves.items() if n <= most} for most in FACTORIAL_LOOKS[-3:]}
        )


def questions_of(state: StudyState, taken: Sequence[Look], base: str = BASE) -> tuple[Decision, dict[str, Question]]:
    """Return the decision on every arm against `base`, and the questions by name; the first is the headline.

    What a design asks is listed here, and nowhere else: reports show what they find.
    """
    settings = state.settings
    if settings.sweep:
        over = over_settings_at(state, base)
        names = [str(point) for point in settings.sweep.points]
        return over.decision, questions_over(over, f"{plural(len(names), 'setting')} ({'; '.join(names)})")
    last = taken[-1].decision if taken else None
    if base == BASE and isinstance(last, Decision):
        decision = last
    else:
        decision = decision_against(state, base, {arm for look in taken for arm in look.stopped})
    arms = arms_question(decision)
    if settings.design is None:
        return decision, {"arms": arms}
    changes = last if isinstance(last, Factorial) else factorial_at(state, settings.seeds)
    family = "These intervals are a separate family, with fewer trials per interval than for a change."
    runs = replace(arms, title=f"Every run against {base}", notes=(family,), is_folded=True)
    return decision, {**_of_changes(changes), "arms": runs}


def arms_question(decision: Decision) -> Question:
    """Each arm against base."""
    return Question(
        "arm",
        f"differences to {decision.base}",
        {"": decision.effects},
        against=decision.base,
        facts=(decision.look,),
        notes=decision.notes,
    )


def questions_over(over: OverSettings, under: str) -> dict[str, Question]:
    """The average over several settings or data sets, each of them, and how far it is from the average.

    under: `2 settings (epochs=10; epochs=30)`
    """
    arms, (count, _, _) = arms_question(over.decision), under.partition(" (")

    def by_setting(effects: Mapping[str, Mapping[str, Effect]]) -> dict[str, dict[str, Effect]]:
        names = dict.fromkeys(name for of_arm in effects.values() for name in of_arm)
        return {name: {arm: of_arm[name] for arm, of_arm in effects.items()} for name in names}

    dependent = {arm: over.range(arm) for arm in over.each if over.depends(arm)}
    others = [arm for arm in over.each if arm not in dependent]
    notes = [f"The effect of {listing([*dependent])} depends on the setting."] * bool(dependent)
    notes += [f"No difference between settings was shown for {listing(others)}."] * bool(others)
    average = replace(
        arms,
        meaning=f"{arms.meaning}, on average over the settings",
        scope=f"on average over {count}",
        remarks=dependent,
        methods=f"Base and every arm were trained under {under}; effects are averages over the settings.",
    )
    family = "Simultaneous 95 % intervals over all settings, a separate family from the averages."
    settings = replace(
        arms,
        groups=by_setting(over.each),
        title="Under each setting",
        facts=(),
        notes=(family, *notes, "The claims are limited to these settings."),
    )
    departures = Question(
        "arm",
        "differences between an effect and its average over the settings",
        by_setting(over.departures),
        title="minus its average",
        beside="settings",
    )
    return {"arms": average, "settings": settings, "departures": departures}


def _of_changes(changes: Factorial) -> dict[str, Question]:
    """The changes of a factorial study, and what two of them do together."""
    runs, fewest = len(changes.design.runs), min((effect.n for effect in changes.effects.values()), default=0)
    known = ("effects", "pairs", "notes", "best", "look")
    first = Question(
        "change",
        "means of the runs with a change minus those without",
        {"": changes.effects},
        scope="on average over the other changes on and off",
        facts=(changes.look, f"{runs} runs, {plural(fewest, 'seed')} each"),
        notes=changes.notes,
        methods=f"Changes were switched on and off together in {runs} combinations (a factorial design), base among "
        "them.",
        together=changes.best,
        predicts=changes.prediction,
        details={name: value for name, value in changes.to_dict().items() if name not in known},
        design=changes.design,
    )
    pairs = Question(
        "pair",
        "half of how much one change alters the other's effect; above zero, the two work better together",
        {"": changes.pairs},
        title="Interactions",
        notes=(
            f"Simultaneous 95 % intervals for these {len(changes.pairs)} pairs.",
            *["Pairs in one row cannot be separated."] * bool(changes.design.aliases),
        ),
    )
    return {"changes": first, "pairs": pairs}


def confirmation(effect: Effect, base: str) -> Question:
    """The best combination of a factorial study against base, on other seeds."""
    return Question(
        "combination",
        f"differences to {base}",
        {"": {effect.arm: effect}},
        title="On fresh seeds",
        against=base,
        scope=f"on {effect.n} fresh seeds",
        methods=f"The best combination, {effect.arm}, was then compared with {base} on {effect.n} fresh seeds.",
        has_fresh_seeds=True,
    )


def decision_against(state: StudyState, base: str, stopped: Container[str]) -> Decision:
    """Compare with an arm, from all trials. Arms that stopped before the first look at all pairs, which is later than
    that at a known base, do not hold up the others; they have no interval."""
    early: dict[str, Effect] = {}
    while True:
        decision = decision_at(state, state.settings.seeds, base=base, frozen=early)
        waiting = [effect for effect in decision.effects.values() if effect.arm in stopped and effect.arm not in early]
        if not waiting or any(not math.isnan(effect.low) for effect in decision.effects.values()):
            return decision
        fewest = min(effect.n for effect in waiting)
        early |= {effect.arm: effect for effect in waiting if effect.n == fewest}
