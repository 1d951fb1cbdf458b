"""Tables of trials: from a mapping arm -> seed -> score, or from a CSV file.

A score is a number, or an array with one number for each test image. None is a trial that has not ended, a
score that is not finite for one that diverged. NaN of some images only (a metric that is not defined there) leaves
these images out for all trials.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitmods.stats.fit import Array, Mask
from vitmods.stats.width import overlap_of
from vitmods.util.errors import UserError, nearest
from vitmods.util.tables import read_table, whole_number
from vitmods.util.text import listing

Scores = Mapping[str, Mapping[int, ArrayLike | None]]

NO_IMAGE = "No test image has a score in every trial: compare by another metric, or on other images."


@dataclass(frozen=True)
class Table:
    """What was measured: trials of g arms, base first, with n seeds, and what belongs to their test images.

    `Table.of` makes and checks one. What was settled before scores were seen is in `Criteria`.
    """

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    trials: Array  #: (g, n), NaN without a score
    images: Array | None  #: (g, n, m), where every trial has per-image scores
    diverged: Mask  #: (g, n)
    constant: Mask  #: (g, n) trials whose prediction is known to be the same for every image
    kept: Mask  #: images that are in `images`, of all that there are: those with a score in every trial
    chance: float | None = None  #: the score of the best constant prediction; None: not known
    level: float | None = None  #: what a linear probe of the weights that base starts from reaches
    groups: ArrayLike | None = None  #: a label for each of all images
    overlap: float = 0.0  #: n_test / n_train, where each seed is tested on another part of the images; else 0

    @classmethod
    def of(
        cls,
        scores: Scores,
        base: str = "base",
        failed: Mapping[str, Mapping[int, str]] | None = None,
        constant: Mapping[str, Container[int]] | None = None,
        *,
        resampled: tuple[float, float] | None = None,
        chance: float | None = None,
        level: float | None = None,
        groups: ArrayLike | None = None,
    ) -> Table:
        """Read scores, with the arguments of `vitmods.decide`. Raises `UserError` for what cannot be compared."""
        for name, constant_score in (("chance", chance), ("level", level)):
            if not isinstance(constant_score, Real | None):
                raise UserError(f"{name} is a score, a number, not {constant_score!r}.")
        scores = _plain(scores)
        if base not in scores:
            near = nearest(str(base), scores)
            raise UserError(f"Unknown arm {base} to compare with. {near} Name it with base= (--base).")
        if len(scores) < 2:
            raise UserError(f"{base} is the only arm: give the scores of at least one other.")
        failed, constant = failed or {}, constant or {}
        for name, named in (("failed", failed), ("constant", constant)):
            for arm in set(named) - set(scores):
                raise UserError(f"{name} names an arm without scores: {arm}. {nearest(arm, scores)}")
        scores = scores if resampled is None else _means(scores)
        arms = (base, *(arm for arm in scores if arm != base))
        seeds = tuple(sorted({seed for arm in arms for seed in (*scores[arm], *failed.get(arm, {}))}))
        shape = len(arms), len(seeds)
        values = {
            (a, s): np.asarray(scores[arm][seed], dtype=float)
            for a, arm in enumerate(arms)
            for s, seed in enumerate(seeds)
            if scores[arm].get(seed) is not None
        }
        diverged, is_constant = (
            np.array([[seed in named.get(arm, ()) for seed in seeds] for arm in arms], dtype=bool).reshape(shape)
            for named in (failed, constant)
        )
        for cell, value in values.items():
            diverged[cell] |= _has_diverged(value)
        finished = {cell: value for cell, value in values.items() if not diverged[cell]}
        kept = _scored(list(finished.values()))
        trials = np.full(shape, np.nan)
        images = np.full((*shape, int(kept.sum())), np.nan) if kept.shape else None
        for cell, value in finished.items():
            trials[cell] = value[kept].mean()
            if images is not None:
                images[cell] = value[kept]
        return cls(
            arms, seeds, trials, images, diverged, is_constant & np.isfinite(trials), kept, chance, level, groups,
            0.0 if resampled is None else overlap_of(*resampled),
        )  # fmt: skip

    @property
    def ended(self) -> Mask:
        """(g, n) trials that have a score or diverged."""
        return np.isfinite(self.trials) | self.diverged

    @property
    def fewest(self) -> int:
        """Trials that ended of the arm with the fewest."""
        return int(self.ended.sum(-1).min())

    def aligned(self, arms: Sequence[str], seeds: Sequence[int]) -> Table:
        """The trials of these arms and seeds, in this order; one that the table lacks has not ended."""
        rows = [self.arms.index(arm) if arm in self.arms else -1 for arm in arms]
        columns = [self.seeds.index(seed) if seed in self.seeds else -1 for seed in seeds]

        def picked(values: NDArray[Any], missing: Any) -> NDArray[Any]:
            padding = [(0, 1), (0, 1), (0, 0)][: values.ndim]  # a row and a column for index -1
            return np.pad(values, padding, constant_values=missing)[np.ix_(rows, columns)]

        return replace(
            self, arms=tuple(arms), seeds=tuple(seeds), trials=picked(self.trials, np.nan),
            images=None if self.images is None else picked(self.images, np.nan),
            diverged=picked(self.diverged, False), constant=picked(self.constant, False),
        )  # fmt: skip


def _plain(scores: Any) -> dict[str, dict[Any, ArrayLike | None]]:
    """Scores with seeds as Python's numbers, or texts, and as arrays. UserError, naming arm and seed, for others."""
    if not isinstance(scores, Mapping):
        raise UserError("Scores must be a mapping arm -> seed -> score, such as {'base': {0: 0.93, 1: 0.94}, ...}.")
    plain: dict[str, dict[Any, ArrayLike | None]] = {}
    for arm, by_seed in scores.items():
        if not isinstance(arm, str):
            raise UserError(f"The name of an arm is a text, not {arm!r}: write '{arm}'.")
        if not isinstance(by_seed, Mapping):
            raise UserError(f"The scores of {arm} must be a mapping seed -> score, such as {{0: 0.93, 1: 0.94}}.")
        of_arm = plain.setdefault(arm, {})
        for key, value in by_seed.items():
            seed = key
            with suppress(TypeError):
                seed = int(key) if isinstance(key, float) and key.is_integer() else operator.index(key)
            if seed in of_arm:
                raise UserError(f"{arm} has two scores with seed {seed}: leave one out.")
            of_arm[seed] = None if value is None else _array(value, arm, seed)
    if len({isinstance(seed, str) for of_arm in plain.values() for seed in of_arm}) > 1:
        raise UserError("Some seeds are numbers and others are texts: name each seed in one way.")
    return plain


