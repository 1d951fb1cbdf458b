"""Factorial designs: which combinations of changes to train, so that every trial speaks of every change.

A run is the set of changes that are on; base is the run with none and part of every design. The effect of a change, on
average over the others, is the mean of the runs that have it minus the mean of the rest. All 2^k runs give all effects.
A fraction of them, with changes coded +1 (on) and -1 (off), sets some to products of others: these products are its
generators, and effects whose columns are then equal or opposite cannot be separated (Box and Hunter, 1961).

Changes that exclude each other leave no such fraction. Then N of the possible runs are chosen so that the determinant
of X'X is largest, X holding 1 and the k indicators (Fedorov, 1972), by exchanging one run at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from vitmods.util.errors import UserError
from vitmods.util.text import listing

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Words = tuple[tuple[str, ...], ...]

MOST_CHANGES = 8
_GENERATORS: dict[tuple[int, int], tuple[str, ...]] = {
    (4, 8): ("ABC",),
    (5, 8): ("AB", "AC"),
    (5, 16): ("ABCD",),
    (6, 8): ("AB", "AC", "BC"),
    (6, 16): ("ABC", "BCD"),
    (6, 32): ("ABCDE",),
    (7, 8): ("AB", "AC", "BC", "ABC"),
    (7, 16): ("ABC", "BCD", "ACD"),
    (8, 16): ("BCD", "ACD", "ABC", "ABD"),
    (8, 64): ("ABCD", "ABEF"),
}
"""(changes, runs) -> what the last changes are set to, up to sign; A, B, ... are the changes in order."""
_RUNS = {2: 4, 3: 8, 4: 8, 5: 16, 6: 16, 7: 16, 8: 16}
_RUNS_WITH_CONFLICTS = {2: 3, 3: 6, 4: 8, 5: 8, 6: 12, 7: 16, 8: 16}
_STARTS = 20


class NoDesign(UserError):
    """Changes of which no two go together."""


@dataclass(frozen=True)
class FactorialRuns:
    """Runs of a study of changes that are switched on and off. Every seed trains all of them."""

    changes: tuple[str, ...]
    runs: tuple[frozenset[str], ...]  #: the changes that are on; base, with none, is the first
    conflicts: tuple[tuple[str, str], ...] = ()  #: changes that no run has together
    left_out: tuple[str, ...] = ()  #: changes that exclude most others, in no run

    @cached_property
    def on(self) -> Bools:
        """Which changes each run has, shape (N, k)."""
        return np.array([[change in run for change in self.changes] for run in self.runs], dtype=bool)

    @property
    def arms(self) -> dict[str, tuple[str, ...]]:
        """Name of each run, as `dpn+rms` or `base`, and its changes in order."""
        rows = [tuple(change for change in self.changes if change in run) for run in self.runs]
        return {"+".join(row) or "base": row for row in rows}

    @property
    def is_orthogonal(self) -> bool:
        """Whether each change is on in half of the runs, whatever another is; else effects assume that changes add."""
        coded = _with_constant(2.0 * self.on - 1)
        return bool(np.array_equal(coded.T @ coded, len(self.runs) * np.eye(coded.shape[1])))

    @cached_property
    def resolution(self) -> int | None:
        """Length of the shortest product of columns that is constant: 3 mixes effects of changes with pairs, 4 pairs
        with each other, 5 neither. None without such a product."""
        return resolution(self.on) if self.is_orthogonal else None

    @cached_property
    def aliases(self) -> tuple[Words, ...]:
        """Changes and pairs of changes that cannot be separated, each as a tuple of one or two names."""
        return tuple(words for words in self._contrasts if len(words) > 1)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what this design cannot show."""
        sentences = [
            f"{name} excludes most of the other changes and is in no run: compare it by itself."
            for name in self.left_out
        ]
        if self.resolution == 3:
            groups = [words for words in self.aliases if len(words[0]) == 1]
            mixed = (f"{change[0]} with {listing([' x '.join(pair) for pair in pairs])}" for change, *pairs in groups)
            sentences.append(
                f"With {len(self.runs)} runs the effect of a change is mixed with pairs of others: {'; '.join(mixed)}."
            )
        if self.conflicts:
            excluded = listing([" with ".join(pair) for pair in self.conflicts], "or")
            sentences.append(
                f"No run can have {excluded}: effects assume that changes add up, and pairs are not estimated."
            )
        return tuple(sentences)

    @cached_property
    def _contrasts(self) -> tuple[Words, ...]:
        """Changes and pairs, grouped by the contrast that estimates them; pairs need an orthogonal design."""
        coded, groups = 2 * self.on.astype(int) - 1, defaultdict(list)
        for size in (1, 2) if self.is_orthogonal else (1,):
            for word in combinations(range(len(self.changes)), size):
                column = coded[:, word].prod(1)
                groups[(column * column[0]).tobytes()].append(tuple(self.changes[i] for i in word))
        return tuple(tuple(words) for words in groups.values())

    @property
    def pairs(self) -> tuple[Words, ...]:
        """The pairs that can be estimated, those of one contrast together; none that is mixed with a change."""
        return tuple(words for words in self._contrasts if len(words[0]) == 2)

    @property
    def weights(self) -> Floats:
        """Weights (k, N) of the runs' means in each effect, by least squares: +2/N for runs with the change and -2/N
        for the others if the design is orthogonal."""
        return least_squares(self.on)

    @property
    def pair_weights(self) -> Floats:
        """Weights (pairs, N) for `pairs`: half the difference that one change makes to the other's effect."""
        coded = 2.0 * self.on - 1
        columns = [[self.changes.index(name) for name in words[0]] for words in self.pairs]
        return np.array([2 / len(coded) * coded[:, pair].prod(1) for pair in columns]).reshape(-1, len(coded))

    @property
    def relative_variance(self) -> Floats:
        """Variance of each effect over that of an orthogonal design of as many runs, 4 sigma^2 / N; shape (k,)."""
        return np.asarray(len(self.runs) / 4 * (self.weights**2).sum(1))


