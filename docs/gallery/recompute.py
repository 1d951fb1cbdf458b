"""Recompute the gallery's intervals and the claims that they decide: `python docs/gallery/recompute.py`.

It needs numpy and scipy, and nothing of vitmods: the formulas of docs/statistics.md, written a second time. It reads
the scores of studies in scores/*.json, and compares with src/vitmods/papers/tables/studies.json and docs/claims.md.
What a reading of scores takes as given: the level, how many contrasts hold together, and the arms some of whose trials
failed (`outside`), whose spread is not that of the others.
"""

import base64
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
from scipy import optimize, special

HERE = Path(__file__).resolve().parent
TABLES, PAGE = HERE.parents[1] / "src/vitmods/papers/tables", HERE.parent / "claims.md"
Z, Z_WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
U, U_WEIGHTS = np.polynomial.legendre.leggauss(200)
TOLERANCE = 0.01
ORDER = ["not seen here", "too wide to test", "seen here"]  # of the arms of a claim, the first counts


def scores_of(study, setting, arm, seed):
    """The scores of a trial's images, or of groups of them, or its one score; NaN without the trial."""
    text, m = study["scores"][setting].get(arm, {}).get(str(seed)), study["images"]
    if text is None:
        return np.full(m, np.nan)
    if not isinstance(text, str):
        return np.full(m, float(text))
    content = base64.b64decode(text)
    is_bits = study["kind"] == "bits"
    return np.unpackbits(np.frombuffer(content, "u1"))[:m] * 1.0 if is_bits else np.frombuffer(content, "<f8")


def critical(df, k, alpha, rho):
    """The critical value of k contrasts that hold together, with the correlation rho."""
    if k == 1:
        return special.stdtrit(df, 1 - alpha / 2)
    s = np.sqrt(2 * special.gammaincinv(df / 2, (1 + U) / 2) / df)
    shift, scale = np.sqrt(rho) * Z[:, None], np.sqrt(1 - rho)

    def excess(c):
        inside = special.ndtr((c * s - shift) / scale) - special.ndtr((-c * s - shift) / scale)
        return 1 - Z_WEIGHTS @ inside**k @ U_WEIGHTS / 2 / Z_WEIGHTS.sum() - alpha

    return optimize.brentq(excess, 0.5, 500)


def spread(y, pooled, floor):
    """df_e, w and nu of trials (arms, seeds), by least squares with indicators of arms and seeds."""
    (g, n), cells = y.shape, np.isfinite(y) & pooled[:, None]
    arms, count = np.kron(np.eye(g), np.ones((n, 1))), cells.sum(1)
    design = np.hstack([arms, np.kron(np.ones((g, 1)), np.eye(n))]) * cells.reshape(-1, 1)
    maker = np.diag(cells.ravel() * 1.0) - design @ np.linalg.pinv(design)
    q = (maker @ np.where(cells, y, 0).ravel()) ** 2 @ arms
    df, h = round(np.trace(maker)), arms.T @ maker**2 @ arms
    mse, inverse = q.sum() / df, np.linalg.pinv(h, rcond=1e-9, hermitian=True)
    v = np.maximum(np.where(np.isclose((inverse @ h).diagonal(), 1), inverse @ q, mse), 0)
    w = np.maximum(np.maximum((4 * mse + (count - 1) * v) / (3 + count), v), floor**2)
    nu = np.minimum(3 + count, df).astype(float)
    if v[0] > mse and count[0] < 5:
        nu[0] = count[0] - 1
    return df, np.where(count > 0, w, np.inf), nu


