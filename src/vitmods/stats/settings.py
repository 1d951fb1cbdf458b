"""Arms in several settings (base models, fractions of the data, lengths of training): each, the average, differences.

Settings are fixed, not a sample of others: claims hold for these. Each of three families of intervals holds together by
itself. All are of weighted sums over the settings b = 1..B of the scores Y[b,a,s] of an arm and a seed,

    average          weights 1/B
    single setting   1 for b, else 0
    departure        1 for b, else 0, minus 1/B

which are fitted and answered as the scores of an ordinary study. So their spread contains what a seed does to an arm in
all settings, and their images part is that of the sums of per-image scores. The level is alpha in the family of
averages, 1 - (1 - alpha)^(1/B) of each of B studies in the others (Sidak). Two settings depart as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitmods.stats import tables
from vitmods.stats.across import ENOUGH_SETS, OtherSets, other_sets
from vitmods.stats.criteria import Criteria
from vitmods.stats.decide import decision_of
from vitmods.stats.decision import Decision
from vitmods.stats.fit import Array, Mask
from vitmods.stats.gains import FAILURES, Gains, gains_of
from vitmods.stats.read import Table, in_common
from vitmods.stats.sequential import ALPHA
from vitmods.stats.verdict import Effect, Verdict
from vitmods.util.errors import UserError
from vitmods.util.text import grouped, listing


@dataclass(frozen=True, repr=False)
class OverSettings:
    """Effects of arms in several settings."""

    decision: Decision = field(metadata={"json": False})  #: on average over the settings: the headline
    each: dict[str, dict[str, Effect]]  #: arm -> setting -> its effect there
    departures: dict[str, dict[str, Effect]]  #: arm -> setting -> how far that is from the average
    others: dict[str, OtherSets] = field(default_factory=dict)  #: arm -> data sets like these, of three or more
    left_out: tuple[str, ...] = ()  #: data sets on which base has not learned: they are part of no average

    def __getitem__(self, arm: str) -> Effect:
        return self.decision[arm]

    def __repr__(self) -> str:
        ranges = [f"{arm}: {self.range(arm)}" for arm in self.each if self.depends(arm)]
        notes = [*self.decision.summary(), *ranges, *map(self.of_others, self.others)]
        return tables.text(list(self.decision.effects.values()), notes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the average, and for each arm the effects by setting and how far they are from it."""
        parts = {"each": self.each, "departures": self.departures}
        by_arm = {
            part: {arm: {name: effect.to_dict() for name, effect in row.items()} for arm, row in rows.items()}
            for part, rows in parts.items()
        }
        others = {arm: {**other._asdict(), "verdict": self.on_others(arm)} for arm, other in self.others.items()}
        more = {"other_sets": others, "left_out": list(self.left_out)}
        return {"average": self.decision.to_dict(), **by_arm, **{name: part for name, part in more.items() if part}}

    def depends(self, arm: str) -> bool:
        """Whether it is shown that the arm's effect depends on the setting."""
        return not np.isnan(self.decision[arm].effect) and any(
            max(effect.interval[0], -effect.interval[1]) > 0 and effect.verdict != Verdict.WITHHELD
            for name, effect in self.departures[arm].items()
            if name not in self.left_out
        )

    def on_others(self, arm: str) -> Verdict:
        """The verdict on data sets like these."""
        effect = self.decision[arm]
        return self.others[arm].verdict(effect.higher_is_better, effect.margin)

    def of_others(self, arm: str) -> str:
        """What holds for data sets like these, and what a further one may show."""
        mean, low, high, *ends = (tables.signed(value, self.decision[arm].digits) for value in self.others[arm][:5])
        return (
            f"{arm} on data sets like these: {mean} [{low}, {high}], {self.on_others(arm)}; a study of a further one "
            f"measures {' to '.join(ends)}"
        )

    def range(self, arm: str) -> str:
        """A note on the average of an effect that depends on the setting."""
        counted = [(name, effect) for name, effect in self.each[arm].items() if name not in self.left_out]
        ranked = sorted(counted, key=lambda item: item[1].effect)
        ends = [f"{tables.signed(effect.effect, effect.digits)} ({name})" for name, effect in (ranked[0], ranked[-1])]
        return f"on average; from {ends[0]} to {ends[1]}"