def _array(score: Any, arm: str, seed: object) -> NDArray[np.float64]:
    if hasattr(score, "detach"):  # a tensor, which may be on a device or have a gradient
        score = score.detach().cpu().double()
    try:
        return np.asarray(score, dtype=float)
    except (TypeError, ValueError):
        raise UserError(
            f"The score of {arm} with seed {seed} is {score!r:.40}, and not a number or one for each test image. None "
            "is a trial that has not ended, NaN one that diverged."
        ) from None


def in_common(tables: Sequence[Table]) -> list[Table]:
    """Studies of the same test images, each with the images alone that have a score in every trial of all of them."""
    kept = [table.kept for table in tables]
    if any(table.images is None for table in tables) or len({mask.shape for mask in kept}) > 1:
        return list(tables)
    both = np.asarray(np.all(kept, axis=0))
    if not both.any():
        raise UserError(NO_IMAGE)
    images = [table.images[..., both[table.kept]] for table in tables if table.images is not None]
    return [
        replace(table, images=some, trials=some.mean(-1), kept=both) for table, some in zip(tables, images, strict=True)
    ]


def _has_diverged(value: Array) -> bool:
    scored = value[~np.isnan(value)]
    return not (scored.size and np.isfinite(scored.mean()))


def _scored(trials: Sequence[Array]) -> Mask:
    """The images that have a score in all of `trials`; () where these have one number each."""
    shapes = {value.shape for value in trials}
    if len(shapes) > 1 or any(len(shape) > 1 or shape == (0,) for shape in shapes):
        raise UserError(
            "Every trial needs one score, or one score for each of the same test images, in the same order; "
            f"found arrays of shape {', '.join(map(str, sorted(shapes)))}."
        )
    kept = np.asarray(np.all([~np.isnan(value) for value in trials], axis=0))
    if not kept.any():
        raise UserError(NO_IMAGE)
    return kept


