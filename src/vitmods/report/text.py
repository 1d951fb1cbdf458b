"""Numbers and verdicts in plain words, for the page and the terminal."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vitmods.stats.decision import PAIRS, level_of
from vitmods.stats.gains import BELOW, rate_bound
from vitmods.stats.tables import interval, signed, so_far
from vitmods.stats.tables import seeds as seeds
from vitmods.stats.verdict import POINTS_PER_FRACTION, Effect, Verdict
from vitmods.study.answer import Answer
from vitmods.study.arms import BASE
from vitmods.study.frozen import trained_lines
from vitmods.study.grid import mean_of, show_value
from vitmods.study.questions import Question
from vitmods.study.results import ArmAnswer, ArmCost, BaseCost, SettingAnswer, Tuning
from vitmods.study.settings import Settings
from vitmods.study.state import TrialRecord, shared_trials
from vitmods.tasks.metrics import Metric
from vitmods.util.text import duration, grouped, listing, plural


class Words(NamedTuple):
    """How a verdict is shown: its sign, its color in the style sheet, and its verb for one and for several arms."""

    glyph: str
    color: str
    singular: str
    plural: str


WORDS = {
    Verdict.HELPS: Words("▲", "helps", "helps", "help"),
    Verdict.NO_WORSE: Words("≥", "same", "is no worse than {base}", "are no worse than {base}"),
    Verdict.EQUIVALENT: Words("=", "same", "makes no difference that matters", "make no difference that matters"),
    Verdict.OPEN: Words("?", "open", "is open", "are open"),
    Verdict.NO_GAIN: Words("≤", "open", "brings no gain that matters", "bring no gain that matters"),
    Verdict.UNSTABLE: Words("!", "hurts", "is unstable", "are unstable"),
    Verdict.HURTS: Words("▼", "hurts", "hurts", "hurt"),
    Verdict.WITHHELD: Words("–", "open", "has no verdict", "have no verdict"),
}
"""The verdicts, best first."""
PRESERVES = {
    "function": "function-preserving",
    "weights": "reuses base's weights",
    "nothing": "trained from scratch",
}
LEANING = {"up": " (leaning positive)", "down": " (leaning negative)"}
NAMED = 2  # at most so many arms of one verdict are named in the headline; more are counted


def ranked(answer: Answer) -> list[tuple[ArmAnswer, Effect]]:
    """Sort arms and effects: best verdict first, then the larger effect; arms without a number last."""
    return sorted(((arm, arm.effect) for arm in answer.arms if arm.effect), key=lambda row: rank(row[1]))


def ranked_effects(answer: Answer) -> list[Effect]:
    """Sort the effects in the headline the same way."""
    return sorted(answer.headline.effects.values(), key=rank)


def plotted_effects(answer: Answer) -> list[Effect]:
    """Return the ranked effects with a number; without one while an arm shares no seed with base."""
    return [effect for effect in ranked_effects(answer) if effect.n and not math.isnan(effect.effect)]


def rank(effect: Effect) -> tuple[int, float]:
    return (list(WORDS).index(effect.verdict), -effect.gain) if effect.n else (len(WORDS), 0.0)


def headline(answer: Answer) -> str:
    """Summarize the study in a sentence or two; an unfinished study reports its progress and no verdict."""
    base, question = answer.base.name, answer.headline
    if not answer.complete:
        ended = sum(trial.ended for trial in answer.trials)
        remaining = sum(not trial.ended and trial.arm not in answer.stopped for trial in answer.trials)
        most = "at most " if answer.settings.get("until_decided") else ""
        progress = f"{ended} of {most}{plural(ended + remaining, 'trial')}"
        progress = f"Running: {progress}" if answer.running else f"{progress} finished"
        return "; ".join(filter(None, (progress, not_learned(answer))))
    if not_learned(answer):
        return f"{not_learned(answer)}: there are no verdicts."
    if not (effects := ranked_effects(answer)):
        return f"{question.scope}."
    these = "on these test images" * (answer.decision.generalize == "seeds")
    sentences = [verdicts(effects, f"{question.label}s", base, " and ".join(filter(None, [these, question.scope])))]
    by_remark: dict[str, list[str]] = {}  # without its numbers
    for name in (effect.arm for effect in effects if effect.arm in question.remarks):
        by_remark.setdefault(question.remarks[name].partition(":")[0], []).append(name)
    for remark, names in by_remark.items():
        several = f"each {remark.removeprefix('it ')} (pairwise comparisons)"
        sentences.append(f"{listing(names)}: {several if len(names) > 1 else question.remarks[names[0]]}.")
    sentences += [f"{fresh_text(other)}." for other in answer.questions.values() if other.has_fresh_seeds]
    return " ".join(sentences)


def verdicts(effects: Sequence[Effect], what: str, base: str, scope: str = "") -> str:
    """Say in a sentence which arms, which are `what`, help or hurt, best first; `scope`: where."""
    by_verdict: dict[Verdict, list[str]] = {}
    for effect in effects:
        by_verdict.setdefault(effect.verdict, []).append(effect.arm)
    if len(effects) > 1 and by_verdict.keys() == {Verdict.OPEN}:
        every = "both" if len(effects) == 2 else f"all {len(effects)}"
        return f"Nothing is decided: {every} {what} are open."
    parts = []
    for verdict, names in by_verdict.items():
        subject = listing(names) if len(names) <= NAMED else f"{len(names)} {what}"
        verb = WORDS[verdict].singular if len(names) == 1 else WORDS[verdict].plural
        parts.append(f"{subject} {verb.format(base=base)}")
    claim = f"{scope}{', ' * bool(scope)}{listing(parts) if len(parts) < 3 else '; '.join(parts)}."
    return claim[0].upper() + claim[1:] if scope else claim  # names of arms keep their case


def running_text(answer: Answer) -> str:
    """Say when the page of a running study was written, and from when on the run must have stopped; else empty."""
    if (running := answer.running) is None:
        return ""
    time_left = "" if running.left_s is None else f" About {duration(running.left_s)} left."
    written = f"Provisional: written on {running.written:%Y-%m-%d} at {running.written:%H:%M}.{time_left}"
    late = "does not change for much longer than a trial takes"
    if running.due is not None:
        is_today = running.due.date() == running.written.date()
        late = f"is still here at {running.due:%H:%M}" + ("" if is_today else f" on {running.due:%Y-%m-%d}")
    return f"{written} This page reloads itself. If it {late}, the run has stopped: the same command resumes it."


def not_learned(answer: Answer) -> str:
    """Say that base has not learned, diverged, or is below its weights, if no arm can be compared; else empty."""
    if {effect.verdict for effect in answer.headline.effects.values()} != {Verdict.WITHHELD}:
        return ""
    if answer.has_diverged:
        others = [trial for arm in answer.arms for trial in arm.counted]
        return f"All trials{'' if all(t.status == 'diverged' for t in others) else f' of {answer.base.name}'} diverged"
    verdicts = {name: {effect.verdict for effect in effects.values()} for name, effects in answer.each.items()}
    where = [name for name, given in verdicts.items() if Verdict.WITHHELD in given]
    under = f" under {listing(where)}" if 0 < len(where) < len(verdicts) else ""
    reason = BELOW if any(BELOW in note for note in answer.headline.notes) else "has not learned"
    return f"{answer.base.name} {reason}{under}"


def trained_text(answer: Answer) -> str:
    """State what the frozen weights reach and the rates of the arms; empty for new weights."""
    if "start" not in answer.settings:
        return ""
    return " ".join(trained_lines(Settings.from_dict(answer.settings), answer.data.get("frozen", {})))


def fresh_text(question: Question) -> str:
    """`On 4 fresh seeds dpn+rms helps: +0.42 [+0.11, +0.73]`."""
    effects = (
        f"{effect.arm} {WORDS[effect.verdict].singular.format(base=question.against)}: {numbers(effect)}"
        for effect in question.effects.values()
    )
    return f"{question.scope[0].upper()}{question.scope[1:]} {'; '.join(effects)}"


def caveats(answer: Answer) -> list[str]:
    """List what to know before trusting a verdict, failures first."""
    notes = [f"{note[0].upper()}{note[1:].removesuffix('.')}." for note in answer.headline.notes]
    effects = ranked_effects(answer)
    for note, arms in grouped((effect.arm, note) for effect in effects for note in effect.notes).items():
        notes.append(f"{listing(arms)}: {note}.")
    without = [arm.name for arm in answer.arms if arm.effect is None]
    notes += [f"{name} has no verdict: a trial of it failed or is damaged." for name in without]
    if any(effect.n and effect.provisional for effect in effects):
        notes.append("Verdicts are provisional, and intervals wider than they will be, until the study is finished.")
    return [*notes, *answer.doubts]


def common_claim(answer: Answer) -> str:
    """Describe what all intervals have in common and where their width comes from."""
    decision, unit, facts = answer.decision, points(answer.metric), _claim(answer)
    if not math.isnan(decision.sd):
        facts.append(f"pooled sd {decision.sd:.2g}{unit}, {decision.df:.0f} df")
    if not math.isnan(decision.seed_share):
        facts.append(f"seed accounts for {100 * decision.seed_share:.0f} % of the variance between trials")
    effects = ranked_effects(answer)
    shares = [effect.images_share for effect in effects if not math.isnan(effect.images_share)]
    if shares:
        facts.append(f"test-set sampling: {100 * statistics.median(shares):.0f} % of the variance")
    fewest = min((effect.n for effect in effects), default=0) * len(answer.under)
    fewest = min([fewest, *(len(arm.counted) for arm in answer.every_arm)])  # a design may leave some out
    if fewest and not any(effect.failures or effect.base_failures for effect in effects):
        bound = f"95 % upper bound {100 * rate_bound(fewest):.0f} %"
        facts.append(
            f"0 of {plural(fewest, 'trial')} of {'an arm' if answer.headline.against else 'a run'} failed ({bound})"
        )
    return f"{'; '.join(filter(None, [*facts, _shared_seeds(answer)]))}."


def brief_claim(answer: Answer) -> str:
    """Describe what all intervals have in common, without where their width comes from."""
    return f"{'; '.join(filter(None, [*_claim(answer), _shared_seeds(answer)]))}."


def _claim(answer: Answer) -> list[str]:
    """The level of the intervals, what they are about, and when the study is looked at."""
    if not answer.headline.effects:
        return [*answer.headline.facts]
    level = level_of(answer.headline.effects.values()) + PAIRS * answer.decision.of_pairs
    return [level, answer.decision.claim, *answer.headline.facts]


def _shared_seeds(answer: Answer) -> str:
    """The mean of base that each arm with fewer seeds is compared with, which is not the one above the table."""
    seeds, base = min(len(answer.settings["seeds"]), len(answer.seeds)), answer.headline.against
    fewer = [effect for effect in ranked_effects(answer) if 0 < effect.n < seeds and effect.base_n <= effect.n]
    if not (fewer and base):
        return ""
    means = (f"{e.base_mean:.{e.digits}f} for {e.arm} ({plural(e.n, 'seed')})" for e in fewer)
    return f"effects are over the seeds that arm and {base} share, where {base} reaches {', '.join(means)}"


def base_spread(answer: Answer) -> str:
    """`sd 0.61 over 5 seeds`: how far base varies from seed to seed; empty with fewer than two scores."""
    scores = [score for score in answer.base.scores.values() if score is not None]
    if len(scores) < 2:
        return ""
    return f"sd {scale_of(answer.metric) * statistics.stdev(scores):.2g} over {plural(len(scores), 'seed')}"


def on_new_images(answer: Answer) -> bool:
    """Whether verdicts generalize to new images from the same source."""
    decision = answer.decision
    return bool(decision.overlap) or (decision.generalize == "images" and not decision.without_images)


def verdict_text(effect: Effect) -> str:
    """`▲ helps, about +1.1`: with the effect to expect, the direction of an open arm, and a mark if provisional."""
    leans = f", {effect.leans}" if effect.verdict == Verdict.OPEN and effect.leans else ""
    expects = f", {effect.expects}" if effect.expects else ""
    return f"{WORDS[effect.verdict].glyph} {effect.verdict}{leans}{expects}{so_far(effect)}"


def tone(effect: Effect) -> str:
    """Return the color of a verdict; provisional verdicts look open."""
    return "open" if effect.provisional else WORDS[effect.verdict].color


def numbers(effect: Effect) -> str:
    """Format an effect with its interval: `+0.42 [+0.11, +0.73]`."""
    ends = "" if math.isnan(effect.half) else f" {interval(effect)}"
    return signed(effect.effect, effect.digits) + ends


def half_on_these(effect: Effect) -> str:
    """`± 0.36`: half-width of the interval for these test images; a dash without one."""
    half = (effect.seeds_high - effect.seeds_low) / 2
    return "–" if math.isnan(half) else f"± {number(half, f'.{effect.digits}f')}"


def number(value: float, form: str = ".1f") -> str:
    """Format a number; a dash for NaN."""
    return "–" if math.isnan(value) else format(value, form).replace("-", "−")


def mean(metric: Metric, arm: ArmAnswer) -> str:
    """Format an arm's mean over seeds of another metric; a dash without scores."""
    value = mean_of(arm.other_metrics.get(metric.name, {}).values())
    return "–" if value is None else metric.shown(value)


