"""Numbers and verdicts in plain words, for the page and the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vitmods.stats.effects import CANNOT_TELL, FRACTION, HELPS, HURTS, NO_WORSE, VERDICTS, Effect, digits_of, scale_of
from vitmods.study.answer import Answer, ArmAnswer, ArmCost
from vitmods.study.tuning import show_value
from vitmods.tasks.metrics import Metric
from vitmods.util.text import listing, plural

GLYPHS = {HELPS: "▲", NO_WORSE: "≈", CANNOT_TELL: "?", HURTS: "▼"}
PRESERVES = {
    "function": "starts with base's outputs",
    "weights": "keeps base's weights",
    "nothing": "needs weights of its own",
}
MANY_SEEDS = 1000
ALL_POINTS = 100


def ranked(answer: Answer) -> list[tuple[ArmAnswer, Effect]]:
    """The arms with their effects: best verdict first, then the larger effect; arms without a number last."""

    def rank(row: tuple[ArmAnswer, Effect]) -> tuple[int, float]:
        effect = row[1]
        return (VERDICTS.index(effect.verdict), -effect.gain) if effect.n else (len(VERDICTS), 0.0)

    return sorted(((arm, arm.effect) for arm in answer.arms if arm.effect), key=rank)


def headline(answer: Answer) -> str:
    """One sentence for the whole study, which says first how far it is."""
    verdicts = [effect.verdict for effect in answer.effects.values()]
    sentence = _verdict_sentence(Counter(verdicts))
    if answer.complete:
        return sentence
    done = f"{sum(trial.ended for trial in answer.trials)} of {plural(len(answer.trials), 'trial')}"
    if set(verdicts) <= {CANNOT_TELL}:
        return f"This study is not finished: {done} have ended."
    return f"So far, after {done}: {sentence[0].lower()}{sentence[1:]}"


def _verdict_sentence(count: Mapping[str, int]) -> str:
    total = sum(count.values())
    if total == 1:
        return {
            HELPS: "The change helps.", HURTS: "The change hurts.", NO_WORSE: "The change is no worse than base.",
            CANNOT_TELL: "This study cannot tell whether the change helps.",
        }[next(iter(count))]  # fmt: skip
    words = ((HELPS, "helps", "help"), (NO_WORSE, "is no worse", "are no worse"), (HURTS, "hurts", "hurt"))
    parts = [
        f"{count[verdict]} {one if count[verdict] == 1 else many}" for verdict, one, many in words if count[verdict]
    ]
    if not parts:
        return f"This study cannot tell for any of the {total} arms."
    rest = f"; for {count[CANNOT_TELL]} this study cannot tell" if count[CANNOT_TELL] else ""
    return f"Of {total} arms, {listing(parts)}{rest}."


def lead(effect: Effect, arm: str) -> str:
    """The start of the sentence: the arm and its verdict."""
    if effect.verdict == CANNOT_TELL:
        return f"For {arm} this study cannot tell"
    return f"{arm} {'is no worse' if effect.verdict == NO_WORSE else effect.verdict}"


def finding(effect: Effect, metric: Metric, trials: int) -> str:
    """The rest of the sentence: how much, how sure, and for `cannot tell` why. `trials` is the number planned."""
    if effect.n == 0 and effect.diverged:
        return f"{effect.diverged} of its {plural(trials, 'trial')} diverged, and no seed is left to compare with base."
    if effect.n == 0:
        return "no seed has finished in both this arm and base yet."
    level = f"{100 * (1 - effect.alpha):.0f}\u00a0% interval {signed(effect.low, effect.digits)} to "
    level += f"{signed(effect.high, effect.digits)}, "
    gap = f"{signed(effect.mean, effect.digits)} {of_metric(metric)}"
    sentence = f"{gap} ({level if effect.has_interval else ''}{plural(effect.n, 'paired seed')})."
    return " ".join(filter(None, (sentence, *_remarks(effect))))


def _remarks(effect: Effect) -> list[str]:
    margin = f"{effect.margin:g}{points(effect.unit)}"
    diverged = f"{plural(effect.diverged, 'trial')} of this arm diverged" if effect.diverged else ""
    if effect.verdict == HURTS:
        small = f"The loss is within the margin of {margin}." if effect.least_gain > -effect.margin else ""
        return [small, diverged and f"{diverged}."]
    if effect.verdict == NO_WORSE:
        return [f"A loss of {margin} or more is ruled out."]
    if effect.verdict == HELPS:
        return []
    return [diverged and f"{diverged}, which rules out a favorable verdict.", _why_unsure(effect)]


def _why_unsure(effect: Effect) -> str:
    if effect.n == 1:
        return "One pair has no spread; run more seeds."
    if not effect.has_interval:
        return "All pairs differ by the same amount, so the spread is unknown; test on more images."
    if effect.diverged:
        return ""
    if effect.low > 0 or effect.high < 0:
        return f"Alone, its interval leaves out zero; corrected for {effect.family} arms, it does not."
    if effect.least_gain > -effect.margin:
        return f"Alone, its interval rules out a loss of the margin; corrected for {effect.family} arms, it does not."
    return _seeds_to_tell(effect)


def _seeds_to_tell(effect: Effect) -> str:
    """How many seeds would find what was seen, or the margin where that is larger: smaller effects do not matter."""
    sought = max(abs(effect.mean), effect.margin)
    if not sought:
        return f"It could have found {detectable(effect)}{points(effect.unit)} or more."
    needed = effect.seeds_needed(sought)
    seeds = f"about {needed}" if needed <= MANY_SEEDS else f"more than {MANY_SEEDS:,}"
    size = (
        "as large as the one seen"
        if abs(effect.mean) >= effect.margin
        else f"of {effect.margin:g}{points(effect.unit)}"
    )
    if needed <= effect.n:
        return f"It could have found {detectable(effect)}{points(effect.unit)} or more."
    return f"An effect {size} takes {seeds} seeds to find."


def of_metric(metric: Metric) -> str:
    """What a difference counts: `points of top-1 accuracy`, `nats of log loss`, or the metric alone."""
    name = "points" if metric.unit == FRACTION else metric.unit
    return f"{name} of {metric.title}" if name else metric.title


def points(unit: str) -> str:
    """The unit of differences after a number, with its space: ` points`, ` nats` or nothing."""
    return " points" if unit == FRACTION else f" {unit}".rstrip()


def score(metric: Metric, value: float | None) -> str:
    """A value as tables show it, without its unit; a dash where there is none."""
    return "–" if value is None else f"{scale_of(metric.unit) * value:.{digits_of(metric.unit)}f}"


def signed(value: float, digits: int = 2) -> str:
    """`+0.42`, with a real minus sign and no sign on zero; a dash for NaN."""
    if math.isnan(value):
        return "–"
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def detectable(effect: Effect) -> str:
    """The smallest effect that would be found; no fraction can differ by more than all points."""
    if effect.unit == FRACTION and effect.detectable > ALL_POINTS:
        return f"> {ALL_POINTS}"
    return f"{effect.detectable:.{effect.digits}f}"


def mean_effect(effect: Effect) -> str:
    """`+0.42`, with the decimals that suit the metric."""
    return signed(effect.mean, effect.digits)


def interval(effect: Effect) -> str:
    """`[+0.11, +0.73]`, or nothing where there is none."""
    if not effect.has_interval:
        return ""
    return f"[{signed(effect.low, effect.digits)}, {signed(effect.high, effect.digits)}]"


def probability(p: float) -> str:
    """Two significant digits at most, and no false zero."""
    if math.isnan(p):
        return "–"
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def ratio(value: float | None) -> str:
    """`1.08×`; a dash where it was not measured."""
    return "–" if value is None or math.isnan(value) else f"{value:.2f}×"


def fine_ratio(value: float) -> str:
    """Like `ratio`, but a difference below a hundredth stays visible."""
    return f"{value:.4f}×" if 0 < abs(value - 1) < 0.005 else ratio(value)


def costs(cost: ArmCost) -> str:
    """`training step 1.08× · inference 1.02× · …`."""
    timed = (("training step", cost.train_step), ("inference", cost.infer_n), ("memory", cost.peak_memory))
    return " · ".join([*(f"{label} {ratio(one.ratio)}" for label, one in timed), f"parameters {ratio(cost.params)}"])


def count(value: float) -> str:
    """`5.36 M`, `359 M`, `4.61 G`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g} "


