"""Recompute the gallery's intervals and the claims that they decide: `python docs/gallery/recompute.py`.

It needs numpy and scipy, and nothing of vitmods: the formulas of docs/statistics.md, written a second time. It reads
scores/*.json, and compares with src/vitmods/papers/tables/studies.json and docs/claims.md. What a reading of scores
takes as given: the level, how many contrasts hold together, and the arms some of whose trials failed (`outside`), whose
spread is not that of the others. Arms of a factorial study are runs, of which those that failed are left out.
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
P, P_WEIGHTS = ((1 + U) / 2) ** 8, U_WEIGHTS * 4 * ((1 + U) / 2) ** 7  # dense near 0, where small levels are decided
TOLERANCE = 0.01
WIDE = "too wide to test"


def scores_of(study, setting, arm, seed):
    """The scores of a trial's images, or of groups of them, or its one score; NaN without the trial."""
    stored, is_bits = study["scores"][setting].get(arm, {}).get(str(seed), np.nan), study["kind"] == "bits"
    if not isinstance(stored, str):
        return np.full(study["images"], stored)
    content = np.frombuffer(base64.b64decode(stored), "u1" if is_bits else "<f8")
    return np.unpackbits(content)[: study["images"]] * 1.0 if is_bits else content


def critical(df, k, alpha, rho):
    """The critical value of k contrasts that hold together, with the correlation rho."""
    if k == 1:
        return special.stdtrit(df, 1 - alpha / 2)
    s = np.sqrt(2 * special.gammaincinv(df / 2, P) / df)
    shift, scale = np.sqrt(rho) * Z[:, None], np.sqrt(1 - rho)

    def excess(c):
        inside = special.ndtr((c * s - shift) / scale) - special.ndtr((-c * s - shift) / scale)
        return 1 - Z_WEIGHTS @ inside**k @ P_WEIGHTS / Z_WEIGHTS.sum() - alpha

    return optimize.brentq(excess, 0.5, 500)


def spread(y, floor, base_in_all):
    """df_e, w and nu of trials (arms, seeds), by least squares with indicators of arms and seeds."""
    (g, n), cells = y.shape, np.isfinite(y)
    arms, count = np.kron(np.eye(g), np.ones((n, 1))), cells.sum(1)
    design = np.hstack([arms, np.kron(np.ones((g, 1)), np.eye(n))]) * cells.reshape(-1, 1)
    maker = np.diag(cells.ravel() * 1.0) - design @ np.linalg.pinv(design)
    q = (maker @ np.where(cells, y, 0).ravel()) ** 2 @ arms
    df, h = round(np.trace(maker)), arms.T @ maker**2 @ arms
    mse, inverse = q.sum() / df, np.linalg.pinv(h, rcond=1e-9, hermitian=True)
    v = np.maximum(np.where(np.isclose((inverse @ h).diagonal(), 1), inverse @ q, mse), 0)
    w = np.maximum(np.maximum((4 * mse + (count - 1) * v) / (3 + count), v), floor**2)
    nu = np.minimum(3 + count, df).astype(float)
    if base_in_all and v[0] > mse and count[0] < 5:
        nu[0] = count[0] - 1
    return df, np.where(count > 0, w, np.inf), nu