def change_of(metric: Metric, base: ArmAnswer, arm: ArmAnswer) -> str:
    """Format the mean difference to base in another metric over shared seeds; empty without any."""
    scores, reference = (side.other_metrics.get(metric.name, {}) for side in (arm, base))
    gap = mean_of([scores[seed] - reference[seed] for seed in scores if seed in reference])
    return "" if gap is None else signed(scale_of(metric) * gap, 2 if metric.unit == "%" else 4)


def scale_of(metric: Metric) -> float:
    """Return 100 for metrics in percent, which are stored as fractions, else 1."""
    return POINTS_PER_FRACTION if metric.unit == "%" else 1.0


def of_metric(metric: Metric) -> str:
    """Name a difference with its unit: `points of top-1 accuracy`, `nats of log loss`, or only the metric."""
    return f"{points(metric).strip()} of {metric.title}" if metric.unit else metric.title


def points(metric: Metric) -> str:
    """Return the unit of differences with a leading space: ` points`, ` nats` or nothing."""
    return " points" if metric.unit == "%" else f" {metric.unit}".rstrip()


def score(metric: Metric, value: float | None) -> str:
    """Format a value for a table, without its unit; a dash for None."""
    return "–" if value is None else metric.number(value)


def ratio(value: float | None) -> str:
    """Format a ratio: `1.08×`; a dash if it was not measured."""
    return "–" if value is None or math.isnan(value) else f"{value:.2f}×"


