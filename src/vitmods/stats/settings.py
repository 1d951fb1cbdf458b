"""Arms in several settings (base models, fractions of the data, lengths of training): each, the average, differences.

Every setting b of B has its own base and is fitted by itself. Settings are fixed, not a sample of others: what is said
holds for these. With d[a,b] the effect of arm a in setting b and V[a,b] its variance over seeds,

    average     mean over b of d[a,b],        weights u = 1/B
    departure   d[a,b] minus the average,     weights u = (1 for b, else 0) - 1/B
    variance    V = sum of u^2 V[a,b],        df = V^2 / sum((u^2 V[a,b])^2 / df[a,b])    (Satterthwaite), at most what
                                              it is for equal V[a,b]

All settings are tested on the same images, and the images part is that of the weighted sum of per-image differences.

Averages, single settings and departures are three families; the intervals of each hold together by themselves. Critical
values are those of k arms against one base (Dunnett), for a single setting and its departures at level
1 - (1 - alpha)^(1/B), since settings are independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from vitmods.stats import tables
from vitmods.stats.contrast import ALPHA, Criteria, effect_of, mean_of
from vitmods.stats.decision import Decision
from vitmods.stats.fit import Array, Contrasts
from vitmods.stats.gains import Gains
from vitmods.stats.images import ImagesPart, images_part
from vitmods.stats.read import Scores, table_of
from vitmods.stats.verdict import FRACTION, Claim, Effect
from vitmods.stats.width import HalfWidth, half_width
from vitmods.util.errors import UserError
from vitmods.util.text import listing


@dataclass(frozen=True, repr=False)
class OverSettings:
    """Effects of arms in several settings."""

    averages: dict[str, Effect]  #: arm -> its effect on average over the settings: the headline
    each: dict[str, dict[str, Effect]]  #: arm -> setting -> its effect there
    departures: dict[str, dict[str, Effect]]  #: arm -> setting -> how far that is from the average
    without_images: bool  #: no per-image scores, so the intervals are for these test images alone
    notes: tuple[str, ...]  #: failures first

    def __getitem__(self, arm: str) -> Effect:
        return self.averages[arm]

    def __repr__(self) -> str:
        found = [f"{arm}: {self.range(arm)}" for arm in self.averages if self.depends(arm)]
        return tables.text(list(self.averages.values()), [*self.notes, *found])

    def decision(self, base: str) -> Decision:
        """The averages alone, as a study of one setting is answered."""
        one = next(iter(self.averages.values()))
        nan = math.nan
        return Decision(
            self.averages, base, (), (), {}, nan, nan, nan, one.family, one.alpha, "", self.without_images,
            one.generalize, self.notes,
        )  # fmt: skip

    def depends(self, arm: str) -> bool:
        """Whether it is shown that the arm's effect depends on the setting."""
        return any(max(effect.interval[0], -effect.interval[1]) > 0 for effect in self.departures[arm].values())

    def range(self, arm: str) -> str:
        """What belongs beside the average where the effect depends on the setting."""
        found = sorted(self.each[arm].items(), key=lambda one: one[1].effect)
        ends = [f"{tables.signed(effect.effect, effect.digits)} ({name})" for name, effect in (found[0], found[-1])]
        return f"on average; from {ends[0]} to {ends[1]}"


def over_settings(
    scores: Mapping[str, Scores],
    base: str = "base",
    margin: float = 0.5,
    *,
    unit: str = FRACTION,
    higher_is_better: bool = True,
    generalize: Claim = "images",
    failed: Mapping[str, Mapping[str, Mapping[int, str]]] | None = None,
    chance: float | None = None,
    groups: ArrayLike | None = None,
) -> OverSettings:
    """The effects of the same arms in several settings: on average, in each, and whether they differ.

    `scores` maps a setting -> arm -> seed -> a score, or an array with a score for each test image, `failed` a setting
    -> arm -> seed -> reason. Arms are compared with the `base` of their setting. Seeds were fixed before. The rest is
    as in `vitmods.decide`.

    Raises:
        UserError: fewer than two settings, settings with other arms, scores that cannot be compared.
    """
    criteria = Criteria(margin, unit, higher_is_better, generalize, chance, groups)
    if len(scores) < 2:
        raise UserError("Give the scores of two settings or more; one alone is for vitmods.decide.")
    first = next(iter(scores.values()))
    gains = {}
    for setting, given in scores.items():
        if set(given) != set(first):
            raise UserError(f"Setting {setting} has other arms than the first: every setting needs all of them.")
        table = table_of({arm: given[arm] for arm in first}, base, (failed or {}).get(setting))
        gains[setting] = criteria.gains(table)
    arms = [base, *(arm for arm in first if arm != base)]
    found = {arm: _arm(arm, a, gains, criteria) for a, arm in enumerate(arms) if a}
    averages, each, departures = ({arm: effects[i] for arm, effects in found.items()} for i in range(3))
    return OverSettings(
        {arm: effects[arm] for arm, effects in averages.items()}, each, departures,
        any(one.images is None for one in gains.values()), tuple(_notes(arms, gains)),
    )  # fmt: skip


