"""Numbers and verdicts in plain words, for the page and the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vitmods.stats.decision import PAIRS, level_of
from vitmods.stats.gains import rate_bound
from vitmods.stats.tables import interval, signed, so_far
from vitmods.stats.verdict import POINTS, Effect, Verdict
from vitmods.study.answer import Answer, ArmAnswer, ArmCost
from vitmods.study.plan import mean_of, show_value
from vitmods.tasks.metrics import Metric
from vitmods.util.text import grouped, listing, plural

GLYPHS = {
    Verdict.HELPS: "▲", Verdict.NO_WORSE: "≥", Verdict.EQUIVALENT: "=", Verdict.OPEN: "?", Verdict.NO_GAIN: "≤",
    Verdict.UNSTABLE: "!", Verdict.HURTS: "▼", Verdict.WITHHELD: "–",
}  # fmt: skip
"""The verdicts, best first, and their signs."""
TONES = {
    Verdict.HELPS: "helps", Verdict.NO_WORSE: "same", Verdict.EQUIVALENT: "same", Verdict.OPEN: "open",
    Verdict.NO_GAIN: "open", Verdict.UNSTABLE: "hurts", Verdict.HURTS: "hurts", Verdict.WITHHELD: "open",
}  # fmt: skip
"""The color of each, by its name in the style sheet."""
_VERBS = {
    Verdict.HELPS: ("helps", "help"),
    Verdict.NO_WORSE: ("is no worse than {base}", "are no worse than {base}"),
    Verdict.EQUIVALENT: ("makes no difference that matters", "make no difference that matters"),
    Verdict.OPEN: ("is open", "are open"),
    Verdict.NO_GAIN: ("brings no gain that matters", "bring no gain that matters"),
    Verdict.UNSTABLE: ("is unstable", "are unstable"),
    Verdict.HURTS: ("hurts", "hurt"),
    Verdict.WITHHELD: ("has no verdict", "have no verdict"),
}
PRESERVES = {
    "function": "function-preserving",
    "weights": "reuses base's weights",
    "nothing": "trained from scratch",
}
LEANING = {"up": " (leaning positive)", "down": " (leaning negative)"}
NAMED = 2  # arms of one verdict in the headline; more are counted


def ranked(answer: Answer) -> list[tuple[ArmAnswer, Effect]]:
    """The arms with their effects: best verdict first, then the larger effect; arms without a number last."""
    return sorted(((arm, arm.effect) for arm in answer.arms if arm.effect), key=lambda row: _rank(row[1]))


def ranked_effects(answer: Answer) -> list[Effect]:
    """What the study is about, in the same order: of a factorial one the changes, else the arms."""
    return sorted(answer.headline.values(), key=_rank)


def _rank(effect: Effect) -> tuple[int, float]:
    return (list(GLYPHS).index(effect.verdict), -effect.gain) if effect.n else (len(GLYPHS), 0.0)


def headline(answer: Answer) -> str:
    """One sentence for the whole study. Of one that is not finished it says how far it is, and no verdict."""
    if not answer.complete:
        stopped = {arm for look in answer.looks for arm in look.stopped}
        ended = sum(trial.ended for trial in answer.trials)
        left = sum(not trial.ended and trial.arm not in stopped for trial in answer.trials)
        most = "at most " if answer.settings.get("until_decided") else ""
        progress = f"{ended} of {most}{plural(ended + left, 'trial')} finished"
        return "; ".join(filter(None, (progress, not_learned(answer))))
    if not_learned(answer):
        return f"{not_learned(answer)}: there are no verdicts."
    found: dict[Verdict, list[str]] = {}
    for effect in ranked_effects(answer):
        found.setdefault(effect.verdict, []).append(effect.arm)
    what = "changes" if answer.factorial else "arms"
    if len(answer.headline) > 1 and found.keys() == {Verdict.OPEN}:
        every = "both" if len(answer.headline) == 2 else f"all {len(answer.headline)}"
        first = f"Nothing is decided: {every} {what} are open."
    else:
        parts = [_phrase(names, verdict, what, answer.base.name) for verdict, names in found.items()]
        first = f"{_scope(answer)}{listing(parts) if len(parts) < 3 else '; '.join(parts)}."
    return " ".join([first, *_more(answer)])


def not_learned(answer: Answer) -> str:
    """`base has not learned`, where no arm can be compared with it; else empty."""
    verdicts = {effect.verdict for effect in answer.headline.values()}
    return f"{answer.base.name} has not learned" if verdicts == {Verdict.WITHHELD} else ""


def _scope(answer: Answer) -> str:
    """What the verdicts are about, where it is not one setting and new images."""
    scope = ["on these test images"] * (answer.decision.generalize == "seeds")
    scope += ["on average over the other changes on and off"] * bool(answer.factorial)
    scope += [f"on average over {plural(len(answer.sweep), 'setting')}"] * bool(answer.sweep)
    text = " and ".join(scope)
    return f"{text[0].upper()}{text[1:]}, " if text else ""


def _more(answer: Answer) -> Iterator[str]:
    """What the headline adds: effects that depend on the setting, and what fresh seeds said."""
    if over := answer.over_settings:
        yield from (f"{effect.arm}: {over.range(effect.arm)}." for effect in ranked_effects(answer)
                    if over.depends(effect.arm))  # fmt: skip
    if one := answer.confirmed:
        yield f"On {one.n} fresh seeds {one.arm} {verb(one.verdict, answer.base.name)}: {numbers(one)}."


def verb(verdict: Verdict, base: str) -> str:
    """`helps`, `is no worse than base`."""
    return _VERBS[verdict][0].format(base=base)


def _phrase(names: list[str], verdict: Verdict, what: str, base: str) -> str:
    one, many = (verb.format(base=base) for verb in _VERBS[verdict])
    if len(names) > NAMED:
        return f"{len(names)} {what} {many}"
    return f"{listing(names)} {one if len(names) == 1 else many}"


def doubts(answer: Answer) -> list[str]:
    """What happened, and what to know before a verdict is trusted: failures first."""
    notes = [f"{note[0].upper()}{note[1:].removesuffix('.')}." for note in (answer.factorial or answer.decision).notes]
    for note, arms in grouped((one.arm, note) for one in ranked_effects(answer) for note in one.notes).items():
        notes.append(f"{listing(arms)}: {note}.")
    notes += [f"{arm.name} has no verdict: a trial of it failed." for arm in answer.arms if arm.effect is None]
    known = any(effect.n for effect in answer.headline.values())
    if known and not (answer.complete or answer.looks or answer.settings.get("until_decided")):
        notes.append("Verdicts are provisional, and intervals wider than they will be, until this study is finished.")
    return [*notes, *answer.doubts]


def holds(answer: Answer) -> str:
    """The line under the table: what all intervals have in common, and where their width comes from."""
    decision, unit = answer.decision, points(answer.metric)
    facts = [level_of(answer.headline.values()) + PAIRS * decision.of_pairs, decision.claim]
    facts.append(answer.factorial.look if answer.factorial else decision.look)
    if not math.isnan(decision.sd):
        facts.append(f"pooled sd {decision.sd:.2g}{unit}, {decision.df:.0f} df")
    if not math.isnan(decision.seed_share):
        facts.append(f"seed accounts for {100 * decision.seed_share:.0f} % of the variance between trials")
    effects = answer.headline.values()
    shares = [effect.images_share for effect in effects if not math.isnan(effect.images_share)]
    if shares:
        facts.append(f"test-set sampling: {100 * statistics.median(shares):.0f} % of the variance")
    fewest = min((effect.n for effect in effects), default=0)
    if answer.factorial:
        facts.append(f"{len(answer.factorial.design.runs)} runs, {plural(fewest, 'seed')} each")
    elif fewest and not answer.sweep and not any(effect.failures or effect.base_failures for effect in effects):
        bound = f"95 % upper bound {100 * rate_bound(fewest):.0f} %"
        facts.append(f"0 of {plural(fewest, 'trial')} of an arm failed ({bound})")
    return f"{'; '.join(filter(None, [*facts, _shared_seeds(answer)]))}."


def _shared_seeds(answer: Answer) -> str:
    """Base's mean over the seeds of each arm that has fewer of them than the mean above the table."""
    seeds = min(len(answer.base.scores), answer.looks[-1].seeds if answer.looks else len(answer.base.scores))
    fewer = [one for one in ranked_effects(answer) if 0 < one.n < seeds]
    if not fewer or answer.sweep or answer.factorial:
        return ""
    base = answer.base.name
    means = (f"{one.base_mean:.{one.digits}f} for {one.arm} ({plural(one.n, 'seed')})" for one in fewer)
    return f"effects are over the seeds that arm and {base} share, where {base} reaches {', '.join(means)}"