def trains_parts(answer: Answer) -> bool:
    """Whether an arm trains a part of its weights, as ways to adapt trained weights do."""
    base, costs = answer.base_cost, [arm.cost for arm in answer.arms if arm.cost]
    return base is not None and any(
        cost.trained is not None and cost.trained < 0.999 * cost.params * base.params for cost in costs
    )


def trained(cost: ArmCost | BaseCost | None) -> str:
    """Write how many parameters are trained: what a task stores beside the weights that it starts from."""
    return "–" if cost is None or cost.trained is None else count(cost.trained).strip()


def stored(cost: ArmCost | BaseCost | None) -> str:
    """Write the bytes of the trained parameters in float32."""
    return "" if cost is None or cost.trained is None else f"{count(4 * cost.trained)}B"


def fine_ratio(value: float) -> str:
    """`1.0049×`: like `ratio`, with differences below a hundredth."""
    return f"{value:.4f}×" if 0 < abs(value - 1) < 0.005 else ratio(value)


def remarks_on_costs(costs: Iterable[tuple[str, ArmCost | None]]) -> list[str]:
    """`Costs of dpn and rms: base is built by timm and the arm by vitmods …` if they are built differently; ratios of
    compiled steps; and arms whose steps a GPU waits for."""
    measured = [(name, cost) for name, cost in costs if cost is not None]
    arms = grouped((name, cost.against) for name, cost in measured if cost.against)
    remarks = [f"Costs of {listing(names)}: {against}." for against, names in arms.items()]
    if compiled := [f"{ratio(cost.compiled_step.ratio)} ({name})" for name, cost in measured if cost.compiled_step]:
        remarks.append(f"A training step compiled: {listing(compiled)}; above it is not.")
    if bound := [name for name, cost in measured if cost.host_bound]:
        remarks.append(
            f"Training steps of {listing(bound)} are bound by the host, which takes about as long to start their "
            "operations as the GPU to do them: with larger batches or compiled, the ratio is another."
        )
    return remarks


