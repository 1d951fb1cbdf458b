"""From the scores of anyone's trials to effects, intervals that hold together, and verdicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats.best import head_to_head, may_be_best, pairs_of
from vitmods.stats.contrast import ALPHA, ENOUGH_DF, Reading
from vitmods.stats.decision import Decision, Pair
from vitmods.stats.failures import less_stable
from vitmods.stats.fit import Contrasts, Fit
from vitmods.stats.gains import Gains
from vitmods.stats.images import ImagesPart
from vitmods.stats.parts import over_parts, overlap_of
from vitmods.stats.read import Scores, Table, means_of, read_csv, table_of
from vitmods.stats.sequential import futile, looks, nominal_level
from vitmods.stats.verdict import FAVORABLE, FRACTION, STOPS, Claim, Effect, Verdict, verdict_of
from vitmods.stats.width import against_base, half_width, total_df
from vitmods.util.errors import UserError
from vitmods.util.text import listing, plural

NOISY, FEW_SEEDS = 2.0, 5  # an sd of base over an arm's that, with fewer seeds, intervals may not hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan(Reading):
    """What was settled before the scores were seen."""

    family: int
    most_seeds: int | None
    too_early: bool  #: before the first look
    overlap: float  #: n_test / n_train, of seeds that are tested on other parts of the images; else 0


def decide(
    scores: Scores | str | Path,
    base: str = "base",
    margin: float = 0.5,
    *,
    unit: str = FRACTION,
    higher_is_better: bool = True,
    generalize: Claim = "images",
    most_seeds: int | None = None,
    family: int | None = None,
    failed: Mapping[str, Mapping[int, str]] | None = None,
    chance: float | None = None,
    groups: ArrayLike | None = None,
    frozen: Mapping[str, Effect] | None = None,
    resampled: tuple[float, float] | None = None,
) -> Decision:
    """Which arms are better or worse than base, with intervals that hold together.

    `scores` maps arm -> seed -> a score, or an array with one score for each test image: the same images in the same
    order everywhere. Or it names a CSV file (`vitmods.stats.read.read_csv`). None is a trial that has not ended, NaN
    one that diverged; `failed` names more of these: arm -> seed -> reason. Arms are compared seed by seed: train base
    and every arm with the same seeds.

    - `margin`: the difference that does not matter, in points for a `unit` of "fraction", else in that unit.
    - `generalize`: verdicts hold for other test images too ("images"), or for these alone ("seeds").
    - `most_seeds`: the maximum of a study that is looked at more than once; None where seeds were fixed before.
    - `frozen`: arms that stopped at an earlier look, as they were then. `family`: how many arms the study has in all.
    - `chance`: the score of guessing, to recognize collapsed trials; None: 0 for fractions of which more is better,
      for other scores they are not looked for.
    - `groups`: a label for each image; images with one label are not independent (one patient, one video).
    - `resampled`: (n_test, n_train), where each seed is tested on another part of the images and trained on the rest,
      the same part for all arms (cross-validation). Verdicts then hold for other training sets too, and scores of
      single images are not needed.

    Raises `UserError` for scores that cannot be compared, and for settings outside their range.
    """
    if resampled is not None and (most_seeds is not None or groups is not None or generalize == "seeds"):
        raise UserError("resampled goes with a fixed number of seeds and verdicts on other images, without groups.")
    scores = read_csv(scores) if isinstance(scores, str | Path) else scores
    table = table_of(scores if resampled is None else means_of(scores), base, failed)
    k, frozen = len(table.arms) - 1, frozen or {}
    if family is not None and family < k:
        raise UserError(f"family must count all {k} arms, not {family}.")
    look, too_early = "", False
    if most_seeds is not None:
        table, look, too_early = at_look(table, most_seeds, frozen)
    alpha = ALPHA if most_seeds is None else nominal_level(most_seeds)
    plan = _Plan(
        margin, unit, higher_is_better, generalize, chance, groups, alpha,
        family=family or k, most_seeds=most_seeds, too_early=too_early,
        overlap=overlap_of(*resampled) if resampled else 0.0,
    )  # fmt: skip
    gains = plan.gains(table)
    fitted = gains.fit()
    effects = {arm: frozen.get(arm) or _effect(arm, a, gains, fitted, plan) for a, arm in enumerate(table.arms) if a}
    unstable = [arm for arm, effect in effects.items() if effect.verdict == Verdict.UNSTABLE]
    best, ruled_out, pairs = _compare_all(table.arms, gains, fitted, plan, unstable)
    return Decision(
        effects, base, best, ruled_out, pairs, float(np.sqrt(fitted.errors.mse)), float(fitted.errors.df_error),
        float(fitted.errors.seed_share), plan.family, alpha, look, gains.images is None, generalize,
        tuple(_notes(table.arms, gains, fitted)), plan.overlap,
    )  # fmt: skip


def at_look(table: Table, most: int, frozen: Mapping[str, Effect]) -> tuple[Table, str, bool]:
    """The study at its last complete look, its name, and whether it is before the first one.

    Seeds that ended since that look wait for the next one.
    """
    done = min(int(row.sum()) for arm, row in zip(table.arms, table.ended) if arm not in frozen)
    planned = looks(most)
    taken = [n for n in planned if n <= done]
    if not taken:
        return table, f"no verdict yet: the first of {len(planned)} looks is at {planned[0]} seeds", True
    n = taken[-1]
    images = None if table.images is None else table.images[:, :n]
    cut = dataclasses.replace(
        table, seeds=table.seeds[:n], trials=table.trials[:, :n], images=images, diverged=table.diverged[:, :n]
    )
    return cut, f"look {len(taken)} of {len(planned)}, at {n} seeds", False


def _effect(arm: str, a: int, gains: Gains, fitted: Fit, plan: _Plan) -> Effect:
    found, part = _one(fitted.against, a - 1), gains.images_part(a)
    n, gain = int(found.seeds), float(found.estimate)
    width = against_base(found, part, plan.alpha, plan.family)
    shown = (n > 2 or (n == 2 and bool(fitted.errors.df_error >= ENOUGH_DF))) and not plan.too_early
    wider = against_base(over_parts(found, plan.overlap), part, plan.alpha, plan.family) if plan.overlap else width
    halves = {"images": float(wider.total), "seeds": float(width.seeds)}
    # No spread at all comes from a coarse metric, not from certainty.
    halves = {claim: half if shown and 0 < half < math.inf else math.nan for claim, half in halves.items()}
    half, images_sd = halves[plan.generalize], math.nan if part is None else math.sqrt(part.variance)
    failures, base_failures = int(gains.failures[a].sum()), int(gains.failures[0].sum())
    verdict = verdict_of(gain - half, gain + half, plan.margin, failures > base_failures)
    notes = []
    if n == 2 and shown:
        verdict = Verdict.OPEN if verdict in FAVORABLE else verdict
        notes.append("assumes that arms vary alike")
    less, steadier = _stability(a, gains, plan)
    if less:
        verdict = Verdict.HURTS
        notes.append(f"fails: {failures} of {gains.ended[a].sum()}, base {base_failures} of {gains.ended[0].sum()}")
    if steadier:
        notes.append("steadier than base")
    if verdict == Verdict.HURTS and gain - half > -plan.margin:
        notes.append("by less than the margin")
    w = fitted.errors.guarded
    ratio = math.sqrt(w[a] / w[0]) if w[0] > 0 else math.nan
    known = n > 1 and math.isfinite(width.variance)
    error = math.sqrt(wider.variance + (0.0 if part is None or plan.generalize == "seeds" else part.variance))
    seeds, sign = gains.shared(a), plan.sign
    ends = {claim: sorted((sign * (gain - half), sign * (gain + half))) for claim, half in halves.items()}
    means = [float(sign * gains.trials[row, seeds].mean()) if n else math.nan for row in (0, a)]
    hopeless = plan.most_seeds is not None and verdict not in STOPS and _futile(found, part, plan)
    return Effect(
        arm=arm, effect=sign * gain, low=ends["images"][0], high=ends["images"][1],
        seeds_low=ends["seeds"][0], seeds_high=ends["seeds"][1], verdict=verdict, n=n,
        base_mean=means[0], arm_mean=means[1],
        sd=math.sqrt(width.variance * n / 2) if known else math.nan, df=float(width.df) if known else math.nan,
        spread_ratio=ratio, correlation=float(fitted.correlation[a - 1]), images_sd=images_sd,
        failures=failures, base_failures=base_failures, margin=plan.margin, family=plan.family, alpha=plan.alpha,
        unit=plan.unit, images=0 if part is None else part.m, higher_is_better=plan.higher_is_better,
        generalize=plan.generalize, overlap=plan.overlap, futile=hopeless, notes=tuple(notes),
        leans=("up" if gain > 0 else "down") if verdict == Verdict.OPEN and known and abs(gain) > error else "",
    )  # fmt: skip


def _stability(a: int, gains: Gains, plan: _Plan) -> tuple[bool, bool]:
    """Whether the arm fails more often than base, and less often: tests of their own, beside the interval's."""
    (failed, base_failed), (of, base_of) = (
        (int(cells[a].sum()), int(cells[0].sum())) for cells in (gains.failures, gains.ended)
    )
    level = plan.alpha / plan.family
    return less_stable(failed, of, base_failed, base_of, level), less_stable(base_failed, base_of, failed, of, level)