def interval(d, variance, df, level, step, near):
    """The ends of an effect with differences d (seeds, images), on other images where these are several."""
    n, m = d.shape
    half = critical(df, *level) * np.sqrt(variance)
    if m == 1:
        return d.mean() - half, d.mean() + half
    by_image = d.mean(0) - d.mean()
    residual = ((d - d.mean(1)[:, None] - by_image) ** 2).sum() / ((n - 1) * (m - 1))
    differ = (d != 0).any(0).sum()
    one_more = step if differ < 10 else 0.0
    images = (by_image**2).sum() / (m - 1) + one_more**2 / m
    both = variance + max(0, images / m - residual / (n * m))
    terms = variance**2 / df + (images / m) ** 2 / (m - 1) + (residual / (n * m)) ** 2 / ((n - 1) * (m - 1))
    both_df = max(both**2 / terms, df if m >= 20 else 0)
    total = max(half, critical(both_df, *level) * np.sqrt(both))
    moved, weight = [0.0, 0.0], np.clip(2 - 2 * differ / (0.05 * m), 0, 1) if near and step else 0.0
    for side, sign in enumerate((-1, 1)) if images > 0 else ():
        skew = weight * ((by_image**3).mean() + sign * one_more**3 / m) / images
        moved[side] = (1 / 6 + total**2 / both / 3) * skew / m * (1 if sign * skew >= 0 else 0.5)
    low, high = d.mean() - total + moved[0], d.mean() + total + moved[1]
    return min(low, d.mean() - half), max(high, d.mean() + half)


def effects(study):
    """Each effect of a study as it is named in studies.json, with its interval: {name: (effect, low, high)}."""
    found, scale, binary = {}, study["scale"], study["kind"] == "bits"
    labels, groups = np.unique(study["groups"] or range(study["images"]), return_inverse=True)
    for reading in study["readings"]:
        weights = np.array([*reading["settings"].values()])
        arms = [reading["against"], *(arm for arm in reading["arms"] if arm != reading["against"])]
        x = scale * np.array([[[scores_of(study, setting, arm, seed) for seed in reading["seeds"]]
                               for arm in arms] for setting in reading["settings"]])  # fmt: skip
        middle = np.nanmedian(x.mean(-1), -1)
        near = binary & (abs(middle / abs(scale) - 0.5) > 0.45).all(0)
        floor = binary * 50 / study["images"] * np.sqrt((weights**2).sum())
        x = np.tensordot(weights, x, 1) @ np.eye(len(labels))[groups] * (len(labels) / len(groups))
        y, pooled = x.mean(-1), np.array([arm not in reading["outside"] for arm in arms])
        df, w, nu = spread(y, pooled, floor)
        if not study["other_images"]:
            x = y[..., None]
        k, alpha = reading["family"], reading["alpha"]
        for name, arm in reading["effects"].items():
            a = arms.index(arm)
            d = (x[a] - x[0])[np.isfinite(y[a] - y[0])]
            n, parts = len(d), w[[0, a]] / len(d)
            own = max(d.mean(1).var(ddof=1), 2 * floor**2) / n
            both, wide = max(parts.sum(), own), np.isinf(w[a])
            both_df = n - 1 if wide else min(df, parts.sum() ** 2 / (parts**2 / nu[[0, a]]).sum())
            if reading["pairs"]:
                ways = [(own if wide else both, both_df, (k, alpha, 0))]
            elif k == 1 or wide:
                ways = [(own, n - 1, (1, alpha / k, 0))]
            else:
                ways = [(both, both_df, (k, 0.8 * alpha, 0.5)), (own, n - 1, (1, 0.2 * alpha / k, 0))]
            step = binary * 100.0 if len(labels) == study["images"] else 0.0
            low, high = min((interval(d, *way, step, near[0] and near[a]) for way in ways), key=np.ptp)
            ends = np.clip([low, high], *((-100, 100) if abs(scale) == 100 else (-np.inf, np.inf)))
            found[name] = [float(np.sign(scale) * end) for end in (d.mean(), *ends[:: int(np.sign(scale))])]
    return found


def together(sets, arms):
    """The interval of several studies, those of each data set side by side."""
    if len(sets) == 1 and len(sets[0]) == 1:
        return sets[0][0][1:]
    pairs = []
    for studies in map(np.array, sets):
        halves = (studies[:, 2] - studies[:, 1]) / 2
        pairs.append((studies[:, 0] * halves**-2.0, halves**-1.0) @ np.ones(len(halves)) / (halves**-2.0).sum())
    (effect, half), b = np.array(pairs).T, len(pairs)
    if b < 3:
        middle, width = (effect * half**-2.0).sum() / (half**-2.0).sum(), (half**-2.0).sum() ** -0.5
        return middle - width, middle + width

    def around(tau2):
        u = 1 / (tau2 + half**2 / 4)
        middle = (u * effect).sum() / u.sum()
        return (u * (effect - middle) ** 2).sum() / (b - 1), middle, u

    apart = around(0)[0] > 1
    q, middle, u = around(optimize.brentq(lambda x: around(x)[0] - 1, 0, b * effect.var(ddof=1)) if apart else 0)
    width = special.stdtrit(b - 1, 1 - 0.025 / arms) * (q / u.sum()) ** 0.5
    width = max(width, ((u * half) ** 2).sum() ** 0.5 / u.sum())
    return middle - width, middle + width