def count(value: float) -> str:
    """Format a number with a unit prefix: `5.36 M`, `359 M`, `4.61 G`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g} "


def short_time(seconds: float) -> str:
    """Format a short time: `4.8 ms`, `1.2 s`."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def model_size(config: Mapping[str, Any]) -> str:
    """Describe the size of a model in one sentence."""
    rows, columns = config["img_size"]
    images = f"images of {rows} × {columns} pixels."
    if "modules" in config:
        return f"{config['class']}, {count(config['params'])} parameters, {images}"
    size = f"{plural(config['depth'], 'block')}, width {config['embed_dim']}, {plural(config['num_heads'], 'head')}"
    patch_rows, patch_columns = config["patch_size"]
    return f"{size}, patches of {patch_rows} × {patch_columns} in {images}"


def point_text(values: Mapping[str, Any]) -> str:
    """Format a point of a grid: `lr 0.001, weight_decay 0.1`."""
    return ", ".join(f"{name} {show_value(value)}" for name, value in values.items())


def tuned_text(answer: Answer) -> str:
    """Describe the grid, the number of trials, and the chosen values; empty if nothing was tuned."""
    if not answer.tuned:
        return ""
    fields = [f"{name} in {', '.join(map(show_value, values))}" for name, values in answer.tuned.items()]
    choices, trials, apart = [], 0, list[str]()
    for setting, arms in answer.tunings.items():
        chosen = grouped((name, chosen_text(tuning)) for name, tuning in arms.items())
        points = "; ".join(f"{point}: {', '.join(names)}" for point, names in chosen.items())
        choices.append(f"Chosen{f' with {setting}' if setting else ''}: {points}.")
        trials += sum(len(point.scores) for point in arms[BASE].points)
        others = (name for name, tuning in arms.items() if tuning.chosen and tuning.chosen != arms[BASE].chosen)
        apart += [f"{name}{f' with {setting}' if setting else ''}" for name in others if arms[BASE].chosen]
    if apart and answer.headline.against:
        at_points = f"Base was also trained at the point of {listing(apart)}"
        choices.append(f"{at_points}: such an arm helps only if it beats both.")
    tried = f"{' and '.join(fields)}, {plural(trials, 'trial')} of each arm, including base"
    return " ".join([f"Tuned on val: {tried}.", *choices])