def on_new_images(answer: Answer) -> bool:
    """Whether verdicts are about other images from the same source too."""
    decision = answer.decision
    return bool(decision.overlap) or (decision.generalize == "images" and not decision.without_images)


def verdict_text(effect: Effect) -> str:
    """`▲ helps`; of an open arm where it leans, of a provisional verdict that it is one."""
    leans = f", {effect.leans}" if effect.verdict == Verdict.OPEN and effect.leans else ""
    return f"{GLYPHS[effect.verdict]} {effect.verdict}{leans}{so_far(effect)}"


def tone(effect: Effect) -> str:
    """The color of a verdict: that of an open one until the study is complete."""
    return "open" if effect.provisional else TONES[effect.verdict]


def numbers(effect: Effect) -> str:
    """`+0.42 [+0.11, +0.73]`, in the unit of differences."""
    ends = "" if math.isnan(effect.half) else f" {interval(effect)}"
    return signed(effect.effect, effect.digits) + ends


def seeds(effect: Effect) -> str:
    """Those shared with base, and how many trials failed beside them: `4 (−1)`."""
    return f"{effect.n} (−{effect.failures})" if effect.failures else str(effect.n)


def half_on_these(effect: Effect) -> str:
    """Half the width of the interval for these test images alone: `± 0.36`; a dash where there is none."""
    half = (effect.seeds_high - effect.seeds_low) / 2
    return "–" if math.isnan(half) else f"± {number(half, f'.{effect.digits}f')}"