def short_time(seconds: float) -> str:
    """`4.8 ms`, `1.2 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def model_size(config: Mapping[str, Any]) -> str:
    """One sentence with the sizes of a ViT, or what is known of another model."""
    rows, columns = config["img_size"]
    if "modules" in config:
        return f"{config['class']}, {count(config['params'])} parameters, images of {rows} × {columns} pixels."
    return (
        f"{config['depth']} blocks, width {config['embed_dim']}, {plural(config['num_heads'], 'head')}, "
        f"images of {rows} × {columns} pixels."
    )


def point_text(values: Mapping[str, Any]) -> str:
    """`lr 0.001, weight_decay 0.1`."""
    return ", ".join(f"{name} {show_value(value)}" for name, value in values.items())


def tuned_text(answer: Answer) -> str:
    """What was tried for every arm, with how many trials, and what was chosen; empty where nothing was tuned."""
    if not answer.tuned:
        return ""
    fields = [f"{name} in {', '.join(map(show_value, values))}" for name, values in answer.tuned.items()]
    chosen: dict[str, list[str]] = {}
    for name, values in answer.chosen.items():
        chosen.setdefault("nothing yet" if values is None else point_text(values), []).append(name)
    record = "; ".join(f"{point}: {', '.join(names)}" for point, names in chosen.items())
    trials = plural(len(answer.base.trials), "trial")
    return f"Tuned on val: {' and '.join(fields)}, {trials} for every arm, base too. Chosen: {record}."