def chosen_text(tuning: Tuning) -> str:
    """Format the chosen point."""
    return "nothing yet" if tuning.chosen is None else point_text(tuning.chosen)


def shared_text(answer: Answer) -> str:
    """Say which trials other studies have trained; empty without any."""
    if not (shared := shared_trials(answer.trials)):
        return ""
    return f"{shared} Errors of studies that share trials of {answer.base.name} are correlated: none confirms another."


class Row(NamedTuple):
    """A row of a question's table; `effect` is None for base, and `arm` where the label is none.

    mean:   of the arm's scores
    columns: the effects of the questions that are columns of this table
    """

    label: str
    effect: Effect | None
    arm: ArmAnswer | None = None
    mean: float | None = None
    cost: ArmCost | None = None
    columns: tuple[Effect, ...] = ()
    steps: str = ""


def columns_of(answer: Answer, name: str) -> list[Question]:
    """Return the questions whose effects are columns of another one's table."""
    return [question for question in answer.questions.values() if question.column_of == name]


def rows_of(answer: Answer, name: str) -> dict[str, list[Row]]:
    """Return heading -> the rows of a question's table: base first, if it compares arms, and then the best first, or
    under several headings in the order of the study."""
    question, under = answer.questions[name], {setting.name: setting for setting in answer.under}
    arms = {arm.name: arm for arm in answer.every_arm} if question.against else {}
    table = {}
    for heading, effects in question.groups.items():
        ordered = list(effects.items()) if heading else sorted(effects.items(), key=lambda row: rank(row[1]))
        rows: list[tuple[str, Effect | None]] = [(question.against, None)] * bool(arms)
        table[heading] = [
            _row(label, effect, arms.get(label), answer, under[heading] if heading else None)._replace(
                columns=tuple(other.groups[heading][label] for other in columns_of(answer, name) if effect)
            )
            for label, effect in (*rows, *ordered)
        ]
    return table


def _row(
    label: str, effect: Effect | None, arm: ArmAnswer | None, answer: Answer, setting: SettingAnswer | None
) -> Row:
    if arm is None:
        return Row(label, effect)
    if setting is None:
        return Row(label, effect, arm, arm.mean if effect else answer.base_mean, arm.cost)
    steps = steps_to_base(trial for trial in arm.counted if trial.setting == setting.values)
    return Row(label, effect, arm, mean_of(setting.scores[label].values()), setting.costs.get(label), steps=steps)


def steps_to_base(trials: Iterable[TrialRecord]) -> str:
    """`120 (90 to 150), 3 of 5 seeds`: steps until trials first reached base's final score, median and range."""
    followed = [trial for trial in trials if trial.status == "finished" and trial.curve.step]
    steps = [trial.steps_to_base for trial in followed if trial.steps_to_base is not None]
    if not steps:
        return f"in none of {len(followed)}" if followed else "–"
    spread = f" ({min(steps):,} to {max(steps):,})" if len(set(steps)) > 1 else ""
    few = f", {len(steps)} of {len(followed)} seeds" if len(steps) < len(followed) else ""
    return f"{statistics.median(steps):,.0f}{spread}{few}"


def subjects(answer: Answer) -> list[tuple[ArmAnswer, bool]]:
    """Return what the headline compares as arms, and whether the model of each is without other changes: a change of a
    factorial study is the smallest run that has it."""
    question, by_name = answer.headline, {arm.name: arm for arm in answer.every_arm}
    if not question.shown_by:
        return [(arm, True) for arm in answer.arms]
    arms = []
    for name, effect in question.effects.items():
        shown, edits = question.shown_by[name]
        run = by_name[shown]
        changes = tuple(change for change in run.model.changes if change.short in edits)
        model = dataclasses.replace(run.model, changes=changes)
        arms.append((dataclasses.replace(run, name=name, model=model, effect=effect), shown == name))
    return arms
