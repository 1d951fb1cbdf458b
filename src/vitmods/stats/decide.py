"""Decisions: effects with simultaneous intervals and verdicts, from the scores of any trials."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats.criteria import Analysis, Criteria
from vitmods.stats.decision import Decision, Pair
from vitmods.stats.effects import Intervals, Sides, effect_of, has_interval, mean_of
from vitmods.stats.expected import with_expected
from vitmods.stats.fit import FEW_SEEDS, KNOWN_SEEDS, SHARED_SEEDS, Array, Contrasts, Errors, Fit, Mask, contrasts
from vitmods.stats.gains import Gains, gains_of
from vitmods.stats.read import Scores, Table, read_csv
from vitmods.stats.sequential import (
    INTERIM_LEVEL,
    LAST_LEVEL,
    LOOK_SEEDS,
    futile,
    last_look,
    looks,
    nominal_level,
    steps_of,
)
from vitmods.stats.verdict import STOPS, Claim, Effect, Verdict
from vitmods.stats.width import HalfWidth, against_base, critical_value, half_width, over_parts, total_df
from vitmods.util.errors import UserError
from vitmods.util.text import listing, plural

FOLLOWING_CORRELATION = 0.9  # a correlation with base
FEW_GROUPS = 8


def decide(
    scores: Scores | str | Path,
    base: str = "base",
    margin: float = 0.5,
    *,
    unit: str | None = None,
    higher_is_better: bool = True,
    generalize: Claim = "images",
    most_seeds: int | None = None,
    planned: int | None = None,
    looked: int | None = None,
    family: int | Literal["pairs"] | None = None,
    failed: Mapping[str, Mapping[int, str]] | None = None,
    constant: Mapping[str, Container[int]] | None = None,
    chance: float | None = None,
    level: float | None = None,
    groups: ArrayLike | None = None,
    frozen: Mapping[str, Effect] | None = None,
    resampled: tuple[float, float] | None = None,
) -> Decision:
    """Which arms are better or worse than base, with intervals that hold together.

    `scores` maps arm -> seed -> a score, or an array with one score for each test image: the same images in the same
    order everywhere. Or it names a CSV file (`vitmods.stats.read.read_csv`). None is a trial that has not ended, NaN
    one that diverged; `failed` names more of these: arm -> seed -> reason. Arms are compared seed by seed: train base
    and every arm with the same seeds. Where base has 8 seeds or more, some of which no arm has, all of them count.

    - `margin`: the difference that does not matter, in points for a `unit` of "fraction", else in that unit.
    - `unit`: "fraction", "points" or what the scores count. None: fractions, of which none is above 1.
    - `generalize`: verdicts hold for other test images too ("images"), or for these alone ("seeds").
    - `most_seeds`: the maximum of a study that is looked at more than once; None where seeds were fixed before.
    - `planned`: how many seeds a study has whose number was fixed. While trials of an arm are missing, intervals are
      wider, and marked as provisional.
    - `looked`: verdicts of some of these trials were read before, in a study of other arms or seeds: the most seeds
      that were planned or read, times the root of the number of such readings. Intervals are wider, as of one more
      look; `family` counts all arms that were read.
    - `frozen`: arms that stopped at an earlier look, as they were then.
    - `family`: how many arms the study has in all, planned ones included; or "pairs" where base was chosen
      after scores were seen: then intervals hold together over all pairs of arms.
    - `chance`: the score of the best constant prediction, such as the share of the most frequent class for accuracy.
      Where base is not clearly above it, base has not learned: no verdict but `helps` of an arm that has. It also
      determines which trials learned nothing or collapsed. None: 0 for fractions of which more is better; for other
      scores neither is looked for.
    - `level`: what a linear probe of the trained weights that base starts from reaches. Where base is below it by more
      than the margin, training destroys what they hold, and no verdict is given.
    - `constant`: trials that predict the same for every image (arm -> seeds): they failed.
    - `groups`: a label for each image; images with one label are not independent (one patient, one video).
    - `resampled`: (n_test, n_train), where each seed is tested on another part of the images and trained on the rest,
      the same part for all arms (cross-validation). Verdicts then hold for other training sets too, and scores of
      single images are not needed.

    Raises `UserError` for scores that cannot be compared, and for settings outside their range.
    """
    scores = read_csv(scores) if isinstance(scores, str | Path) else scores
    table = Table.of(
        scores, base, failed, constant, resampled=resampled, chance=chance, level=level, groups=groups
    )  # fmt: skip
    criteria = Criteria(margin, unit, higher_is_better, generalize, family, most_seeds, planned, looked)
    decision = decide_table(table, criteria, frozen)
    return dataclasses.replace(decision, notes=(*decision.notes, *_slips(table, unit)))


def _slips(table: Table, unit: str | None) -> Iterator[str]:
    """Name what is likely to be a slip of whoever wrote the scores."""
    alike: dict[str, list[str]] = {}
    for arm in table.arms:
        alike.setdefault(" ".join(arm.casefold().split()), []).append(arm)
    for arms in alike.values():
        if len(arms) > 1:
            names = listing([repr(arm) for arm in arms])
            yield f"{names} differ in case or spaces alone: if they are one arm, give one name"
    if unit in ("points", "%", "percent") and np.nanmax(np.abs(table.trials), initial=0.0) <= 1:
        yield f"all scores are at most 1 {unit}: if they are fractions (0.93), leave the unit out"


def decide_table(table: Table, criteria: Criteria, frozen: Mapping[str, Effect] | None = None) -> Decision:
    """What `decide` does with its arguments."""
    most, full, frozen = criteria.most_seeds, table, frozen or {}
    if table.overlap and (most is not None or table.groups is not None or criteria.generalize == "seeds"):
        raise UserError("resampled goes with a fixed number of seeds and verdicts on other images, without groups.")
    family = criteria.contrasts(len(table.arms) - 1)
    if most is None:
        analysis = criteria.analysis(table.fewest, family)
    else:
        table, n, look = at_look(table, most, frozen)
        looked, last = criteria.looked, LAST_LEVEL if criteria.looked is None else INTERIM_LEVEL
        alpha = nominal_level(max(most, looked or 0), n or LOOK_SEEDS[0], last)
        analysis = Analysis(alpha, family, too_early=n == 0, look=look)
    decision = decision_of(gains_of(table, criteria), criteria, analysis, frozen)
    return dataclasses.replace(decision, notes=(*decision.notes, *_unread(full, table, frozen)))


def _unread(full: Table, read: Table, frozen: Mapping[str, Effect]) -> Iterator[str]:
    """Name trials that ended and that no effect is read from."""
    waits = ~np.isin(full.seeds, read.seeds)
    for arm, ended in zip(full.arms, full.ended):
        if arm not in frozen and (later := int(ended[waits].sum())):
            yield f"{plural(later, 'later seed')} of {arm} not read: they wait for the next look"
    for arm, ended in zip(read.arms, read.ended):
        if alone := int((ended & ~read.ended[0]).sum()):
            yield f"{plural(alone, 'seed')} of {arm} not read: {read.arms[0]} lacks trials with them"


def decision_of(
    gains: Gains, criteria: Criteria, analysis: Analysis, frozen: Mapping[str, Effect] | None = None
) -> Decision:
    """The effects of all arms, and what holds for all of them."""
    fitted, frozen, arms = gains.fit(), frozen or {}, gains.arms
    effects = {arm: frozen.get(arm) or _effect(a, gains, fitted, criteria, analysis) for a, arm in enumerate(arms) if a}
    unstable = {arm for arm, effect in effects.items() if effect.verdict == Verdict.UNSTABLE}
    best, ruled_out, pairs = _compare_all(gains, fitted, criteria, analysis, unstable)
    effects = {arm: frozen.get(arm) or effect for arm, effect in with_expected(effects).items()}
    if not gains.has_learned:
        learned = dict(zip(arms, gains.learned))
        effects = {
            arm: dataclasses.replace(effect, base_learned=False)
            if arm in frozen or (learned[arm] and effect.verdict == Verdict.HELPS)
            else effect.withheld()
            for arm, effect in effects.items()
        }
        best, ruled_out = (), ()
    errors = fitted.errors
    return Decision(
        effects, arms[0], best, ruled_out, pairs, float(np.sqrt(errors.mse)), float(errors.df_error),
        float(errors.seed_share), analysis.family, analysis.alpha, analysis.look, gains.images is None,
        criteria.generalize, tuple(_notes(gains, fitted)), gains.overlap, analysis.provisional,
        criteria.family == "pairs",
    )  # fmt: skip


def at_look(table: Table, most: int, frozen: Mapping[str, Effect]) -> tuple[Table, int, str]:
    """The study at its last complete look, the seeds of that look (0: none is complete), and its name.

    Seeds that ended since that look wait for the next one.
    """
    done = min(int(row.sum()) for arm, row in zip(table.arms, table.ended) if arm not in frozen)
    base = table.ended[0]
    only_base = base & ~table.ended[1:].any(0) & (base.sum() >= KNOWN_SEEDS)  # seeds that no arm has
    n, look = last_look(looks(most, steps_of(int(base.sum()) if only_base.any() else 0)), done)
    if not n:
        return table, 0, look
    kept = only_base | (np.cumsum(~only_base) <= n)
    cut = dataclasses.replace(
        table, seeds=tuple(itertools.compress(table.seeds, kept)), trials=table.trials[:, kept],
        images=None if table.images is None else table.images[:, kept], diverged=table.diverged[:, kept],
        constant=table.constant[:, kept],
    )  # fmt: skip
    return cut, n, look


def _effect(a: int, gains: Gains, fitted: Fit, criteria: Criteria, analysis: Analysis) -> Effect:
    """The effect of the arm in row `a` of the trials."""
    against, part = fitted.against, gains.images_part(a)
    contrast = Contrasts(*(getattr(against, field.name)[..., a - 1] for field in dataclasses.fields(against)))

    def half_of(contrast: Contrasts) -> HalfWidth:
        if criteria.family == "pairs":
            return half_width(*contrast.pooled_or_own, part, analysis.alpha, analysis.family)
        return against_base(contrast, part, analysis.alpha, analysis.family)

    half = half_of(contrast)
    if gains.overlap:
        half = dataclasses.replace(half, total=half_of(over_parts(contrast, gains.overlap)).total)
    n, seeds = int(contrast.seeds), gains.shared(a)
    is_paired = bool(half.shift) or not contrast.knows_more
    of_base = seeds if is_paired else np.isfinite(gains.trials[0])
    means = mean_of(gains.trials[0, of_base]), mean_of(gains.trials[a, seeds])
    failures, ended = (cells[[0, a]].sum(-1).tolist() for cells in (gains.failures, gains.ended))
    effect = effect_of(
        gains.arms[a], (), Intervals(contrast, half, part), Sides(means, failures, ended), gains, criteria, analysis,
        with_interval=has_interval(n, float(fitted.errors.df_error)) and not analysis.too_early,
    )  # fmt: skip
    for end in ("low", "high", "seeds_low", "seeds_high"):
        effect = dataclasses.replace(effect, **{end: min(max(getattr(effect, end), -gains.limit), gains.limit)})
    verdict, notes = effect.verdict, effect.notes
    if verdict in (Verdict.HELPS, Verdict.HURTS) and max(map(abs, effect.interval)) < criteria.margin:
        notes = (*notes, f"{verdict} by less than the margin")
    w = fitted.errors.guarded
    has_ratio = n >= SHARED_SEEDS and len(w) > 2 and w[0] > 0  # base and one arm have one spread between them
    return dataclasses.replace(
        effect, notes=notes,
        spread_ratio=math.sqrt(w[a] / w[0]) if has_ratio else math.nan, correlation=float(fitted.correlation[a - 1]),
        futile=criteria.most_seeds is not None and verdict not in STOPS and bool(
            futile(contrast, part, criteria.generalize, criteria.margin, analysis.family, criteria.most_seeds)
        ),
    )  # fmt: skip


def _compare_all(
    gains: Gains, fitted: Fit, criteria: Criteria, analysis: Analysis, unstable: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[tuple[str, str], Pair]]:
    """Return the arms that may be best, the beaten ones (unstable arms are neither), and all pairs."""
    arms, alpha = gains.arms, analysis.alpha
    differences = over_parts(head_to_head(gains.trials, fitted.errors, gains.floor), gains.overlap)
    variance, df = differences.pooled_or_own
    total, freedom, pairs = variance.copy(), df.copy(), {}
    for row, (i, j) in enumerate(itertools.combinations(range(len(arms)), 2)):
        part = None if criteria.generalize == "seeds" else gains.images_part(j, i)
        n = int(differences.seeds[row])
        if n <= 2 or analysis.too_early or {arms[i], arms[j]} & unstable:
            total[row] = np.nan  # two seeds rule nothing out
        if analysis.too_early or not has_interval(n, float(fitted.errors.df_error)):
            continue
        half = float(half_width(variance[row], df[row], part, alpha, len(variance)).total)
        if math.isfinite(half):
            effect = criteria.sign * float(differences.estimate[row])
            pairs[arms[j], arms[i]] = Pair(effect, effect - half, effect + half)
        if part is not None:
            total[row], freedom[row] = total[row] + part.variance, total_df(variance[row], df[row], part)
    compared = {arm for pair in pairs for arm in pair} - unstable
    mask = may_be_best(differences.estimate, total, freedom, len(arms), alpha)
    best = tuple(arm for arm, may in zip(arms, mask) if may and arm in compared)
    beaten = tuple(arm for arm, may in zip(arms, mask) if not may)
    return best, beaten, pairs


def _notes(gains: Gains, fitted: Fit) -> list[str]:
    """Sentences on what happened, failures first."""
    notes, (base, *arms) = gains.notes(), gains.arms
    if gains.grouped and gains.images is not None and gains.images.shape[-1] < FEW_GROUPS:
        notes.append(f"the images are {gains.images.shape[-1]} groups: intervals for other groups take {FEW_GROUPS}")
    followers = [arm for arm, r in zip(arms, fitted.correlation) if r > FOLLOWING_CORRELATION]
    if 2 <= len(followers) < len(arms) <= 2 * len(followers) and fitted.against.seeds.min() <= FEW_SEEDS:
        notes.append(
            f"{listing(followers)} follow {base} from seed to seed: where several arms do, 6 to 8 % of studies with "
            "5 seeds make a false claim of the others, and up to 13 % with 3"
        )
    return notes


def head_to_head(scores: Array, errors: Errors, floor: float = 0.0) -> Contrasts:
    """Arm j minus arm i for every pair i < j of studies (..., g, n)."""
    g = scores.shape[-2]
    weights = np.array([np.eye(g)[j] - np.eye(g)[i] for i, j in itertools.combinations(range(g), 2)])
    return contrasts(scores, weights, errors, floor)


def may_be_best(differences: Array, variance: Array, df: Array, g: int, alpha: float) -> Mask:
    """(..., g) from what `head_to_head` found (..., pairs), V + I; a pair that cannot be compared rules out no arm.

    With d_ij the mean of arm j minus that of arm i over the seeds that both have, and V_ij + I_ij its variance, arm j
    may be the best unless some arm i beats it:

        d_ij <= -c1 sqrt(V_ij + I_ij),   c1 the one-sided critical value of g - 1 arms against one

    (Gupta's subset, 1965; the constrained intervals of Hsu, 1981). The true best is in the set in 95 % of studies.
    """
    c = critical_value(g - 1, df, alpha, one_sided=True)
    limit = c * np.sqrt(variance)
    best = np.ones((*differences.shape[:-1], g), dtype=bool)
    for row, (i, j) in enumerate(itertools.combinations(range(g), 2)):
        comparable = limit[..., row] > 0  # no spread at all, or no interval: nothing is shown
        best[..., i] &= ~(comparable & (differences[..., row] >= limit[..., row]))
        best[..., j] &= ~(comparable & (differences[..., row] <= -limit[..., row]))
    return best
