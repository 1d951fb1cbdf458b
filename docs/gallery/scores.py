"""The scores that the intervals of a study are made from, so that anyone can recompute them: scores/NAME.json.

One file has the score of each test image of every trial that an effect is read from: right or wrong as packed bits,
other scores as numbers (float64, little-endian), both in base64; or the one score of a trial without scores of images.
Its `readings` say which trials each effect is of, and what was settled before; of a factorial study also which changes
are on in each run, and which runs are left out since a trial failed. `recompute.py` makes the effects from it, without
vitmods.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import recompute

from vitmods.stats.gains import Gains, gains_of
from vitmods.stats.read import in_common
from vitmods.stats.runs import FactorialRuns
from vitmods.stats.settings import weighted
from vitmods.stats.verdict import POINTS_PER_FRACTION, Effect
from vitmods.study import Answer
from vitmods.study.arms import BASE
from vitmods.study.designs.factorial import FactorialDesign
from vitmods.study.grid import AS_IS
from vitmods.study.state import StudyState
from vitmods.study.store import StudyFolder
from vitmods.study.tables import criteria_of, tables_of

FOLDER = Path(__file__).resolve().parent / "scores"


def store(run: Path, answers: Mapping[str, Answer], path: Path, numerics: object) -> str:
    """Write the scores of a study's effects against each reference (base and others); return why it cannot.

    A study is recomputed from its table of trials; not one whose arms were tuned, nor one with folds, a known base or
    several data sets. Of a factorial study, the effects of its changes are.
    """
    try:
        folder = StudyFolder(run)
        folder.refresh()
        facts = folder.known_facts()
        state = StudyState.of(folder, facts)
        study = scores_of(state, facts.data, answers, numerics)
        found = recompute.effects(study)
    except (KeyError, ValueError, IndexError) as error:
        return f"its scores are of another form ({error})"
    if not study["readings"]:
        return "none of its effects has an interval"
    for reference, answer in answers.items():
        for name, effect in effects_of(answer, reference).items():
            shown = (effect.effect, *effect.interval)
            if name not in found or not np.allclose(found[name], shown, rtol=0, atol=recompute.TOLERANCE):
                return f"{name} is {shown}, and {found.get(name)} recomputed"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(study, indent=1) + "\n", encoding="utf-8")
    return ""


def effects_of(answer: Answer, reference: str = BASE) -> dict[str, Effect]:
    """The effects of an entry that have an interval, by the names that they have there: of the headline, against
    another reference, and under each setting of a sweep."""
    suffix = "" if reference == BASE else f" against {reference}"
    found = {f"{name}{suffix}": effect for name, effect in answer.headline.effects.items()}
    if reference == BASE:
        for setting, effects in answer.each.items():
            found |= {f"{arm} at {setting}": effect for arm, effect in effects.items() if setting}
    return {name: effect for name, effect in found.items() if math.isfinite(effect.interval[0])}


def scores_of(
    state: StudyState, data: Mapping[str, Any], answers: Mapping[str, Answer], numerics: object
) -> dict[str, Any]:
    """The content of the file."""
    settings, points = state.settings, state.settings.sweep.points if answers[BASE].sweep else [AS_IS]
    tables = dict(zip(points, in_common([*tables_of(state, settings.seeds, points).values()]), strict=True))
    first = tables[points[0]]
    is_bits = first.images is not None and all(
        np.isin(table.images[np.isfinite(table.images)], (0, 1)).all() for table in tables.values()
    )
    criteria = criteria_of(state, settings.seeds)
    groups = None if first.groups is None else np.unique(np.asarray(first.groups)[first.kept], return_inverse=True)[1]
    return {
        "metric": settings.measure.metric.name,
        "unit": criteria.unit,
        "margin": criteria.margin,
        "data": {"name": data["name"], "splits": list(state.splits), "fingerprint": data["fingerprint"]},
        "numerics": numerics,
        "scale": criteria.sign * (POINTS_PER_FRACTION if criteria.is_fraction else 1),
        "kind": "bits" if is_bits else "numbers",
        "images": 1 if first.images is None else first.images.shape[-1],
        "other_images": criteria.generalize == "images" and first.images is not None,
        "groups": None if groups is None else groups.tolist(),
        "readings": [
            reading for reference, answer in answers.items() for reading in _readings(state, answer, reference)
        ],
        "scores": {
            str(point): {
                arm: {
                    str(seed): packed(table.trials[a, s] if table.images is None else table.images[a, s], is_bits)
                    for s, seed in enumerate(table.seeds)
                    if np.isfinite(table.trials[a, s])
                }
                for a, arm in enumerate(table.arms)
            }
            for point, table in tables.items()
        },
    }


def packed(scores: Any, is_bits: bool) -> str | float:
    if np.ndim(scores) == 0:
        return float(scores)
    content = np.packbits(scores.astype(bool)) if is_bits else scores.astype("<f8")
    return base64.b64encode(content.tobytes()).decode()


def _readings(state: StudyState, answer: Answer, reference: str) -> Iterator[dict[str, Any]]:
    """Which trials the effects are of: one reading of the table, or one at each look, or one under each setting."""
    if isinstance(state.settings.design, FactorialDesign):
        yield from _reading_of_changes(state, answer, state.settings.design.runs)
        return
    effects, seeds, arms = effects_of(answer, reference), state.settings.seeds, [arm.name for arm in answer.every_arm]
    if answer.sweep:
        points = state.settings.sweep.points
        weights = {"": np.full(len(points), 1 / len(points))} | dict(zip(map(str, points), np.eye(len(points))))
        for part, row in weights.items():
            named = {f"{arm} at {part}" if part else arm: arm for arm in arms}
            yield from _reading(state, seeds, points, row, reference, named, effects)
        return
    named = {arm if reference == BASE else f"{arm} against {reference}": arm for arm in arms}
    last = len(seeds) if not answer.looks else max((effect.n for effect in effects.values()), default=0)
    at = {arm: look.seeds for look in answer.looks for arm in look.stopped} if reference == BASE else {}
    for count in sorted({at.get(arm, last) for arm in arms}):
        chosen = {name: arm for name, arm in named.items() if at.get(arm, last) == count}
        yield from _reading(state, seeds[:count], [AS_IS], np.ones(1), reference, chosen, effects)


def _reading(
    state: StudyState, seeds: Sequence[int], points: Sequence[Any], weights: Any, reference: str,
    chosen: Mapping[str, str], effects: Mapping[str, Effect],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    chosen = {name: arm for name, arm in chosen.items() if name in effects}
    if not chosen:
        return
    tables = in_common([*tables_of(state, seeds, points, reference).values()])
    gains: Gains = weighted([gains_of(table, criteria_of(state, seeds, reference)) for table in tables], weights)
    one, table = effects[next(iter(chosen))], tables[0]
    left_out = (np.isfinite(table.trials) & np.isnan(gains.trials)).any(0)
    yield {
        "effects": chosen,
        "against": reference,
        "settings": {str(point): float(weight) for point, weight in zip(points, weights, strict=True) if weight},
        "arms": list(table.arms),
        "seeds": [seed for seed, is_out in zip(table.seeds, left_out, strict=True) if not is_out],
        "alpha": one.alpha,
        "family": one.family,
        "pairs": reference != BASE,
        "outside": [arm for arm, is_pooled in zip(table.arms, gains.pooled, strict=True) if not is_pooled],
    }


def _reading_of_changes(state: StudyState, answer: Answer, runs: FactorialRuns) -> Iterator[dict[str, Any]]:
    """The runs and seeds that the effects of the changes are of: `10` is a run with the first of two changes."""
    if not (effects := effects_of(answer)):
        return
    one, seeds = next(iter(effects.values())), state.settings.seeds
    table = tables_of(state, seeds[: answer.looks[-1].seeds] if answer.looks else seeds, [AS_IS])[AS_IS]
    gains = gains_of(table, criteria_of(state, seeds))
    failed = gains.failures.any(-1) & (np.arange(len(table.arms)) > 0)  # where base failed, its seed is left out
    complete = np.isfinite(gains.trials[~failed]).all(0)
    yield {
        "effects": {name: name for name in effects},
        "changes": list(runs.changes),
        "runs": {run: "".join("01"[change in on] for change in runs.changes) for run, on in runs.arms.items()},
        "settings": {str(AS_IS): 1.0},
        "arms": [arm for arm, is_out in zip(table.arms, failed, strict=True) if not is_out],
        "seeds": [seed for seed, is_kept in zip(table.seeds, complete, strict=True) if is_kept][: one.n],
        "alpha": one.alpha,
        "family": one.family,
        "outside": [arm for arm, is_out in zip(table.arms, failed, strict=True) if is_out],
    }
