"""Simulate `vitmods improve`: how often the model that it ends with is better, and by how much, at equal trials.

    python benchmarks/improving.py                  (two minutes)
    python benchmarks/improving.py --studies 20000

A simulated task has candidates in slots (two stems exclude each other), with a true effect of each and of each pair.
A trial of a combination has its true gain, an error of its seed, and an error of the images that it is tested on, which
all trials of that combination share. Four ways spend the same trials, a part of them on choosing a combination and the
rest on comparing it with base on fresh seeds; base is kept unless the interval of that comparison is above zero.

    factorial     what `improve` does: all candidates in every trial, on val; the comparison on test
    one by one    each candidate against base, on val; those that look good together; the comparison on test
    random        random combinations with one seed each, on val; the best one; the comparison on test
    same images   as factorial, but it chooses by the images that it is compared on

Before that, the forecast that chooses candidates: of each effect in the gallery, by the studies of other data sets.
"""

from __future__ import annotations

import argparse
from itertools import combinations

import numpy as np
from scipy import special

from vitmods.stats.runs import plan_factorial
from vitmods.study import candidates

Array = np.ndarray
NAMES = ("levit", "hmlp", "swiglu", "qknorm", "instancenorm", "layerscale")
CONFLICTS = (("levit", "hmlp"),)
PAIRS = tuple(combinations(range(len(NAMES)), 2))
SEED_SD = 1.5  # points; of a trial
WORLDS = {
    # name: mean and spread of effects, spread of pairs, error of a combination's images
    "like the gallery": ((6.0, 4.0, 1.2, 1.2, 1.5, 0.0), (5.0, 4.0, 1.5, 1.5, 1.5, 1.5), 0.5, 1.0),
    "no stem helps": ((0.0,) * 6, (1.0,) * 6, 0.5, 1.0),
    "pairs matter": ((0.0,) * 6, (1.5,) * 6, 1.5, 1.0),
    "nothing does anything": ((0.0,) * 6, (0.0,) * 6, 0.0, 1.0),
}


class World:
    """True gains of all combinations, shape (studies, combinations), and errors of their images on val and test."""

    def __init__(self, name: str, studies: int, random: np.random.Generator):
        means, spreads, pair_sd, image_sd = WORLDS[name]
        every = np.array([[int(bit) for bit in f"{i:0{len(NAMES)}b}"] for i in range(2 ** len(NAMES))], dtype=bool)
        both = [NAMES.index(one) for one in CONFLICTS[0]]
        self.on = every[~every[:, both].all(1)]
        effects = random.normal(means, spreads, (studies, len(NAMES)))
        pairs = random.normal(0, pair_sd, (studies, len(PAIRS)))
        together = np.array([self.on[:, i] & self.on[:, j] for i, j in PAIRS], dtype=float)
        self.gain = effects @ self.on.T + pairs @ together
        # Errors of images: of each change and the rest of the combination, so that similar combinations err alike.
        share = image_sd * np.sqrt(0.5)
        self.val, self.test = (
            random.normal(0, share, effects.shape) @ self.on.T * (2 / len(NAMES)) ** 0.5
            + random.normal(0, share, self.gain.shape) * self.on.any(1)
            for _ in range(2)
        )

    def find(self, on: Array) -> Array:
        """Rows of combinations, shape (..., changes) -> (...)."""
        code = self.on @ (2 ** np.arange(len(NAMES)))
        order = np.argsort(code)
        return order[np.searchsorted(code[order], on @ (2 ** np.arange(len(NAMES))))]


def seen(true: Array, seeds: int, random: np.random.Generator) -> Array:
    """Means over seeds."""
    return true + random.normal(0, SEED_SD / np.sqrt(seeds), true.shape)


def allowed(on: Array, gains: Array) -> Array:
    """Of two changes that exclude each other, the better one."""
    on = on.copy()
    for first, second in CONFLICTS:
        a, b = NAMES.index(first), NAMES.index(second)
        both = on[:, a] & on[:, b]
        on[both & (gains[:, a] < gains[:, b]), a] = False
        on[both & (gains[:, a] >= gains[:, b]), b] = False
    return on