def plan_factorial(
    arms: Sequence[str], conflicts: Iterable[Collection[str]] = (), runs: int | None = None
) -> FactorialRuns:
    """The runs for these changes (names of 2 to 8 arms).

    Args:
        conflicts: pairs of names that no run may have together.
        runs: how many, base included; None: 8 for 3 and 4 changes, 16 for 5 to 8.

    A change that excludes more than half of the others is left out, with a warning.

    Raises:
        UserError: too few or too many changes, unknown names in conflicts, or no design of so many runs.
    """
    names = tuple(arms)
    if len(set(names)) < len(names):
        raise UserError(f"A change is given twice in {', '.join(names)}: leave one out.")
    unordered = {frozenset(pair) for pair in conflicts}
    for wrong in (pair for pair in unordered if len(pair) != 2 or not pair <= set(names)):
        raise UserError(f"A conflict is a pair of {', '.join(names)}, not {' and '.join(sorted(wrong))}.")
    pairs = tuple(pair for pair in combinations(names, 2) if frozenset(pair) in unordered)
    kept, left_out = _without_excluding(names, pairs)
    pairs = tuple(pair for pair in pairs if set(pair) <= set(kept))
    if len(kept) < 2:
        raise NoDesign("A factorial design needs two or more changes that go together: compare these one at a time.")
    if len(kept) > MOST_CHANGES:
        raise UserError(f"A factorial design takes up to {MOST_CHANGES} changes, got {len(kept)}: leave some out.")
    on = _exchanged(kept, pairs, runs) if pairs else fraction(len(kept), runs)
    chosen = tuple(frozenset(name for name, there in zip(kept, row, strict=True) if there) for row in on)
    design = FactorialRuns(kept, chosen, pairs, left_out)
    if len(design.arms) < len(design.runs):
        raise UserError(f"Two runs of {', '.join(kept)} would have one name: give arms names without + in them.")
    return design


def fraction(k: int, runs: int | None = None) -> Bools:
    """All combinations of k changes, or the best known fraction of them: shape (runs, k), base first.

    A column that is a product of l others is negated where l is even, so that base is among the runs.
    """
    wanted = _RUNS[k] if runs is None else runs
    if wanted != 2**k and (k, wanted) not in _GENERATORS:
        sizes = sorted({2**k} | {size for count, size in _GENERATORS if count == k})
        raise UserError(
            f"{k} changes have designs of {listing([str(size) for size in sizes], 'or')} runs, not of {wanted}."
        )
    words = _GENERATORS[k, wanted] if wanted != 2**k else ()
    free = np.array([row[::-1] for row in product((-1, 1), repeat=k - len(words))])
    set_to = [(-1) ** (len(word) + 1) * free[:, ["ABCDEFGH".index(c) for c in word]].prod(1) for word in words]
    return np.column_stack([free, *set_to]) > 0


