"""Decisions of a factorial study: each change's average effect over the others, pairs, and the best combination.

Runs are the arms and seeds the blocks of the fit, so every run has its own mean, and what changes do to each other is
never taken for noise. An effect is a contrast of the runs' means: +2/N for runs with the change, -2/N for the others.
Its variance is the fit's, its critical value that of k contrasts whatever their correlation. A pair is half of the
difference that one change makes to the other's effect; pairs are a second family.

A run with a trial that failed is left out. The effects then come by least squares from the remaining runs, which
assumes that changes add up, as where some exclude each other; what the runs say against it is tested (`misfit`). A
change is unstable if runs with it are shown to fail more often than those without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from scipy import special

from vitmods.stats import sequential, tables
from vitmods.stats.criteria import Criteria
from vitmods.stats.effects import ENOUGH_DF, Intervals, Sides, effect_of, has_interval, mean_of
from vitmods.stats.expected import with_expected
from vitmods.stats.fit import ROUNDING, Array, Contrasts, Mask, contrasts, noise
from vitmods.stats.gains import gains_of
from vitmods.stats.images import ImagesPart
from vitmods.stats.read import Table
from vitmods.stats.runs import FactorialRuns, least_squares
from vitmods.stats.sample_size import SIMULATED_STUDIES, Findable
from vitmods.stats.sequential import ALPHA
from vitmods.stats.verdict import Effect, Verdict
from vitmods.stats.width import HalfWidth, half_width
from vitmods.util.errors import UserError
from vitmods.util.text import listing

LOOK_SEEDS, LOOK_LEVEL = (2, 3, 4, 6, 8), 0.020


@dataclass(frozen=True, repr=False)
class Factorial:
    """Effects of a factorial study. The intervals of each family hold together."""

    design: FactorialRuns
    effects: dict[str, Effect]  #: change -> its effect, on average over the others on and off
    pairs: dict[str, Effect]  #: `dpn x rms`; `dpn x rms or dtn x swiglu` where they cannot be separated
    best: tuple[str, ...]  #: the changes to confirm together, against base on fresh seeds
    best_seen: bool  #: whether `best` is the best run, since changes act on each other; else by the signs of effects
    n: int  #: seeds that all runs have
    without_images: bool  #: no per-image scores: the intervals are for these test images alone
    look: str  #: which look of a study until decided this is
    notes: tuple[str, ...]  #: failures first

    def __getitem__(self, change: str) -> Effect:
        return self.effects[change]

    def __repr__(self) -> str:
        notes = (*self.notes, self.look, self.prediction)
        return tables.text([*self.effects.values(), *self.pairs.values()], list(filter(None, notes)))

    @property
    def prediction(self) -> str:
        """The combination to confirm, and what it is chosen by; empty without one."""
        basis = "the best run seen" if self.best_seen else "by the signs of the effects"
        best = f"best combination, {basis}: {'+'.join(self.best)}; confirm it against base on fresh seeds"
        return best if self.best else ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, in which NaN is None."""
        families = {"effects": self.effects, "pairs": self.pairs}
        return {
            **{name: {key: effect.to_dict() for key, effect in family.items()} for name, family in families.items()},
            "best": list(self.best),
            "best_seen": self.best_seen,
            "n": self.n,
            "without_images": self.without_images,
            "look": self.look,
            "notes": list(self.notes),
            "runs": list(self.design.arms),
            "resolution": self.design.resolution,
            "aliases": [[" x ".join(word) for word in words] for words in self.design.aliases],
        }

    @property
    def is_decided(self) -> bool:
        """Whether every effect helps, hurts or is equivalent: a study until decided ends."""
        return all(effect.stops for effect in self.effects.values())