def by_factorial(world: World, trials: int, random: np.random.Generator, images: Array) -> Array:
    design = plan_factorial(NAMES, CONFLICTS, runs=min(max(8, trials // 2), 16))
    rows = world.find(design.on)
    found = seen((world.gain + images)[:, rows], max(1, trials // len(rows)), random) @ design.weights.T
    return world.find(allowed(found > 0, found))


def one_by_one(world: World, trials: int, random: np.random.Generator, images: Array) -> Array:
    alone = world.find(np.vstack([np.zeros(len(NAMES), bool), np.eye(len(NAMES), dtype=bool)]))
    means = seen((world.gain + images)[:, alone], max(1, trials // len(alone)), random)
    found = means[:, 1:] - means[:, :1]
    return world.find(allowed(found > 0, found))


def by_random_search(world: World, trials: int, random: np.random.Generator, images: Array) -> Array:
    tried = np.array([random.permutation(len(world.on))[:trials] for _ in world.gain])
    found = seen(np.take_along_axis(world.gain + images, tried, 1), 1, random)
    return np.take_along_axis(tried, found.argmax(1)[:, None], 1)[:, 0]


def compare(world: World, chosen: Array, seeds: int, random: np.random.Generator) -> tuple[Array, Array]:
    """The true gain of what each study ends with, and whether it says better."""
    rows = np.arange(len(chosen))
    true, measured = world.gain[rows, chosen], (world.gain + world.test)[rows, chosen]
    each = random.normal(measured[:, None], SEED_SD * 2**0.5, (len(rows), seeds))
    # The images' part of the variance is known: a test set of a size says it.
    variance = each.var(1, ddof=1) / seeds + world.test[rows, chosen].var()
    half = special.stdtrit(seeds - 1, 0.975) * np.sqrt(variance)
    better = (each.mean(1) - half > 0) & world.on[chosen].any(1)
    return np.where(better, true, 0.0), better


def forecasts() -> list[tuple[float, float, float, float]]:
    """Of each effect whose change the gallery has on other data sets: forecast, plain mean, effect, half-width."""
    known, found = candidates.known_effects(), []
    for one in known:
        others = [other for other in known if other["change"] == one["change"] and other["data"] != one["data"]]
        if others:
            setting = candidates.Setting(one["images"], one["channels"], one["patch_values"])
            mean = float(np.mean([other["effect"] for other in others]))
            found.append((candidates.expected_of(others, setting), mean, one["effect"], one["half"]))
    return found


def main() -> None:
    found = np.array(forecasts())
    sign, clear = np.sign(found[:, 2]), abs(found[:, 2]) > found[:, 3]
    for title, which in (("all effects", clear | ~clear), ("effects larger than their half-width", clear)):
        right = [int((np.sign(found[which, i]) == sign[which]).sum()) for i in (0, 1)]
        print(f"Sign of {title}: forecast right in {right[0]} of {which.sum()}, plain mean of others in {right[1]}.")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--studies", type=int, default=4000)
    studies = parser.parse_args().studies
    ways = {
        "factorial": (by_factorial, "val"),
        "one by one": (one_by_one, "val"),
        "random": (by_random_search, "val"),
        "same images": (by_factorial, "test"),
    }
    heads = ("task", "trials", "way", "better", "false better", "gain", "of the best")
    for row in (heads, ["---"] * len(heads)):
        print("| " + " | ".join(row) + " |")
    for name in WORLDS:
        for trials in (24, 40, 64):
            for way, (choose, split) in ways.items():
                random = np.random.default_rng(0)
                world = World(name, studies, random)
                seeds = max(3, trials // 4)  # half of the trials compare
                chosen = choose(world, trials - 2 * seeds, random, getattr(world, split))
                gain, better = compare(world, chosen, seeds, random)
                best = world.gain.max(1)
                false = better & (world.gain[np.arange(studies), chosen] <= 0)
                part = f"{gain.mean() / best.mean():.2f}" if best.mean() > 0.01 else ""
                shares = f"{better.mean():.1%} | {false.mean():.1%} | {gain.mean():+.2f} | {part}"
                print(f"| {name} | {trials} | {way} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
