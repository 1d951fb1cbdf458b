"""The same trials read by two rules: a paired t test for each arm with Holm's correction, and `vm.decide`.

The first was the rule of vitmods before: `helps` or `hurts` where Holm's p is below 0.05, `no worse` where the
one-sided p against a loss of the margin is below 0.025 after Holm, else `cannot tell`. Test images are no part of it.

    python benchmarks/verdict_rules.py runs/demo runs/pets ...
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np
from scipy import stats

from vitmods.study import Answer

Scores = Mapping[int, float | None]


def paired_t_with_holm(base: Scores, arms: Mapping[str, Scores], margin: float, scale: float) -> dict[str, str]:
    """Arm -> verdict; scores as kept, `scale` makes them points of gain."""
    gains = {
        arm: scale * np.array([own[s] - base[s] for s in base if base[s] is not None and own.get(s) is not None])
        for arm, own in arms.items()
    }
    differ = _holm([stats.ttest_1samp(d, 0).pvalue if len(d) > 1 and np.ptp(d) else np.nan for d in gains.values()])
    worse = _holm(
        [
            stats.ttest_1samp(d, -margin, alternative="greater").pvalue if len(d) > 1 and np.ptp(d) else np.nan
            for d in gains.values()
        ]
    )
    found = {}
    for (arm, d), p, p_worse in zip(gains.items(), differ, worse, strict=True):
        verdict = "no worse" if p_worse < 0.025 else "cannot tell"
        found[arm] = ("helps" if d.mean() > 0 else "hurts") if p < 0.05 else verdict
    return found


def _holm(p_values: list[float]) -> np.ndarray:
    p = np.array(p_values)
    order = np.argsort(p)  # NaN last, which still counts as a test
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return corrected


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+")
    for folder in parser.parse_args().folders:
        answer = Answer.load(folder)
        scale = (100 if answer.metric.unit == "%" else 1) * (1 if answer.metric.higher_is_better else -1)
        old = paired_t_with_holm(answer.base.scores, {a.name: a.scores for a in answer.arms}, answer.margin, scale)
        print(f"\n{folder}: margin {answer.margin:g}, base {100 * (answer.base.mean or 0):.2f}\n")
        print("| arm | seeds | effect, 95 % interval | paired t, Holm | now |\n| --- | --- | --- | --- | --- |")
        for arm, effect in answer.effects.items():
            low, high = effect.interval
            interval = f"{effect.effect:+.2f} [{low:+.2f}, {high:+.2f}]"
            print(f"| {arm} | {effect.n} | {interval} | {old[arm]} | {effect.verdict} |")


if __name__ == "__main__":
    main()
