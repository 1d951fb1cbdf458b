"""Numbers and verdicts in plain words, for the page and the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitmods.evals.metrics import Metric
from vitmods.stats.effects import CANNOT_TELL, FRACTION, HELPS, HURTS, NO_WORSE, VERDICTS, Effect, digits_of, scale_of
from vitmods.study.tuning import show_value

GLYPHS = {HELPS: "▲", NO_WORSE: "≈", CANNOT_TELL: "?", HURTS: "▼"}
METRICS = {"top1": "top-1", "top5": "top-5"}
PRESERVES = {
    "function": "starts with base's outputs",
    "weights": "keeps base's weights",
    "nothing": "needs weights of its own",
}
MANY_SEEDS = 1000
ALL_POINTS = 100
COSTS = (("train_step", "training step"), ("infer_n", "inference"), ("peak_memory", "memory"))


def effect_of(arm: Mapping[str, Any]) -> Effect | None:
    """The arm's effect as an object, or None where results.json has none yet."""
    return Effect.from_dict(arm["effect"]) if arm.get("effect") else None


def rank(effect: Effect | None) -> tuple[int, float]:
    """Sorts arms: best verdict first, then the larger effect; arms without a number last."""
    if effect is None or effect.n == 0:
        return len(VERDICTS), 0.0
    return VERDICTS.index(effect.verdict), -effect.gain


def metric_name(results: Mapping[str, Any]) -> str:
    """`top-1` for `top1`; others by their title."""
    metric = results["metric"]
    return metric_words(metric["name"], metric.get("title"))


def metric_words(name: str, title: str | None = None) -> str:
    """The same, from the name and the title."""
    return METRICS.get(name, title or name)


def metric_of(results: Mapping[str, Any]) -> Metric:
    """The study's metric; studies of older versions compare fractions of which the higher is better."""
    record = results["metric"]
    unit = record["unit"] if "title" in record else FRACTION
    return Metric(record["name"], metric_name(results), "", record.get("higher_is_better", True), unit)  # type: ignore[arg-type]


def difference(effect: Effect, value: float) -> str:
    """`+0.42`, with the decimals that suit the metric."""
    return signed(value, effect.digits)


def of_metric(unit: str, metric: str) -> str:
    """What a difference counts: `points of top-1`, `nats of log loss`, or the metric alone."""
    name = {FRACTION: "points"}.get(unit, unit)
    return f"{name} of {metric}" if name else metric


def score(metric: Metric, value: float | None, digits: int | None = None) -> str:
    """A value as tables show it, without its unit; a dash where there is none."""
    if value is None:
        return "–"
    return f"{scale_of(metric.unit) * value:.{digits_of(metric.unit) if digits is None else digits}f}"


def points(unit: str) -> str:
    """The unit of differences after a number, with its space: ` points`, ` nats` or nothing."""
    return " points" if unit == FRACTION else f" {unit}".rstrip()


def signed(value: float, digits: int = 2) -> str:
    """`+0.42`, with a real minus sign and no sign on zero; a dash for NaN."""
    if math.isnan(value):
        return "–"
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        return text[1:]
    return text.replace("-", "−")


def detectable(effect: Effect) -> str:
    """The smallest effect that would be found; no fraction can differ by more than all points."""
    if effect.unit == FRACTION and effect.detectable > ALL_POINTS:
        return f"> {ALL_POINTS}"
    return f"{effect.detectable:.{effect.digits}f}"


def interval(effect: Effect) -> str:
    """`[+0.11, +0.73]`, or nothing where there is none."""
    return f"[{difference(effect, effect.low)}, {difference(effect, effect.high)}]" if effect.has_interval else ""


def numbers(effect: Effect) -> str:
    """`+0.42 [+0.11, +0.73]`."""
    return f"{difference(effect, effect.mean)} {interval(effect)}".strip()


def probability(p: float) -> str:
    """Two significant digits at most, and no false zero."""
    if math.isnan(p):
        return "–"
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def ratio(value: float | None) -> str:
    """`1.08×`; a dash where it was not measured."""
    return "–" if value is None or math.isnan(value) else f"{value:.2f}×"


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listing(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 2 else parts)


def headline(verdicts: Iterable[str | None]) -> str:
    """One sentence for the whole study; None stands for an arm without an effect yet."""
    count = Counter(verdict or CANNOT_TELL for verdict in verdicts)
    total = sum(count.values())
    if total == 1:
        return {
            HELPS: "The change helps.", HURTS: "The change hurts.", NO_WORSE: "The change is no worse than base.",
            CANNOT_TELL: "This study cannot tell whether the change helps.",
        }[next(iter(count))]  # fmt: skip
    parts = []
    if count[HELPS]:
        parts.append(f"{count[HELPS]} {'helps' if count[HELPS] == 1 else 'help'}")
    if count[NO_WORSE]:
        parts.append(f"{count[NO_WORSE]} {'is' if count[NO_WORSE] == 1 else 'are'} no worse")
    if count[HURTS]:
        parts.append(f"{count[HURTS]} {'hurts' if count[HURTS] == 1 else 'hurt'}")
    if not parts:
        return f"This study cannot tell for any of the {total} arms."
    rest = f"; for {count[CANNOT_TELL]} this study cannot tell" if count[CANNOT_TELL] else ""
    return f"Of {total} arms, {listing(parts)}{rest}."