def number(value: float, form: str = ".1f") -> str:
    """A number, or a dash for NaN."""
    return "–" if math.isnan(value) else format(value, form).replace("-", "−")


def change_of(metric: Metric, base: ArmAnswer, arm: ArmAnswer) -> str:
    """The mean difference to base in another metric, over the seeds that both have; empty where there are none."""
    mine, bases = (one.other_metrics.get(metric.name, {}) for one in (arm, base))
    gap = mean_of([mine[seed] - bases[seed] for seed in mine if seed in bases])
    return "" if gap is None else signed(scale_of(metric) * gap, 2 if metric.unit == "%" else 4)


def scale_of(metric: Metric) -> float:
    """What a value is multiplied by before it is shown."""
    return POINTS if metric.unit == "%" else 1.0


def of_metric(metric: Metric) -> str:
    """What a difference counts: `points of top-1 accuracy`, `nats of log loss`, or the metric alone."""
    return f"{points(metric).strip()} of {metric.title}" if metric.unit else metric.title


def points(metric: Metric) -> str:
    """The unit of differences after a number, with its space: ` points`, ` nats` or nothing."""
    return " points" if metric.unit == "%" else f" {metric.unit}".rstrip()


def score(metric: Metric, value: float | None) -> str:
    """A value as tables show it, without its unit; a dash where there is none."""
    return "–" if value is None else metric.number(value)


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


def built_differently(costs: Iterable[tuple[str, ArmCost | None]]) -> list[str]:
    """`Costs of dpn and rms: base is timed as vitmods builds it, …`: where base and arms are not built alike."""
    arms: dict[str, list[str]] = {}
    for name, cost in costs:
        if cost is not None and cost.against:
            arms.setdefault(cost.against, []).append(name)
    return [f"Costs of {listing(names)}: {against}." for against, names in arms.items()]


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