def _futile(found: Contrasts, part: ImagesPart | None, plan: _Plan) -> bool:
    assert plan.most_seeds is not None
    return bool(futile(found, part, plan.generalize, plan.margin, plan.alpha, plan.family, plan.most_seeds))


def _compare_all(
    arms: tuple[str, ...], gains: Gains, fitted: Fit, plan: _Plan, unstable: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[tuple[str, str], Pair]]:
    """The arms that may be best, those that are beaten (unstable ones are neither), and all pairs."""
    found = over_parts(head_to_head(gains.trials, fitted.errors, gains.floor), plan.overlap)
    pooled = np.isfinite(found.pooled)
    variance, df = np.where(pooled, found.variance, found.own), np.where(pooled, found.pooled_df, found.own_df)
    total, freedom, pairs = variance.copy(), df.copy(), {}
    for row, (i, j) in enumerate(pairs_of(len(arms))):
        part = None if plan.generalize == "seeds" else gains.images_part(j, i)
        if found.seeds[row] < 2 or (unstable and {arms[i], arms[j]} & set(unstable)):
            total[row] = np.nan
        if found.seeds[row] < 2 or plan.too_early:
            continue
        half = float(half_width(variance[row], df[row], part, plan.alpha, len(variance)).total)
        if math.isfinite(half):
            effect = plan.sign * float(found.estimate[row])
            pairs[arms[j], arms[i]] = Pair(effect, effect - half, effect + half)
        if part is not None:
            total[row], freedom[row] = total[row] + part.variance, total_df(variance[row], df[row], part)
    compared = {arm for pair in pairs for arm in pair} - set(unstable)
    mask = may_be_best(found.estimate, total, freedom, len(arms), plan.alpha)
    best = tuple(arm for arm, may in zip(arms, mask) if may and arm in compared)
    beaten = tuple(arm for arm, may in zip(arms, mask) if not may)
    return best, beaten, pairs


def _notes(arms: tuple[str, ...], gains: Gains, fitted: Fit) -> list[str]:
    """What happened, failures first."""
    failed, of = gains.failures.sum(-1), gains.ended.sum(-1)
    found = []
    if failed[0]:
        found.append(f"{plural(int(failed[0]), 'trial')} of base failed, so these seeds are left out for all arms")
    counts = [f"{arm} {count} of {total}" for arm, count, total in zip(arms[1:], failed[1:], of[1:]) if count]
    if counts:
        found.append(f"trials diverged or collapsed: {listing(counts)}; effects are of the trials that survived")
    w, n = fitted.errors.guarded, fitted.against.seeds
    if bool(((np.sqrt(w[0]) > NOISY * np.sqrt(w[1:])) & (n > 1) & (n < FEW_SEEDS)).any()):
        found.append(
            f"base seems to vary more than its arms: with fewer than {FEW_SEEDS} seeds, up to 8 % of such studies "
            "make a false claim"
        )
    return found


def _one(found: Contrasts, i: int) -> Contrasts:
    return Contrasts(*(getattr(found, field.name)[..., i] for field in dataclasses.fields(found)))