def families(
    each: Contrasts, images: Sequence[Array] | None, k: int, alpha: float = ALPHA
) -> list[tuple[Contrasts, HalfWidth, ImagesPart | None, int]]:
    """Averages (..., 1, arms), single settings and departures (..., B, arms), with half-widths and size of the family.

    `each`: contrasts (..., B, arms) of some of the study's k arms. `images`: of each setting the per-image differences
    (..., arms, n, m) to base.
    """
    count = each.estimate.shape[-2]
    one, mean = np.eye(count), np.full((1, count), 1 / count)
    single = 1 - (1 - alpha) ** (1 / count)  # of each of B independent settings, in which arms share a base
    asked = [(mean, alpha), (one, single), (one - mean, single if count > 2 else alpha)]  # two settings depart as one
    found = []
    for weights, level in asked:
        sums = combine(each, weights)
        part = None if images is None else _images_part(images, weights)
        found.append((sums, half_width(sums.pooled, sums.pooled_df, part, level, k, 0.5), part, k * len(weights)))
    return found


def combine(each: Contrasts, weights: Array) -> Contrasts:
    """Weighted sums (..., q, arms) of one contrast in settings that are independent, (..., B, arms)."""
    pooled = np.isfinite(each.pooled)
    variance, df = np.where(pooled, each.variance, each.own), np.where(pooled, each.pooled_df, each.own_df)
    with np.errstate(invalid="ignore", divide="ignore"):
        estimate, total = _sums(weights, each.estimate), _sums(weights**2, variance)
        freedom = total**2 / _sums(weights**4, variance**2 / df)
        equal = _sums(weights**2, np.ones_like(df)) ** 2 / _sums(weights**4, 1 / df)
        freedom = np.minimum(freedom, equal)  # a setting that happens to vary little has no more df
    seeds = np.stack([each.seeds[..., row != 0, :].min(-2) for row in weights], -2)
    return Contrasts(estimate, seeds, total, freedom, np.full_like(total, np.inf), freedom)


def _sums(weights: Array, values: Array) -> Array:
    """Of `values` (..., B, arms), (..., q, arms); what has no weight may be NaN or infinite."""
    return np.stack([(row[row != 0, None] * values[..., row != 0, :]).sum(-2) for row in weights], -2)


def _images_part(images: Sequence[Array], weights: Array) -> ImagesPart | None:
    """Of weighted sums of differences on the same images; on images of their own, weight^2 I of every setting."""
    m = min(differences.shape[-1] for differences in images)
    n = min((differences.shape[-2] for differences in images if differences.shape[-2]), default=0)
    if not n:
        return None
    cut = [differences[..., :n, :] for differences in images]
    cut = [x if x.shape[-2] else np.full((*x.shape[:-2], n, x.shape[-1]), np.nan) for x in cut]
    if all(x.shape[-1] == m for x in cut):
        same = np.stack(cut, -4)  # (..., B, arms, n, m)
        used = ((row[row != 0], same[..., row != 0, :, :, :]) for row in weights)
        return images_part(np.stack([np.einsum("b,...banm->...anm", row, x) for row, x in used], -4))
    variance = np.stack([images_part(x).variance for x in cut], -2)
    s2_images = m * _sums(weights**2, variance)
    return ImagesPart(s2_images, np.zeros_like(s2_images), n, m)


def _arm(arm: str, a: int, gains: Mapping[str, Gains], criteria: Criteria) -> list[dict[str, Effect]]:
    """Of arm `a`: its average, its effect in each setting, and its departures."""
    studies, k = list(gains.values()), len(next(iter(gains.values())).trials) - 1
    fits = [one.fit().against for one in studies]
    each = Contrasts(*(np.stack([getattr(one, field.name)[[a - 1]] for one in fits]) for field in fields(Contrasts)))
    images = [(one.images[[a]] - one.images[[0]])[:, one.shared(a)] for one in studies if one.images is not None]
    found = families(each, images if len(images) == len(studies) else None, k, criteria.alpha)
    means = np.array([[mean_of(one.trials[row, one.shared(a)]) for row in (0, a)] for one in studies])
    failures = np.array([one.failures[[0, a]].sum(-1) for one in studies])
    parts = [(means.mean(0, keepdims=True), failures.sum(0, keepdims=True)), (means, failures), (means, failures)]
    return [
        {
            name: effect_of(name, (b, 0), *contrast, mean[b], failed[b], criteria, two_seeds=len(names) == 1)
            for b, name in enumerate(names)
        }
        for contrast, names, (mean, failed) in zip(found, ((arm,), gains, gains), parts, strict=True)
    ]


def _notes(arms: Sequence[str], gains: Mapping[str, Gains]) -> list[str]:
    """Failures in every setting."""
    counts = [
        f"{arm} in {setting} {count} of {of}"
        for setting, one in gains.items()
        for arm, count, of in zip(arms, one.failures.sum(-1), one.ended.sum(-1), strict=True)
        if count
    ]
    text = f"trials diverged or collapsed: {listing(counts)}; effects are of the trials that survived"
    return [text] if counts else []