def over_settings(tables_of: Mapping[str, Table], criteria: Criteria, *, shared_images: bool = True) -> OverSettings:
    """The effects of the same arms in several settings: on average, in each, and whether they differ.

    `tables_of` maps a setting to its table; arms are compared with the base of their setting. If base has not learned
    in one setting, verdicts are withheld there and on average. Seeds were fixed before. Without `shared_images`,
    settings are tested on different images, as data sets are: the average is then over those on which base has learned,
    and has no numbers with fewer than two.

    Raises:
        UserError: fewer than two settings, settings with other arms, scores that cannot be compared.
    """
    if len(tables_of) < 2:
        raise UserError("Give the scores of two settings or more; one alone is for vitmods.decide.")
    arms = next(iter(tables_of.values())).arms
    for setting, table in tables_of.items():
        if set(table.arms) != set(arms):
            raise UserError(f"Setting {setting} has other arms than the first: every setting needs all of them.")
    seeds = sorted({seed for table in tables_of.values() for seed in table.seeds})
    aligned = [table.aligned(arms, seeds) for table in tables_of.values()]
    aligned = in_common(aligned) if shared_images else aligned
    family = criteria.contrasts(len(arms) - 1)
    analysis = criteria.analysis(min(table.fewest for table in aligned), family)
    gains = [gains_of(table, criteria) for table in aligned]
    gains = [replace(one, limit=max(other.limit for other in gains)) for one in gains]
    counts = np.array([shared_images or one.has_learned for one in gains])
    is_average = counts.sum() > 1
    average, *others = (
        [decision_of(weighted(gains, row, shared_images), criteria, replace(analysis, alpha=level)) for row in weights]
        for weights, level in families(len(gains), analysis.alpha, counts if is_average else None)
    )
    each, departures = (
        {
            arm: {name: replace(decision[arm], arm=name) for name, decision in zip(tables_of, decisions, strict=True)}
            for arm in arms[1:]
        }
        for decisions in others
    )
    apart = grouped(
        (name, note) for name, decision in zip(tables_of, others[0], strict=True) for note in decision.notes
    )
    notes = [f"under {listing(names)}: {note}" for note, names in apart.items()]
    left_out = tuple(name for name, is_part in zip(tables_of, counts, strict=True) if not is_part)
    of_average = dict(average[0].effects)
    if left_out and is_average:
        notes.append(f"without {listing(left_out)}, where base has not learned, so that no average has them")
    elif left_out:
        notes.append("base has learned on fewer than two data sets: there is no average")
        of_average = {arm: effect.withheld(numbers=False) for arm, effect in of_average.items()}
    decision = replace(average[0], effects=of_average, notes=(*average[0].notes, *notes))
    like_these: dict[str, OtherSets] = {}
    if not shared_images and counts.sum() >= ENOUGH_SETS:
        # As each study by itself has them: those of `each` hold together over the data sets.
        alone = [decision_of(one, criteria, analysis) for one, is_part in zip(gains, counts, strict=True) if is_part]
        for arm in each:
            intervals = [[(decision[arm].effect, *decision[arm].interval)] for decision in alone]
            if not np.isnan(intervals).any():
                like_these[arm] = other_sets(intervals, len(each))
    return OverSettings(decision, each, departures, like_these, left_out)


def families(settings: int, alpha: float = ALPHA, counts: Mask | None = None) -> list[tuple[Array, float]]:
    """Weights (..., settings) and level of averages, single settings and departures; `counts`: which an average has."""
    counts = np.ones(settings, bool) if counts is None else counts
    single, mean = np.eye(settings), counts[None] / counts.sum()
    level = 1 - (1 - alpha) ** (1 / settings)
    return [(mean, alpha), (single, level), (single - mean, level if settings > 2 else alpha)]


def weighted(settings: Sequence[Gains], weights: Array, shared_images: bool = True) -> Gains:
    """The sum over settings, a trial for each arm and seed; it failed where one of its trainings did."""
    used = [(weight, gains) for weight, gains in zip(weights, settings, strict=True) if weight]
    if len(used) == 1:
        return used[0][1]
    trials = np.asarray(sum(weight * gains.trials for weight, gains in used))
    parts = [weight * gains.images for weight, gains in used if gains.images is not None]
    images, sets = None, []
    if len(parts) == len(used) and shared_images and len({part.shape for part in parts}) == 1:
        images = np.asarray(sum(parts))
    elif len(parts) == len(used):  # images of their own, side by side: so their variances add up
        sizes = [part.shape[-1] for part in parts]
        scales = [sum(sizes) / size for size in sizes]
        images = np.concatenate([scale * part for scale, part in zip(scales, parts, strict=True)], -1)
        steps = [scale * abs(weight) * gains.step for scale, (weight, gains) in zip(scales, used, strict=True)]
        sets = [*zip(sizes, steps, strict=True)]
    kinds = {kind: np.any([gains.kinds[kind] for _, gains in used], 0) for kind in FAILURES}
    ended = np.all([gains.ended for _, gains in used], 0) | np.any(list(kinds.values()), 0)
    return replace(
        used[0][1], trials=trials, images=images, sets=tuple(sets), kinds=kinds, ended=ended,
        floor=float(np.sqrt(sum((weight * gains.floor) ** 2 for weight, gains in used))),
        pooled=np.all([gains.pooled for _, gains in used], 0),
        near=np.all([gains.near for _, gains in used], 0), base=np.nan, level=np.nan,
        learned=np.all([gains.learned for _, gains in used], 0), grouped=any(gains.grouped for _, gains in used),
        limit=used[0][1].limit * abs(weights).sum(),
    )  # fmt: skip