def factorial(table: Table, design: FactorialRuns, criteria: Criteria) -> Factorial:
    """The effects of a design's changes, from a table whose arms are its runs, by their names in `design.arms`.

    Only seeds that all runs have ended count; verdicts need 2. A study with `most_seeds` is looked at after 2, 3, 4, 6
    and 8 seeds.

    Raises:
        UserError: scores that cannot be compared, or runs that are not in the design.
    """
    names = tuple(design.arms)
    for name in set(table.arms) - set(names):
        raise UserError(f"The design does not have a run {name}: its runs are {', '.join(names)}.")
    table = table.aligned(names, table.seeds)
    gains = gains_of(table, criteria)
    counts = gains.failures.sum(-1), gains.ended.sum(-1)
    kept: Mask = np.asarray(counts[0] == 0)
    kept[0] = True  # the seeds that base lacks are left out for all runs
    seeds, look = np.asarray(np.isfinite(gains.trials[kept]).all(0)), ""
    if criteria.most_seeds is not None:
        n, look = sequential.last_look(looks(criteria.most_seeds), int(seeds.sum()))
        seeds &= np.cumsum(seeds) <= n
    trials = gains.trials[kept][:, seeds]
    images = None if gains.images is None else gains.images[kept][:, seeds]
    run_means = trials.mean(-1) if trials.shape[-1] else np.full(len(trials), np.nan)

    def family(names: Sequence[str], weights: Array, on: Mask) -> dict[str, Effect]:
        """Effects of contrasts with `weights` (q, kept) that add the runs `on` (q, N); zero weights: not estimable."""
        alpha = ALPHA if criteria.most_seeds is None else LOOK_LEVEL
        analysis = criteria.analysis(table.fewest, len(names), alpha)
        if trials.size and len(weights):
            part = None if images is None else gains.part_of(np.einsum("qg,gnm->qnm", weights, images), kept)
            found = intervals(trials, weights, analysis.alpha, part, gains.floor)
        else:
            nan, zero = np.full(len(weights), np.nan), np.zeros(len(weights))
            found = Intervals(
                Contrasts(nan, zero, nan, nan, nan, nan, nan, zero), HalfWidth(nan, nan, nan, nan), None
            )  # fmt: skip
        estimate = np.where(weights.any(-1), found.contrasts.estimate, np.nan)
        found = found._replace(contrasts=replace(found.contrasts, estimate=estimate))
        effects = {}
        for i, (name, adds) in enumerate(zip(names, on, strict=True)):
            means = mean_of(run_means[~adds[kept]]), mean_of(run_means[adds[kept]])
            failures, ended = ((int(count[~adds].sum()), int(count[adds].sum())) for count in counts)
            effects[name] = effect_of(
                name, i, found, Sides(means, failures, ended, "without it"), gains, criteria, analysis, two_seeds=True,
                with_interval=has_interval(float(found.contrasts.seeds[i]), float(found.half.df[i])),
            )  # fmt: skip
        return effects

    effects = with_expected(family(design.changes, least_squares(design.on[kept]), design.on.T), False)
    pairs = {}
    if kept.all():
        weights = design.pair_weights
        pairs = family([" or ".join(map(" x ".join, words)) for words in design.pairs], weights, weights > 0)
    if not gains.has_learned:
        effects, pairs = ({name: effect.withheld() for name, effect in named.items()} for named in (effects, pairs))
    acting = [name for name, pair in pairs.items() if pair.verdict in (Verdict.HELPS, Verdict.HURTS)]
    best = (
        list(design.arms.values())[int(run_means.argmax())] if acting else _best_signs(design, effects, counts[0] > 0)
    )
    additive = misfit(trials, design.on[kept], gains.floor) if not pairs and gains.has_learned else math.nan
    failed_runs = gains.notes("runs", "runs with failed trials are left out, which assumes that changes add up")
    notes = [*failed_runs, *design.warnings]
    if acting:
        notes.append(f"changes act on each other ({listing(acting)}): an effect on base alone may differ")
    if additive < (ALPHA if criteria.most_seeds is None else LOOK_LEVEL):
        notes.append(f"changes do not add up (p = {additive:.2g}): an effect on base alone may differ")
    return Factorial(
        design, effects, pairs, best, bool(acting), int(seeds.sum()), images is None, look, tuple(notes)
    )  # fmt: skip


def intervals(
    scores: Array, weights: Array, alpha: float, part: ImagesPart | None = None, floor: float = 0.0
) -> Intervals:
    """Contrasts with `weights` (q, N) of studies (..., N, n), and half-widths that hold together for all q.

    `part`: of the images, for each contrast; None: the intervals are for these images alone.
    """
    estimates = contrasts(scores, weights, noise(scores, floor), floor)
    half = half_width(estimates.variance, estimates.pooled_df, part, alpha, len(weights))
    return Intervals(estimates, half, part)


def misfit(scores: Array, on: Mask, floor: float = 0.0) -> float:
    """P value of the hypothesis that changes add up, on these images: an F test of the part of the runs' means that a
    sum of effects does not explain. scores: (N, n), of runs and seeds; on: (N, k), the changes of each run; floor: the
    smallest sd of a trial, in the unit of scores. NaN without degrees of freedom, or with one seed."""
    x = np.column_stack([np.ones(len(on)), on])
    df, seeds = len(on) - int(np.linalg.matrix_rank(x)), scores.shape[-1]
    if df < 1 or seeds < 2:
        return math.nan
    means, errors = scores.mean(-1), noise(scores)
    left = means - x @ (np.linalg.pinv(x) @ means)
    mse = max(float(errors.mse), floor**2, (ROUNDING * np.abs(scores).max()) ** 2)  # no spread is not certainty
    return float(special.fdtrc(df, errors.df_error, seeds * (left @ left) / df / mse))


@lru_cache(maxsize=256)
def detectable(design: FactorialRuns, n: int, alpha: float = ALPHA) -> Findable:
    """The effects of the least precise change that `n` seeds of every run can find, in sd of one trial, without the
    images' part; from simulated studies without an effect, as `vitmods.stats.sample_size.detectable`."""
    if n < 2 or (n == 2 and len(design.runs) <= ENOUGH_DF):
        return Findable(math.inf, math.inf, math.inf)
    scores = np.random.default_rng(0).standard_normal((SIMULATED_STUDIES, len(design.runs), n))
    least = np.isclose(design.relative_variance, design.relative_variance.max())
    estimates, width, _ = intervals(scores, design.weights, alpha)
    return Findable.of(width.total[:, least], estimates.estimate[:, least])


def looks(most: int) -> tuple[int, ...]:
    """The seeds at which a study of at most `most` seeds is looked at. UserError outside 2 to 8."""
    return sequential.looks(most, LOOK_SEEDS, "factorial study")


def _best_signs(design: FactorialRuns, effects: Mapping[str, Effect], failed: Mask) -> tuple[str, ...]:
    """The possible combination with the largest sum of gains; no change without a verdict, or in a run that failed
    without one of those changes whose runs all failed."""
    to_blame = np.array([bool(failed[on].all()) for on in design.on.T])
    others = failed & ~design.on[:, to_blame].any(1)
    sound = ~to_blame & ~design.on[others].any(0)
    gains = {
        name: effects[name].gain
        for name, is_sound in zip(design.changes, sound, strict=True)
        if is_sound and effects[name].verdict != Verdict.WITHHELD
    }
    good = [name for name, gain in gains.items() if gain > 0]
    rows = [row for size in range(len(good) + 1) for row in combinations(good, size)]
    possible = [row for row in rows if not any(set(pair) <= set(row) for pair in design.conflicts)]
    return max(possible, key=lambda row: sum(gains[name] for name in row))