def lead(effect: Effect | None, arm: str) -> str:
    """The start of the sentence: the arm and its verdict."""
    verdict = effect.verdict if effect else CANNOT_TELL
    return {
        HELPS: f"{arm} helps",
        HURTS: f"{arm} hurts",
        NO_WORSE: f"{arm} is no worse",
        CANNOT_TELL: f"For {arm} this study cannot tell",
    }[verdict]


def finding(effect: Effect | None, metric: str, trials: int) -> str:
    """The rest of the sentence: how much, how sure, and for `cannot tell` why. `trials` is the number planned."""
    if effect is None or effect.n == 0:
        return _nothing_to_compare(effect, trials)
    gap = f"{difference(effect, effect.mean)} {of_metric(effect.unit, metric)}"
    ends = f"{difference(effect, effect.low)} to {difference(effect, effect.high)}"
    level = f"{100 * (1 - effect.alpha):.0f}\u00a0% interval {ends}, "
    pairs = plural(effect.n, "paired seed")
    sentence = f"{gap} ({level if effect.has_interval else ''}{pairs})"
    remark = _remark(effect)
    return f"{sentence}. {remark}" if remark else f"{sentence}."


def _nothing_to_compare(effect: Effect | None, trials: int) -> str:
    if effect and effect.diverged:
        return f"{effect.diverged} of its {plural(trials, 'trial')} diverged, and no seed is left to compare with base."
    return "no seed has finished in both this arm and base yet."


def _remark(effect: Effect) -> str:
    if effect.verdict == HURTS:
        margin = f"{effect.margin:g}{points(effect.unit)}"
        small = f"The loss is within the margin of {margin}." if effect.least_gain > -effect.margin else ""
        return sentences(small, _divergence(effect))
    if effect.verdict == NO_WORSE:
        return f"A loss of {effect.margin:g}{points(effect.unit)} or more is ruled out."
    if effect.verdict == HELPS:
        return ""
    return sentences(_divergence(effect), _why_unsure(effect))


def sentences(*parts: str) -> str:
    """The sentences that say something, one after the other."""
    return " ".join(part for part in parts if part)


def _divergence(effect: Effect) -> str:
    if not effect.diverged:
        return ""
    count = plural(effect.diverged, "trial")
    consequence = "" if effect.verdict == HURTS else ", which rules out a favorable verdict"
    return f"{count} of this arm diverged{consequence}."


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
    return _seeds_for_margin(effect)


def _seeds_for_margin(effect: Effect) -> str:
    enough = f"It could have found {detectable(effect)}{points(effect.unit)} or more."
    if not effect.margin:
        return enough
    needed = effect.seeds_needed(effect.margin)
    if needed <= effect.n:
        return enough
    seeds = f"about {needed}" if needed <= MANY_SEEDS else f"more than {MANY_SEEDS:,}"
    return f"An effect of {effect.margin:g}{points(effect.unit)} takes {seeds} seeds to find."


def costs(cost: Mapping[str, Any] | None) -> str:
    """`training step 1.08× · inference 1.02× · …`; empty where nothing was measured."""
    if not cost:
        return ""
    parts = [f"{label} {ratio(cost[key]['ratio'])}" for key, label in COSTS if cost.get(key)]
    if cost.get("params") is not None:
        parts.append(f"parameters {ratio(cost['params'])}")
    return " · ".join(parts)


def fine_ratio(value: float | None) -> str:
    """Like `ratio`, but a difference below a hundredth stays visible."""
    if value is None:
        return "–"
    return f"{value:.4f}×" if 0 < abs(value - 1) < 0.005 else ratio(value)


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
    """One sentence with the sizes of a ViT, or of another model what is known."""
    rows, columns = config["img_size"]
    if "modules" in config:
        return f"{config['class']}, {count(config['params'])} parameters, images of {rows} × {columns} pixels."
    return (
        f"{config['depth']} blocks, width {config['embed_dim']}, {plural(config['num_heads'], 'head')}, "
        f"images of {rows} × {columns} pixels."
    )


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`, `9 days`: no more digits than an estimate has."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:,.0f} days"


def point_text(values: Mapping[str, Any]) -> str:
    """`lr 0.001, weight_decay 0.1`."""
    return ", ".join(f"{name} {show_value(value)}" for name, value in values.items())


def tuned_text(results: Mapping[str, Any]) -> str:
    """What was tried for every arm, with how many trials, and what was chosen; empty where nothing was tuned."""
    tuned = results.get("tuned")
    if not tuned:
        return ""
    arms = [{**results["base"], "name": "base"}, *results["arms"]]
    fields = [f"{name} in {', '.join(map(show_value, values))}" for name, values in tuned["fields"].items()]
    trials = sum(len(point["trials"]) for point in results["base"]["tuning"]["points"])
    chosen: dict[str, list[str]] = {}
    for arm in arms:
        values = arm["tuning"]["chosen"]
        chosen.setdefault("nothing yet" if values is None else point_text(values), []).append(arm["name"])
    record = "; ".join(f"{point}: {', '.join(names)}" for point, names in chosen.items())
    return (
        f"Tuned on {tuned['on']}: {' and '.join(fields)}, {plural(trials, 'trial')} for every arm, base too. "
        f"Chosen: {record}."
    )
