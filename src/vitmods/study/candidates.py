"""Changes that are worth trying on a data set, by what earlier studies found on others.

A study on another data set measures the effect of a change there, with a variance s^2, and the effect here differs from
it with a variance t^2 that grows with how different the two are. Studies of one data set share what is special about
it, and perhaps trials: their mean d, weighted by 1 / (s^2 + t^2), counts as much as the one with the largest weight w.
Before any study, effects are around zero with a standard deviation USUAL. So the effect to expect here is, over data
sets,

    sum w d / (1 / USUAL^2 + sum w).

The studies are those of the gallery: small ViTs, trained from scratch (docs/gallery.md). Those of the data set itself
do not count, known by its name: what they found is about the very test images that a study here would be judged on. So
they say what to try, not what helps: that is measured.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.stats.tables import signed
from vitmods.study.arms import make_arms
from vitmods.util.errors import UserError
from vitmods.util.limits import read_json
from vitmods.util.text import listing, plural

if TYPE_CHECKING:
    from vitmods.study.cells import Cell

KNOWN = Path(__file__).with_name("known_effects.json")
USUAL = 3.0  # points: standard deviation of the effects of changes
BETWEEN_SETS = 3.0  # points: that of an effect between data sets that are alike
LEAST = 0.3  # points: of the effect to expect
USUAL_PATCH = 16  # pixels, of a model that is not read


@dataclass(frozen=True)
class Setting:
    """What the effect of a change depends on: training images (0: unknown), their channels, and values a patch."""

    images: int
    channels: int
    patch_values: int


@dataclass(frozen=True)
class Candidate:
    """A change in its short form, the points to expect of it (None: unknown), and why."""

    change: str
    expected: float | None
    reason: str

    @property
    def why(self) -> str:
        """`+4.1 points expected, from +6.9 on clothes (1 other data set)`."""
        return (
            self.reason if self.expected is None else f"{signed(self.expected, 1)} points expected, from {self.reason}"
        )


def promising(setting: Setting, known: Iterable[Mapping[str, Any]] | None = None, data: str = "") -> list[Candidate]:
    """The changes of which more than LEAST is to be expected, the most first. known: effects; None: the gallery's.
    data: the specification of the images here, whose own effects do not count."""
    here = data.partition("?")[0].replace("\\", "/").rstrip("/").replace(":", "/").rpartition("/")[2].lower()
    by_change: dict[str, list[Mapping[str, Any]]] = {}
    for one in known_effects() if known is None else known:
        if one["data"] != here:
            by_change.setdefault(one["change"], []).append(one)
    candidates = list[tuple[float, Candidate]]()
    for change, found in by_change.items():
        if (expected := expected_of(found, setting)) > LEAST:
            candidates.append((expected, Candidate(change, expected, _reason(_by_set(found, setting)))))
    return [candidate for _, candidate in sorted(candidates, key=lambda pair: -pair[0])]


def expected_of(found: Iterable[Mapping[str, Any]], setting: Setting) -> float:
    """The effect to expect of a change, in points, by its effects elsewhere."""
    sets = _by_set(found, setting).values()
    return sum(w * mean for mean, w in sets) / (USUAL**-2 + sum(w for _, w in sets))


def candidates_for(
    cell: Cell, images: int, most: int = 3, without: Container[str] = (), seconds: int = 0
) -> tuple[list[Candidate], list[str]]:
    """The most promising changes for base, as a cell, and so many training images, and why others are left out.

    Changes that exclude a better one are left out, but for `seconds` of them, which come last. Raises UserError where
    base cannot be built.
    """
    base = _build(cell)
    channels = cell.fixed["in_chans"]
    patch = getattr(base, "patch_size", (USUAL_PATCH, USUAL_PATCH))
    chosen, second, refused = list[Candidate](), list[Candidate](), list[str]()
    setting = Setting(images, channels, channels * patch[0] * patch[1])
    for candidate in promising(setting, data=str(cell.fixed["data"])):
        if candidate.change in without or len(chosen) + len(second) == most:
            continue
        excludes = _excluded_by(candidate, [*chosen, *second])
        if excludes and (len(excludes) > 1 or len(second) == seconds):
            refused.append(f"{candidate.change}, beside {listing(excludes)}")
        elif reason := why_unfit(cell, candidate):
            refused.append(f"{candidate.change}, which base does not take ({reason.rstrip('.')})")
        else:
            (second if excludes else chosen).append(candidate)
    return [*chosen, *second], refused


def why_unfit(cell: Cell, candidate: Candidate) -> str:
    """Say why base does not take a candidate; empty: it does."""
    from vitmods.study.cells import make_cell

    try:
        _build(make_cell({**cell.fixed, "recipe": cell.recipe.to_dict()}, make_arms([candidate.change])[0]))
    except UserError as error:
        return str(error)
    return ""


def _build(cell: Cell) -> Any:
    """Build the model of a cell, and freeze what it does not train; returns what describes base."""
    from vitmods.study.prepare import build_cell
    from vitmods.study.trial import base_config
    from vitmods.train.optim import freeze

    base = base_config(cell, 2)
    freeze(build_cell(cell, base, 0, 2), cell.recipe)
    return base


def _excluded_by(candidate: Candidate, others: Sequence[Candidate]) -> list[str]:
    """List the other candidates that no model can have together with this one."""
    from vitmods.changes import Change
    from vitmods.changes.compose import conflicts

    arms = make_arms([one.change for one in (candidate, *others)])
    changes = {arm.name: [edit for edit in arm.changes if isinstance(edit, Change)] for arm in arms}
    return [other for pair in conflicts(changes) if arms[0].name in pair for other in pair if other != arms[0].name]


@cache
def known_effects() -> list[dict[str, Any]]:
    """The effects of changes in the gallery, in points of top-1."""
    found: list[dict[str, Any]] = read_json(KNOWN)
    return found


def _difference(one: Mapping[str, Any], setting: Setting) -> float:
    """How far the effect of a study may be from the one here: points, one standard deviation."""
    factors = [math.log2(one["patch_values"] / setting.patch_values) / 4]
    if setting.images:
        factors.append(math.log10(one["images"] / setting.images))
    unlike = 1 + 3 * (one["channels"] != setting.channels) + sum(factor**2 for factor in factors)
    return BETWEEN_SETS * math.sqrt(unlike)


def _by_set(found: Iterable[Mapping[str, Any]], setting: Setting) -> dict[str, tuple[float, float]]:
    """Data set -> the mean effect of a change there, and what it weighs for this setting."""
    by_set: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        weight = 1 / ((one["half"] / 2) ** 2 + _difference(one, setting) ** 2)
        by_set.setdefault(one["data"], []).append((weight, one["effect"]))
    return {
        data: (sum(w * effect for w, effect in each) / sum(w for w, _ in each), max(w for w, _ in each))
        for data, each in by_set.items()
    }


def _reason(sets: Mapping[str, tuple[float, float]]) -> str:
    effects = [f"{signed(mean, 1)} on {data}" for data, (mean, _) in sets.items()]
    return f"{listing(effects)} ({plural(len(effects), 'other data set')})"