def interval(d, of_seeds, level, step, near):
    """The ends of an effect with differences d (seeds, images), on other images where these are several."""
    (n, m), mean, (variance, df) = d.shape, d.mean(), of_seeds
    half = critical(df, *level) * np.sqrt(variance)
    if m == 1:
        return mean - half, mean + half
    by_image = d.mean(0) - mean
    residual = ((d - d.mean(1)[:, None] - by_image) ** 2).sum() / ((n - 1) * (m - 1))
    differ = (abs(d) > 1e-10).any(0).sum()
    one_more = step if differ < 10 else 0.0
    images = (by_image**2).sum() / (m - 1) + one_more**2 / m
    both = variance + max(0, images / m - residual / (n * m))
    terms = variance**2 / df + (images / m) ** 2 / (m - 1) + (residual / (n * m)) ** 2 / ((n - 1) * (m - 1))
    both_df = max(both**2 / terms, df if m >= 20 else 0)
    total = max(half, critical(both_df, *level) * np.sqrt(both))
    low, high = mean - total, mean + total
    if near and step and differ < 0.05 * m:
        factor = min(2 - 2 * differ / (0.05 * m), 1) * (1 / 6 + total**2 / both / 3) / (m * images)
        down, up = (factor * ((by_image**3).mean() + sign * one_more**3 / m) for sign in (-1, 1))
        low, high = low + down * (0.5 if down > 0 else 1), high + up * (0.5 if up < 0 else 1)
    return min(low, mean - half), max(high, mean + half)


def effects(study):
    """Each effect of a study as it is named in studies.json, with its interval: {name: (effect, low, high)}."""
    found, scale, binary = {}, study["scale"], study["kind"] == "bits"
    sign, limit = np.sign(scale), 100 if abs(scale) == 100 else np.inf
    labels, groups = np.unique(study["groups"] or range(study["images"]), return_inverse=True)
    for reading in study["readings"]:
        arms, outside, weights = reading["arms"], reading["outside"], np.array([*reading["settings"].values()])
        rows = dict(zip(arms, np.eye(len(arms)) - np.eye(len(arms))[0]))  # each arm minus the first
        if runs := reading.get("runs"):  # which changes are on in each: what each adds, by least squares
            rows = dict(zip(reading["changes"], np.linalg.pinv([[1, *map(int, runs[run])] for run in arms])[1:]))
        x = scale * np.array([[[scores_of(study, setting, arm, seed) for seed in reading["seeds"]]
                               for arm in arms] for setting in reading["settings"]])  # fmt: skip
        near = binary & (abs(np.nanmedian(x.mean(-1), -1) / abs(scale) - 0.5) > 0.45).all(0)
        floor = binary * 50 / study["images"] * np.sqrt((weights**2).sum())
        x = np.tensordot(weights, x, 1) @ np.eye(len(labels))[groups] * (len(labels) / len(groups))
        df, w, nu = spread(np.where([[arm in outside] for arm in arms], np.nan, x.mean(-1)), floor, not runs)
        x = x if study["other_images"] else x.mean(-1, keepdims=True)
        k, alpha, step = reading["family"], reading["alpha"], 100.0 * (binary and not study["groups"])
        for name, kind in reading["effects"].items():
            row, used = rows[kind], rows[kind] != 0
            d = np.tensordot(row[used], x[used], 1)
            d = d[np.isfinite(d[:, 0])]
            n, parts, wide = len(d), row[used] ** 2 * w[used] / len(d), np.isinf(w[used]).any()
            own = max(d.mean(1).var(ddof=1), (row**2).sum() * floor**2) / n, n - 1
            both = own if wide else (max(parts.sum(), own[0]), min(df, parts.sum() ** 2 / (parts**2 / nu[used]).sum()))
            if runs or reading["pairs"]:
                ways = [(both, (k, alpha, 0))]
            elif k == 1 or wide:
                ways = [(own, (1, alpha / k, 0))]
            else:
                ways = [(both, (k, 0.8 * alpha, 0.5)), (own, (1, 0.2 * alpha / k, 0))]
            is_near = near[used | bool(runs)].all()
            ends = min((interval(d, *way, step, is_near) for way in ways), key=np.ptp)
            found[name] = [float(end) for end in (sign * d.mean(), *np.sort(sign * np.clip(ends, -limit, limit)))]
    return found


