"""What is asked of a study's finished trials: the looks at which arms stop, and the questions that a report shows.

A fixed study is looked at once, when its seeds are done. One that runs until it is decided is looked at after 4, 5, 6,
8, ... seeds, each time at a level that keeps false claims of the whole study at 5 %. Looks follow from the scores
alone, so a study that was killed or extended has the same ones. Which questions there are, a design says.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vitmods.stats.decision import Decision, Pair
from vitmods.stats.factorial import Factorial
from vitmods.stats.sample_size import Forecast, forecast
from vitmods.stats.tables import signed
from vitmods.stats.verdict import Effect
from vitmods.study.arms import BASE, Arm
from vitmods.study.cells import Trial
from vitmods.study.grid import AS_IS, Point
from vitmods.study.state import HIDDEN, StudyState


@dataclass(frozen=True)
class Look:
    """The decision on the first `seeds` seeds; `stopped` are the arms that end there."""

    seeds: int
    decision: Decision | Factorial
    stopped: tuple[str, ...]


def looks(
    state: StudyState, setting: Point = AS_IS, retried: Container[Trial] | None = None, known: Sequence[Look] = ()
) -> list[Look]:
    """Return the looks of a study that runs until it is decided, as far as its trials reach; none of a fixed study.

    An arm one of whose trials failed, e.g. for lack of memory, is left out of a look: no verdict waits for it.

    Args:
        retried: trials that a run has tried; trials that failed earlier are waited for. None: not waited for.
        known: the first looks, from an earlier call of the same run.
    """
    settings, design, taken, records = state.settings, state.settings.design, list(known), state.records
    for count in settings.looks[len(known) :]:
        stopped = {arm for look in taken for arm in look.stopped}
        seeds, failed, is_complete = settings.seeds[:count], set[str](), True
        for arm in (arm.name for arm in settings.every_arm if arm.name not in stopped):
            planned = [seed for seed in seeds if design.trains(settings, setting, arm, seed)]
            trials = [trial for seed in planned if (trial := state.trial(setting, arm, seed)) is not None]
            matched = [trial for seed in planned if (trial := state.matched_to(setting, arm, seed)) is not None]
            unfinished = [trial for trial in (*trials, *matched) if not records[trial].ended]
            if any(
                records[trial].status in ("failed", "damaged") and (retried is None or trial in retried)
                for trial in unfinished
            ):
                failed.add(arm)
            elif unfinished or len(trials) < len(planned):
                is_complete = False
        if taken and len(stopped) + len(failed - {BASE}) == len(settings.arms):
            break
        if BASE in failed or (design.needs_all and failed) or not is_complete:
            break
        effects = ((arm, look.decision.effects.get(arm)) for look in taken for arm in look.stopped)
        frozen = {arm: effect for arm, effect in effects if effect}
        taken.append(Look(count, *design.look(state, seeds, setting, frozen, failed)))
    return taken


def spare_trials(state: StudyState, taken: Sequence[Look]) -> list[Trial]:
    """List the trials that no look counts: of seeds after the look at which their arm stopped, and of base once all
    arms have. Workers that were free had begun them."""
    settings = state.settings
    seeds = {arm: settings.seeds[: look.seeds] for look in taken for arm in look.stopped}
    if taken and len(seeds) == len(settings.arms):
        seeds[BASE] = (*settings.seeds[: taken[-1].seeds], *range(settings.known))
    return [trial for trial in state.answered if trial.seed not in seeds.get(trial.arm.name, (trial.seed,))]


@dataclass(frozen=True)
class Question:
    """Something asked of a study's finished trials. The intervals of its effects hold together.

    label:    what an effect is of, in the singular
    meaning:  what an effect is, as in "Effects are differences to base"
    groups:   heading -> label -> Effect; without headings it is empty
    title:    of its section in a report; empty for the first question, the headline
    against:  the arm that its arms are compared with; empty: its labels are not arms
    scope:    where its verdicts hold, as a sentence begins
    facts:    of all its intervals, beside their level and claim
    notes:    failures first
    remarks:  label -> what its effect does not say alone; part of the headline
    methods:  how the trials were planned for it, in a sentence for a paper
    together: the labels that are predicted to be best together, where effects add up
    predicts: what that is chosen by
    column_of: the question in whose table this one is a column, under its title
    has_fresh_seeds: whether it confirms something on seeds that the headline does not have
    is_folded: whether readers open it themselves
    details:  more facts for results.json
    shown_by: label -> the arm whose model shows what it is of, and the short form of its changes there, where labels
              are not arms
    advice:   sentences on what else to do
    forecast: what more seeds would decide of an effect; None for a decided one
    """

    label: str
    meaning: str
    groups: Mapping[str, Mapping[str, Effect]]
    title: str = ""
    against: str = ""
    scope: str = ""
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)
    methods: str = ""
    together: tuple[str, ...] = ()
    predicts: str = ""
    column_of: str = field(default="", metadata=HIDDEN)
    has_fresh_seeds: bool = field(default=False, metadata=HIDDEN)
    is_folded: bool = field(default=False, metadata=HIDDEN)
    details: Mapping[str, Any] = field(default_factory=dict)
    shown_by: Mapping[str, tuple[str, str]] = field(default_factory=dict, metadata=HIDDEN)
    advice: tuple[str, ...] = field(default=(), metadata=HIDDEN)
    forecast: Callable[[Effect], Forecast | None] = field(default=forecast, metadata=HIDDEN)

    @property
    def effects(self) -> dict[str, Effect]:
        """Label -> Effect; under a heading the label is `dpn at epochs=30`."""
        pairs = ((group, *effect) for group, effects in self.groups.items() for effect in effects.items())
        return {f"{label} at {group}" if group else label: effect for group, label, effect in pairs}

    @property
    def one(self) -> str:
        """`an arm`"""
        return f"{'an' if self.label[0] in 'aeiou' else 'a'} {self.label}"

    @property
    def has_headings(self) -> bool:
        return "" not in self.groups

    @property
    def is_shown(self) -> bool:
        """Whether a report has a table of it."""
        return any(self.groups.values()) and not (self.column_of or self.has_fresh_seeds)

    def with_remarks(self, remarks: Mapping[str, str]) -> Question:
        """The same with more remarks on arms; of other labels there are none."""
        joined = {arm: "; ".join(filter(None, (self.remarks.get(arm), text))) for arm, text in remarks.items()}
        return replace(self, remarks={**self.remarks, **joined}) if self.against else self

    def to_dict(self) -> dict[str, Any]:
        """For results.json: all but what only a report needs."""
        names = [field.name for field in fields(self) if field.metadata.get("json", True)]
        return {"effects": self.effects, **{name: getattr(self, name) for name in names if name != "groups"}}

    def decision(self, of_arms: Decision) -> Decision:
        """What holds for all effects, which are those of the arms unless the labels are others."""
        if self.against:
            return of_arms
        notes = (*self.notes, *filter(None, [self.predicts]))
        cleared: dict[str, Any] = {"best": (), "ruled_out": (), "pairs": {}, "look": self.facts[0]}
        return replace(of_arms, effects=self.effects, family=len(self.effects), notes=notes, **cleared)


def remarks_on_controls(arms: Iterable[Arm], base: Mapping[str, Any], decision: Decision) -> dict[str, str]:
    """Say of each arm what it brings along besides its idea, and how it compares with the arm that has only that, if
    there is one; a notice proposes those that are missing.

    base: the config of base's model, as study.json has it; of another library's model there is nothing to say.
    """
    from vitmods.changes.controls import controls
    from vitmods.model.config import ViTConfig

    if "modules" in base or decision.base != BASE:
        return {}
    config, alone = ViTConfig.from_dict(base), {arm.changes[0]: arm.name for arm in arms if len(arm.changes) == 1}
    remarks = {}
    for arm in arms:
        for brings, _, change in controls(arm.changes, config) if arm.changes else ():
            control = alone.get(change)
            pair = decision.pairs.get((arm.name, control)) if control else None
            if pair is None and control and (other := decision.pairs.get((control, arm.name))):
                pair = Pair(-other.effect, -other.high, -other.low)
            if control:
                remarks[arm.name] = f"it also brings {brings}, which {control} tells apart"
            if pair is not None:
                ends = f"[{signed(pair.low)}, {signed(pair.high)}]"
                remarks[arm.name] += f": against {control} {signed(pair.effect)} {ends}, over all pairs"
    return remarks


def arms_question(decision: Decision) -> Question:
    """Each arm against base."""
    return Question(
        "arm",
        f"differences to {decision.base}",
        {"": decision.effects},
        against=decision.base,
        facts=(decision.look,),
        notes=decision.notes,
    )


def confirmation(effect: Effect, base: str) -> Question:
    """The best combination of a factorial study against base, on other seeds."""
    return Question(
        "combination",
        f"differences to {base}",
        {"": {effect.arm: effect}},
        title="On fresh seeds",
        against=base,
        scope=f"on {effect.n} fresh seeds",
        methods=f"The best combination, {effect.arm}, was then compared with {base} on {effect.n} fresh seeds.",
        has_fresh_seeds=True,
    )
