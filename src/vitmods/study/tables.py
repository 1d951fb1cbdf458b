"""The scores of a study's finished trials as `vitmods.stats` reads them, and what it decides on them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from vitmods.stats.criteria import Criteria
from vitmods.stats.decide import decide_table
from vitmods.stats.decision import Decision, beats_both, of_both
from vitmods.stats.read import Table
from vitmods.stats.sequential import LOOK_SEEDS
from vitmods.stats.settings import OverSettings, over_settings
from vitmods.stats.verdict import FRACTION, Effect
from vitmods.study.arms import BASE
from vitmods.study.grid import AS_IS, Point
from vitmods.study.state import StudyState, TrialRecord
from vitmods.study.store import StudyFolder
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.text import listing


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
    criteria = criteria_of(state, seeds, base, LOOK_SEEDS)

    def against(matched_to: str = "") -> Decision:
        return decide_table(tables_of(state, seeds, [setting], base, without, matched_to)[setting], criteria, frozen)

    decision = against()
    for (point,), arms in _matched_points(state, [setting], base).items():
        compared = [arm for arm in arms if arm in decision.effects and arm not in (frozen or ())]
        decision = beats_both(decision, against(arms[0]), compared, str(point)) if compared else decision
    return decision


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


def over_settings_at(state: StudyState, base: str = BASE) -> OverSettings:
    """Decide on every arm on average over the settings of a sweep, and under each."""
    seeds, points = state.settings.seeds, state.settings.sweep.points
    criteria = criteria_of(state, seeds, base)

    def against(matched_to: str = "") -> OverSettings:
        tables = tables_of(state, seeds, points, base, matched_to=matched_to)
        return over_settings({str(point): table for point, table in tables.items()}, criteria)

    over = against()
    for chosen, arms in _matched_points(state, points, base).items():
        other = against(arms[0])
        each = dict(over.each)
        for arm, (point, at) in product(arms, zip(points, chosen, strict=True)):
            if at:
                effect, matched = each[arm][str(point)], other.each[arm][str(point)]
                each[arm] = {**each[arm], str(point): of_both(effect, matched, str(at))}
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
        settings = facts.study()
        state = StudyState.of(folder, facts, settings)
        if not settings.is_plain or settings.until_decided:
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
        tables[name] = tables_of(state, settings.seeds, [AS_IS])[AS_IS]
        looked.append(state.earlier.most or 0)
        criteria = replace(criteria_of(state, settings.seeds), looked=max(looked) or None)
    return over_settings(tables, criteria, shared_images=False)


def _matched_points(state: StudyState, points: Sequence[Point], base: str) -> dict[tuple[Point | None, ...], list[str]]:
    """The arms by their points under each setting that base did not choose (None: it did)."""
    arms: dict[tuple[Point | None, ...], list[str]] = {}
    for arm in state.settings.arms if base == BASE and state.matched else ():
        trials = [state.matched_to(point, arm.name, state.settings.seeds[0]) for point in points]
        arms.setdefault(tuple(trial.point if trial else None for trial in trials), []).append(arm.name)
    return {chosen: names for chosen, names in arms.items() if any(chosen)}


def criteria_of(state: StudyState, seeds: Sequence[int], base: str = BASE, looks: Sequence[int] = ()) -> Criteria:
    """What the study settled before its scores were seen. `looks`: at which one that runs until it is decided is read.

    The family is the arms that were planned or shown; all pairs for a reference that was chosen after the scores.
    Verdicts are provisional without all seeds that may be run, as long as their number is not settled.
    """
    settings, metric = state.settings, state.settings.measure.metric
    return Criteria(
        settings.margin, FRACTION if metric.unit == "%" else metric.unit, metric.higher_is_better, settings.generalize,
        family=max(len(settings.arms), state.earlier.family) if base == BASE else "pairs",
        most_seeds=min(max(len(settings.seeds), looks[0]), looks[-1]) if looks and settings.until_decided else None,
        planned=max(len(seeds), settings.spare), looked=state.earlier.most,
    )  # fmt: skip


def tables_of(
    state: StudyState, seeds: Sequence[int], points: Sequence[Point], base: str = BASE, without: Container[str] = (),
    matched_to: str = "",
) -> dict[Point, Table]:  # fmt: skip
    """Return the table of each setting. An arm does not have trials before its point is chosen. `matched_to`: an arm at
    whose point base is read."""
    settings, metric, known = state.settings, state.settings.measure.metric, state.records
    by_setting: dict[Point, dict[str, list[TrialRecord]]] = {}
    for point in points:
        for arm in (arm.name for arm in settings.every_arm if arm.name not in without):
            of_arm = dict.fromkeys([*seeds, *range(settings.known)]) if arm == BASE else seeds
            trials = [
                (matched_to and arm == BASE and state.matched_to(point, matched_to, seed))
                or state.trial(point, arm, seed)
                for seed in of_arm
            ]
            by_setting.setdefault(point, {})[arm] = [known[trial] for trial in trials if trial in known]
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
