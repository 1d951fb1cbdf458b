"""Caveats of a study, to know before acting on a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator

import numpy as np

from vitmods.stats.decision import Decision
from vitmods.stats.fit import FEW_SEEDS
from vitmods.stats.sample_size import detectable, finest, images_for
from vitmods.stats.sequential import LAST_LEVEL, LOOK_SEEDS
from vitmods.stats.verdict import POINTS_PER_FRACTION
from vitmods.study.settings import MARGINS
from vitmods.study.state import StudyState, TrialRecord
from vitmods.tasks.metrics import Metric
from vitmods.util.text import about, listing

UNEQUAL = 3.0  # ratio of two arms' spreads
LAST = 0.2  # of a training
FEW_EVALUATIONS = 5


def outcome_doubts(decision: Decision, base: Iterable[TrialRecord], curves: Metric | None) -> Iterator[str]:
    """Caveats of the scores. `base` are its trials; `curves` is the metric of their learning curves."""
    # Arms that vary more or less than base; with fewer seeds, the decision itself reports uncertain intervals.
    ratios = {arm: effect.spread_ratio for arm, effect in decision.effects.items() if effect.n >= FEW_SEEDS}
    if more := [f"{arm} {ratio:.2g} times" for arm, ratio in ratios.items() if ratio > UNEQUAL]:
        yield (
            f"From seed to seed {decision.base} varies less than some arms: {listing(more)} as much. A single training "
            "of such an arm may end far from its mean."
        )
    if less := [arm for arm, ratio in ratios.items() if ratio < 1 / UNEQUAL]:
        yield (
            f"From seed to seed {decision.base} varies more than {UNEQUAL:g} times as much as {listing(less)}: its own "
            "trials are what makes intervals wide. Look at its scores of every seed."
        )
    yield from _few_images(decision)
    if curves is not None:
        yield from _still_gaining(list(base), curves)


def planning_doubts(state: StudyState) -> Iterator[str]:
    """Caveats of the plan: what was changed after scores were seen, is damaged, or is too good to be reported."""
    yield from state.earlier.doubts
    for record in state.records.values():
        if record.status == "damaged":
            yield f"{record} is damaged and counts as missing: {record.message}"
    for selection in state.selections.values():
        if before := state.chosen_before(selection):
            yield (
                f"{selection.arm.name}: {selection.chosen} is chosen now; for an earlier choice, with other seeds, "
                f"values or metric, {listing([*map(str, before)])} has been evaluated on {state.splits[-1]} too."
            )
    seen: dict[str, set[str]] = {}
    for record in state.records.values():
        for name, value in record.environment.items():
            seen.setdefault(name, set()).add(f"{name} {value}")
    if several := [" and ".join(sorted(values)) for values in seen.values() if len(values) > 1]:
        yield f"The trials were not all run alike ({'; '.join(several)}): small differences may come from that."


def _few_images(decision: Decision) -> Iterator[str]:
    """Test images that cannot resolve differences as small as the margin, however many seeds there are."""
    if decision.generalize == "seeds":
        return
    effects = [e for e in decision.effects.values() if e.images_sd > 0 and e.margin > 0 and e.sd > 0]
    if not effects:
        return
    middle = sorted(effects, key=lambda effect: effect.images_sd)[len(effects) // 2]
    resolved = finest(middle.images_sd, middle.family, max(middle.alpha, LAST_LEVEL))
    unit = f" {middle.shown_unit}".rstrip()
    if resolved < middle.margin:
        return
    enough = images_for(middle.margin, middle.sd, middle.images_sd, middle.images, middle.family)
    if enough is None:
        seeds = detectable(middle.family, LOOK_SEEDS[-1], LAST_LEVEL).equivalent * middle.sd
        more = "More images do not help"
        if resolved > seeds:  # images are the larger limit
            larger = middle.test_images(about(middle.images * (resolved / seeds) ** 2))
            more = f"Beyond about {larger}, more do not help"
        remedy = (
            f"{more}: trials vary by {middle.sd:.2g}{unit}, so {LOOK_SEEDS[-1]} seeds resolve only {seeds:.2g}{unit}"
        )
    else:
        remedy = (
            f"About {middle.test_images(enough)} could, with up to {LOOK_SEEDS[-1]} seeds. Or restrict the claim to "
            "this test set (`--generalize seeds`)"
        )
    yield (
        f"Effects within the margin of {middle.margin:g}{unit} cannot be resolved with "
        f"{middle.test_images(middle.images)}, which resolve {resolved:.2g}{unit} at best. {remedy}."
    )


def _still_gaining(trials: list[TrialRecord], metric: Metric) -> Iterator[str]:
    """Base's mean slope over the last fifth of its training, beyond two standard errors and a margin."""
    gains = []
    for trial in trials:
        step, score = np.array(trial.curve.step, float), np.array(trial.curve.score, float)
        if trial.status != "finished" or len(step) < FEW_EVALUATIONS:
            continue
        late = step >= (1 - LAST) * step[-1]
        if late.sum() >= 2 and np.isfinite(score[late]).all():
            gains.append(float(np.polyfit(step[late], score[late], 1)[0] * LAST * step[-1]))
    if len(gains) < 2:
        return
    scale = (POINTS_PER_FRACTION if metric.unit == "%" else 1.0) * (1 if metric.higher_is_better else -1)
    mean = scale * statistics.fmean(gains)
    error = abs(scale) * statistics.stdev(gains) / math.sqrt(len(gains))
    if mean > max(MARGINS[metric.unit], 2 * error):
        unit = "points" if metric.unit == "%" else metric.unit
        yield (
            f"Base was still gaining when training ended: {mean:.2g} {unit}".rstrip()
            + f" of validation {metric.title} over the last fifth. Arms may rank differently when trained longer."
        )
