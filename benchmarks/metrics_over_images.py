"""False claims and widths of intervals for metrics over a set of images: mean IoU, average precision, calibration.

Each study draws m test images, k + 1 arms and n seeds anew. Arms differ on single images and from seed to seed, and on
average over all images and trainings not at all, so every claim of a difference is false. A trial is read as its linear
form (`vitmods.stats.images`) and decided by `vm.decide`. Width: the half-width over that of a decision which knows the
true variance, as it is over all studies.

    python benchmarks/metrics_over_images.py --studies 2000
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from scipy.special import expit

from vitmods.evals.accuracy import bins_of_equal_size, bins_of_equal_width
from vitmods.stats.decide import decide
from vitmods.stats.images import jackknife, mean_ratio, precision
from vitmods.stats.width import POOLED_FRACTION, critical_value

CLASSES = 12


def effects(rng, k, n, m, columns=()):
    """What is added to the logits of arms and seeds: of a trial, of an image, of an arm on it, of a trial on it."""
    image, arm_image = rng.normal(0, 0.8, (1, 1, m, *columns)), rng.normal(0, 0.5, (k + 1, 1, m, *columns))
    trial = 0.1 * rng.normal(size=(k + 1, n, 1, *columns)) + 0.05 * rng.normal(size=(1, n, 1, *columns))
    return image + arm_image + trial + rng.normal(0, 0.4, (k + 1, n, m, *columns))


def iou(rng, k, n, m, images=0.4):
    """Classes in `images` of the images on average, the rarest in a tenth of that; a wrong pixel has another class."""
    has = rng.random((m, CLASSES)) < np.geomspace(2 * images, 0.2 * images, CLASSES)
    has[np.arange(m), rng.integers(CLASSES // 3, size=m)] = True
    pixels = has * rng.lognormal(0, 1, (m, CLASSES)) * 1000
    right = pixels * expit(1.2 + effects(rng, k, n, m, (CLASSES,)))
    confused = rng.dirichlet(np.ones(CLASSES) * 0.3, CLASSES)
    wrong = (pixels - right) @ confused
    union = pixels + wrong
    return [[mean_ratio(right[a, s], union[a, s]) for s in range(n)] for a in range(k + 1)]


def f1(rng, k, n, m):
    """Of `CLASSES` classes, the rarest with a tenth of the images of the most frequent one."""
    p = np.geomspace(1, 0.1, CLASSES)
    label = rng.choice(CLASSES, m, p=p / p.sum())
    other = (label + rng.integers(1, CLASSES, m)) % CLASSES
    right = 1.2 + effects(rng, k, n, m) > 0
    true, eye = np.eye(CLASSES)[label], np.eye(CLASSES)
    trials = []
    for a in range(k + 1):
        predicted = [eye[np.where(right[a, s], label, other)] for s in range(n)]
        trials.append([mean_ratio(2 * true * taken, true + taken) for taken in predicted])
    return trials


def ece(rng, k, n, m, bins=bins_of_equal_width):
    """Confidences are too high by 1 in the logit."""
    logit = 1.2 + 1.5 * effects(rng, k, n, m)
    right = rng.random(m) < expit(logit)
    confidence = np.clip(expit(1 + logit), 0.1, 1 - 1e-9)
    trials = []
    for a in range(k + 1):
        gaps = [(right[a, s] - confidence[a, s], bins(confidence[a, s])) for s in range(n)]
        trials.append([np.sign(np.bincount(bin_of, gap))[bin_of] * gap for gap, bin_of in gaps])
    return trials


def adaptive_ece(rng, k, n, m):
    return ece(rng, k, n, m, bins_of_equal_size)


def ap(rng, k, n, m, interpolated=True):
    """Boxes: of each class some objects in an image, each found or not, and wrong detections with lower scores."""
    rates = np.geomspace(1.0, 0.1, CLASSES)
    objects = rng.poisson(rates, (m, CLASSES))
    trials = [[[] for _ in range(n)] for _ in range(k + 1)]
    shift = effects(rng, k, n, m)
    for c in range(CLASSES):
        if not (count := objects[:, c].sum()):
            objects[rng.integers(m), c], count = 1, 1
        owner = np.repeat(np.arange(m), objects[:, c])
        size, own = rng.normal(0, 1, count), rng.normal(0, 0.5, (k + 1, count))
        for a in range(k + 1):
            for s in range(n):
                wrong = np.repeat(np.arange(m), rng.poisson(1.5 * rates[c], m))
                score = 0.8 + size + own[a] + shift[a, s, owner] + rng.normal(0, 0.5, count)
                found = score > -0.5
                scores = np.concatenate([score[found], rng.normal(-0.3, 1, len(wrong)) - 0.3 * shift[a, s, wrong]])
                right = np.arange(len(scores)) < found.sum()
                image = np.concatenate([owner[found], wrong])
                trials[a][s].append(precision(scores, right, image, objects[:, c], interpolated))
    return [[of_classes(parts) for parts in of_seeds] for of_seeds in trials]


def of_classes(parts):
    averages, changes = zip(*parts, strict=True)
    return jackknife(np.mean(averages), np.stack(changes, 1))


def labels_ap(rng, k, n, m):
    """Several labels an image, each image a detection of each label."""
    has = rng.random((m, CLASSES)) < np.geomspace(0.5, 0.05, CLASSES)
    has[rng.integers(m, size=CLASSES), np.arange(CLASSES)] = True
    scores = 1.5 * has + effects(rng, k, n, m, (CLASSES,))
    every = np.arange(m)
    return [
        [of_classes([precision(scores[a, s, :, c], has[:, c], every, has[:, c]) for c in range(CLASSES)])
         for s in range(n)]
        for a in range(k + 1)
    ]  # fmt: skip


def rare_iou(rng, k, n, m):
    return iou(rng, k, n, m, 0.1)


METRICS = {call.__name__: call for call in (iou, rare_iou, f1, ece, adaptive_ece, ap, labels_ap)}


def row(name, k, n, m, studies):
    """False claims of a study in percent: on other images, and of seeds alone; and the width of intervals."""
    rng, false, effects = np.random.default_rng([m, k, n]), [], []
    for _ in range(studies):
        trials = METRICS[name](rng, k, n, m)
        scores = {("base", *"abcdefgh")[a]: dict(enumerate(of_seeds)) for a, of_seeds in enumerate(trials)}
        every = decide(scores, unit="score").effects.values()
        ends = np.array([[(e.low, -e.high), (e.seeds_low, -e.seeds_high)] for e in every])
        false.append((ends.max(-1) > 0).any(0))
        effects += every
    # The half-width where the images' part is known: what is left of the true variance beside that of seeds.
    seeds = np.array([2 * effect.sd**2 / n for effect in effects])
    images = max(0.0, np.var([effect.effect for effect in effects]) - seeds.mean())
    df = (seeds + images) ** 2 / (seeds**2 / [effect.df for effect in effects])
    ideal = critical_value(k, df, 0.05 if k == 1 else POOLED_FRACTION * 0.05) * np.sqrt(seeds + images)
    return (*(100 * np.mean(false, 0)), np.mean([effect.half for effect in effects]) / ideal.mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--studies", type=int, default=2000)
    parser.add_argument("--metrics", nargs="+", default=list(METRICS), choices=METRICS)
    parser.add_argument("--images", type=int, nargs="+", default=[70, 150, 300, 1000])
    parser.add_argument("--arms", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 10])
    options = parser.parse_args()
    print("metric        k   n  images  false %  of seeds alone %  width  seconds")
    for name in options.metrics:
        for m in options.images:
            for k in options.arms:
                for n in options.seeds:
                    begin = time.perf_counter()
                    numbers = row(name, k, n, m, options.studies)
                    text = "{:7.1f}  {:16.1f}  {:5.2f}".format(*numbers)
                    print(f"{name:<12} {k:>2}  {n:>2}  {m:>6}  {text}  {time.perf_counter() - begin:7.0f}", flush=True)


if __name__ == "__main__":
    main()