def _means(scores: Scores) -> Scores:
    """The mean of each trial's scores, where seeds are tested on different images: of those with a score in every trial
    of the seed."""
    means: dict[str, dict[int, ArrayLike | None]] = {arm: dict.fromkeys(trials) for arm, trials in scores.items()}
    for seed in {seed for trials in scores.values() for seed in trials}:
        ended = {
            arm: np.asarray(trials[seed], dtype=float) for arm, trials in scores.items() if trials.get(seed) is not None
        }
        kept = _scored([value for value in ended.values() if not _has_diverged(value)])
        for arm, value in ended.items():
            means[arm][seed] = math.nan if _has_diverged(value) else value[kept].mean()
    return means


def read_csv(path: str | Path) -> dict[str, dict[int, Any]]:
    """Scores from a CSV file with the columns arm, seed, score, and image where each row is one image's score.

    Images are matched by name, whatever the order of the rows. `nan`, `inf` or `diverged` as a score mean that the
    trial diverged. Raises `UserError`, naming file and line, for anything else.
    """
    path = Path(path)
    if not path.is_file():
        what = "is not a file: name the CSV file in it" if path.is_dir() else "does not exist"
        what = "is a stream: write the scores to a file first" if path.exists() and not path.is_dir() else what
        raise UserError(f"{path} {what}.")
    trials: dict[tuple[str, int], dict[str, float]] = {}
    firsts: dict[tuple[str, int, str], Mapping[str, str]] = {}
    columns = ("arm", "seed", "score")
    for line, row in read_table(path, columns, "The columns are arm,seed,score, and image for scores of images."):
        where, arm, image = f"{path}, line {line}", row["arm"].strip(), row.get("image", "").strip()
        if not arm:
            raise UserError(f"{where}: the name of the arm is missing.")
        try:
            seed = whole_number(row["seed"])
        except ValueError:
            raise UserError(f"{where}: the seed must be a whole number, not {row['seed']!r}.") from None
        trial = trials.setdefault((arm, seed), {})
        before = firsts.setdefault((arm, seed, image), row)
        if image in trial:
            others = [
                name for name in row if row[name] != before[name] and name not in ("arm", "seed", "image", "score")
            ]
            remedy = "remove one of the lines."
            if others:
                remedy = (
                    f"the lines differ in {listing(others)}, which is not read. Keep one of them, such as that of the "
                    "last epoch; a column that names test images is called image."
                )
            raise UserError(f"{where}: {arm} with this seed has a score already; {remedy}")
        try:
            score = math.nan if row["score"].strip().lower() == "diverged" else float(row["score"])
        except ValueError:
            raise UserError(f"{where}: the score must be a number (or `diverged`), not {row['score']!r}.") from None
        trial[image] = score if math.isfinite(score) else math.nan
    for (arm, seed), trial in trials.items():
        if "" in trial and len(trial) > 1:
            raise UserError(
                f"{path}: {arm} with seed {seed} has scores of images, and one without the name of an image: remove "
                "lines that sum up others."
            )
    scored = {key: trial for key, trial in trials.items() if not all(map(math.isnan, trial.values()))}
    if not scored:
        raise UserError(f"{path}: it does not contain a score.")
    (first_arm, first_seed), first = next(iter(scored.items()))
    values: dict[str, dict[int, Any]] = {}
    for (arm, seed), trial in trials.items():
        if (arm, seed) in scored and trial.keys() != first.keys():
            example = sorted(trial.keys() ^ first.keys())[0]
            raise UserError(
                f"{path}: {arm} with seed {seed} does not have the same images as {first_arm} with seed {first_seed} "
                f"(for one, {example!r}); every trial must be tested on the same images."
            )
        by_image = np.array([trial[image] for image in (first if (arm, seed) in scored else trial)])
        values.setdefault(arm, {})[seed] = float(by_image[0]) if list(trial) == [""] else by_image
    return values