def together(sets, arms):
    """The interval of several studies, those of each data set side by side."""
    if len(sets) == len(sets[0]) == 1:
        return sets[0][0][1:]
    pairs = [[np.average(of, weights=(high - low) ** -2.0) for of in (effect, (high - low) / 2)]
             for effect, low, high in map(np.transpose, sets)]  # fmt: skip
    (effect, half), b = np.transpose(pairs), len(pairs)

    def around(tau2):
        u = 1 / (tau2 + half**2 / 4)
        middle = np.average(effect, weights=u)
        return (u * (effect - middle) ** 2).sum() / max(b - 1, 1), middle, u

    q, middle, u = around(0)
    if b > 2 and q > 1:
        q, middle, u = around(optimize.brentq(lambda tau2: around(tau2)[0] - 1, 0, b * effect.var(ddof=1)))
    of_sets = special.stdtrit(b - 1, 1 - 0.025 / arms) * (q / u.sum()) ** 0.5 if b > 2 else 0.0
    width = max(of_sets, ((u * half) ** 2).sum() ** 0.5 / u.sum())
    return middle - width, middle + width


def status(direction, points, low, high):
    """What an interval says of a claim."""
    if direction in ("loss", "no loss") or (direction == "no difference" and high < -low):
        low, high = -high, -low
    least, most = (points[0], points[-1]) if points else (0, 0.5)
    seen, unseen = (low > 0, high < least) if direction in ("gain", "loss") else (high < most, low > most)
    is_wide = points and (high - low) / 2 > 2 * most
    return WIDE if is_wide or not (seen or unseen) else "seen here" if seen else "not seen here"


def keeps(wanted, found):
    """Whether a fact of a study, or all of several, is what a claim holds for: a value, one of words, or in a range."""
    found, wanted = (x if isinstance(x, list) else [x] for x in (found, wanted))
    return all(value in wanted if isinstance(value, str) else wanted[0] <= value <= wanted[-1] for value in found)


def status_in(run, claim, facts):
    """The status of a claim by the studies of a run that keep its conditions; None without any."""
    by_arm = {}
    for name, arms in (test.split(": ") for test in claim.get("tests", ())):
        kept = all(keeps(wanted, facts[name]["facts"][fact]) for fact, wanted in claim.get("holds", {}).items())
        for arm in arms.split("; ") if kept and name in run else ():
            studies = by_arm.setdefault(arm, {}).setdefault(str(facts[name]["facts"]["data"]), [])
            studies.append(run[name].get(arm, [np.nan] * 3))  # an arm that was not run again decides nothing
    intervals = [together([*sets.values()], len(by_arm)) for sets in by_arm.values()]
    found = {status(claim["direction"], claim.get("points", []), *ends) for ends in intervals}
    return min(found, key=["not seen here", WIDE, "seen here"].index, default=None)


def main():
    facts, page, wrong, off, number = json.loads((TABLES / "studies.json").read_text()), PAGE.read_text(), [], [0.0], 0
    recomputed = {path.stem: effects(json.loads(path.read_text())) for path in sorted(HERE.glob("scores/*.json"))}
    for name, study in facts.items():
        if name not in recomputed:
            wrong.append(f"{name}: its scores are missing")
        for arm, written in study["effects"].items() if name in recomputed else ():
            again = recomputed[name].get(arm, [np.inf] * 3)
            off.append(np.abs(np.subtract(again, written)).max())
            if not off[-1] <= TOLERANCE:
                wrong.append(f"{name}: {arm} is {again}, not {written}")
    second = {name: study["again"] for name, study in facts.items() if name in recomputed}
    for path in sorted(TABLES.glob("*.toml")):
        for claim in tomllib.loads(path.read_text())["claims"]:
            found, again = (status_in(run, claim, facts) for run in (recomputed, second))
            found = found if found in (None, WIDE, again) else "decided on one processor"
            number += bool(found)
            if found and f"**{found}** · {claim['says'].strip()}.".lower() not in page.lower():
                wrong.append(f"{path.stem}: '{claim['says'].strip()}' is {found}")
    print(f"{len(off) - 1} intervals of {len(recomputed)} studies: the largest difference is {max(off):.4f} points.")
    print(f"{number} claims follow from them.", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