def status(direction, points, low, high):
    """What an interval says of a claim."""
    wide = "too wide to test"
    if points and (high - low) / 2 > 2 * points[-1]:
        return wide
    if direction in ("loss", "no loss"):
        low, high = -high, -low
    if direction in ("gain", "loss"):
        return "seen here" if low > 0 else "not seen here" if high < (points or [0])[0] else wide
    if direction == "no difference" and high < -low:
        low, high = -high, -low
    size = points[-1] if points else 0.5
    return "seen here" if high < size else "not seen here" if low > size else wide


def keeps(wanted, found):
    """Whether a fact of a study, or all of several, is what a claim holds for."""
    if not isinstance(wanted, list):
        wanted = [wanted, wanted]
    is_range = not isinstance(wanted[0], str)
    found = found if isinstance(found, list) else [found]
    return all(wanted[0] <= value <= wanted[1] if is_range else value in wanted for value in found)


def decided(claim, facts, recomputed):
    """The status of a claim by the studies whose scores were kept and that keep its conditions; None without any."""
    ends = [ends_of(claim, facts, run) for run in (recomputed, {name: facts[name]["again"] for name in recomputed})]
    if not ends[0]:
        return None
    found, again = (
        {status(claim["direction"], claim.get("points", []), *pair) for pair in pairs} or {"not run again"}
        for pairs in ends
    )
    found, again = (min(of, key=[*ORDER, "not run again"].index) for of in (found, again))
    return found if found in (again, ORDER[1]) else "decided on one processor"


def ends_of(claim, facts, run):
    """The ends of the interval of each arm of a claim over the studies that keep its conditions; none if a study of
    this run does not have all arms."""
    by_arm = {}
    for name, arms in (test.split(": ") for test in claim.get("tests", ())):
        kept = all(keeps(wanted, facts[name]["facts"][fact]) for fact, wanted in claim.get("holds", {}).items())
        for arm in arms.split("; ") if kept and name in run else ():
            if arm not in run[name]:
                return []
            sets = by_arm.setdefault(arm, {})
            sets.setdefault(str(facts[name]["facts"]["data"]), []).append(run[name][arm])
    return [together([*sets.values()], len(by_arm)) for sets in by_arm.values()]


def main():
    facts, page, wrong = json.loads((TABLES / "studies.json").read_text()), PAGE.read_text(), []
    recomputed = {path.stem: effects(json.loads(path.read_text())) for path in sorted(HERE.glob("scores/*.json"))}
    largest = count = number = 0
    for name, study in facts.items():
        if study["scores"] != (name in recomputed):
            wrong.append(f"{name}: scores is {study['scores']}, which is not so")
        for arm, written in study["effects"].items() if name in recomputed else ():
            off = np.abs(np.subtract(recomputed[name].get(arm, [np.inf] * 3), written)).max()
            largest, count = max(largest, off), count + 1
            if not off <= TOLERANCE:
                wrong.append(f"{name}: {arm} is {recomputed[name].get(arm)}, not {written}")
    for path in sorted(TABLES.glob("*.toml")):
        for claim in tomllib.loads(path.read_text())["claims"]:
            if found := decided(claim, facts, recomputed):
                says, number = claim["says"].strip(), number + 1
                if f"**{found}** · {says if says[1].isupper() else says[0].upper() + says[1:]}." not in page:
                    wrong.append(f"{path.stem}: '{says}' is {found}")
    print(f"{count} intervals of {len(recomputed)} studies: the largest difference is {largest:.4f} points.")
    print(f"{number} claims follow from them.", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