def least_squares(on: Bools) -> Floats:
    """How the means of runs (N, k) give the effect of each change, shape (k, N); zero where they cannot."""
    x = _with_constant(on)
    inverse = np.linalg.pinv(x)
    estimable = np.isclose(inverse @ x, np.eye(x.shape[1])).all(1, keepdims=True)
    return np.where(estimable, inverse, 0.0)[1:]


def resolution(on: Bools) -> int | None:
    """Length of the shortest product of columns, shape (N, k) coded -1 and +1, that is the same in all runs."""
    coded = 2 * on.astype(int) - 1
    for size in range(1, on.shape[1] + 1):
        for word in combinations(range(on.shape[1]), size):
            if abs(coded[:, word].prod(1).sum()) == len(on):
                return size
    return None


def exchange(candidates: Bools, runs: int, starts: int = _STARTS, seed: int = 0) -> Bools:
    """The `runs` rows of `candidates` (C, k), the first always among them, with the largest |X'X|, X = (1, row).

    From random starts, the best exchange of a chosen row with another is made until none helps: without row i,
    |X'X| is |M|(1 + x' M^-1 x), M = X'X - x_i x_i', for a row x in its place. Of equal determinants the
    one with the smallest sum of variances is taken. No row is taken twice: it would be the same trial.
    """
    x = _with_constant(candidates)
    random = np.random.default_rng(seed)
    designs = []
    for _ in range(starts):
        chosen = np.r_[0, 1 + random.permutation(len(x) - 1)[: runs - 1]]
        _climb(x, chosen)
        information = x[chosen].T @ x[chosen]
        variances = np.linalg.inv(information).trace() - np.linalg.inv(information)[0, 0]
        designs.append((-np.linalg.slogdet(information)[1].round(9), variances.round(9), tuple(np.sort(chosen))))
    return candidates[list(min(designs)[2])]


def _climb(x: Floats, chosen: NDArray[np.intp]) -> None:
    """Exchange rows in place, until none increases the determinant."""
    improved = True
    while improved:
        improved = False
        for place in range(1, len(chosen)):
            others = np.delete(chosen, place)
            inverse = np.linalg.inv(x[others].T @ x[others] + 1e-9 * np.eye(x.shape[1]))
            gain = np.einsum("ij,jk,ik->i", x, inverse, x)
            gain[others] = -np.inf
            new = int(gain.argmax())
            if gain[new] > gain[chosen[place]] * (1 + 1e-6):
                chosen[place], improved = new, True


def _exchanged(names: tuple[str, ...], conflicts: Sequence[tuple[str, str]], runs: int | None) -> Bools:
    possible = np.array([row[::-1] for row in product((False, True), repeat=len(names))])
    for pair in conflicts:
        possible = possible[~possible[:, [names.index(name) for name in pair]].all(1)]
    wanted = min(len(possible), _RUNS_WITH_CONFLICTS[len(names)]) if runs is None else runs
    if not len(names) < wanted <= len(possible):
        raise UserError(
            f"{len(names)} changes, some of which exclude each other, have designs of {len(names) + 1} to "
            f"{len(possible)} runs, not of {wanted}."
        )
    return exchange(possible, wanted)


def _without_excluding(
    names: tuple[str, ...], conflicts: Sequence[tuple[str, str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split off the changes that exclude more than half of the others, the worst and last first."""
    kept, left_out = list(names), []
    while kept:
        count = {name: sum(name in pair and set(pair) <= set(kept) for pair in conflicts) for name in kept}
        worst = max(reversed(kept), key=count.__getitem__)
        if 2 * count[worst] <= len(kept) - 1:
            break
        kept.remove(worst)
        left_out.append(worst)
    return tuple(kept), tuple(left_out)


def _with_constant(columns: NDArray[np.generic]) -> Floats:
    return np.column_stack([np.ones(len(columns)), columns.astype(float)])
