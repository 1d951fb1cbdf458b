"""What a study consists of: arms, seeds, settings, and when two sets of settings are the same study.

A trial depends on its own settings alone (data, base, recipe, its arm's changes, its seed). So seeds and arms may be
added to a study later without touching what is there, while anything that a finished trial depends on may not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.errors import UserError
from vitmods.finetune.roles import chosen_roles

if TYPE_CHECKING:
    from vitmods.changes import Change
    from vitmods.recipes import Recipe

BASE = "base"
TRAINING = {"full": "train(all)", **{role: f"train({role})" for role in ("attention", "ffn", "head")}}
OTHER_SEEDS = 10_000  # added to a seed, it gives the seed of the second base trial that measures the noise floor


@dataclass(frozen=True)
class Arm:
    """A named list of changes, with recipe overrides if any; `base` is the arm with none."""

    name: str
    changes: tuple[Change, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict, hash=False)
    start: str | None = None
    """trained weights of its own that it begins with, changes included; None: base's"""

    @property
    def short(self) -> str:
        """The changes in their shell form, e.g. `dpn+norm(rms)`."""
        return "+".join(str(change) for change in self.changes)

    @property
    def text(self) -> str:
        """The changes and the recipe overrides, for people, e.g. `dpn+train(attention)`."""
        overrides = (f"train({value})" if name == "train" else f"{name}={value}" for name, value in self.recipe.items())
        own = f"from {Path(self.start).name}" if self.start and not self.changes else ""
        return "+".join(filter(None, (self.short, own, *overrides)))

    def identity(self) -> dict[str, Any]:
        begins = {"start": self.start} if self.start else {}
        return {"changes": self.short, "recipe": dict(self.recipe), **begins}


@dataclass(frozen=True)
class Trial:
    """One arm with one seed."""

    arm: Arm
    seed: int

    def __str__(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"


def arm_from_text(text: str) -> Arm:
    """Read `CHANGES` or `NAME=CHANGES`, e.g. `dpn`, `post=placement(attn=post)`. UserError for an unknown change.

    Among the changes `train(ROLES)` may say what is trained, e.g. `dpn+train(attention)`; the words `attention`,
    `ffn`, `head` and `full` are short for that.
    """
    from vitmods.changes import parse_changes

    named = re.match(r"\s*([^=()]+?)\s*=\s*(.+)$", text, flags=re.DOTALL)
    name, told = (named[1], named[2]) if named else (text.strip(), text)
    changes, recipe = split_training(told)
    return Arm(name, tuple(parse_changes(changes)), recipe)


def split_training(text: str) -> tuple[str, dict[str, Any]]:
    """The changes, and the recipe override that `train(...)` among them, or a word for it, is."""
    text = TRAINING.get(text.strip(), text)
    pattern = r"(?:(?<=\+)|^)\s*train\(([^()]*)\)\s*(?:\+|$)"
    found = re.findall(pattern, text)
    if len(found) > 1:
        raise UserError(f"'{text}' says twice what is trained: join the roles, train({'+'.join(found)}).")
    if not found:
        return text, {}
    chosen_roles(found[0])  # an unknown role is told before anything runs
    return re.sub(pattern, "", text).rstrip("+ "), {"train": found[0].strip()}


def arms_from_text(text: str) -> list[Arm]:
    """The same, or the arms of a line-up where the text is its name, e.g. `norms`."""
    from vitmods.changes import LINEUPS, parse_changes

    if lineup := LINEUPS.get(text.strip()):
        return [Arm(name, parse_changes(changes)) for name, changes in lineup.arms.items()]
    return [arm_from_text(text)]


def make_arms(arms: Mapping[str, Any] | Iterable[Any]) -> tuple[Arm, ...]:
    """The arms that users name: a mapping name -> changes, or short forms, line-ups and Arm objects. Without `base`.

    Raises UserError when there is no arm, a name is taken twice, two arms are the same changes, or something else than
    changes is given.
    """
    if isinstance(arms, Mapping):
        found = [_arm(str(name), given) for name, given in arms.items()]
    else:
        listed = [arms] if isinstance(arms, str) else arms
        found = [arm for one in listed for arm in ([one] if isinstance(one, Arm) else arms_from_text(str(one)))]
    found = [arm for arm in found if arm.name != BASE or arm.changes or arm.recipe]
    _check_arms(found)
    return tuple(found)


def _arm(name: str, given: Any) -> Arm:
    """The arm that a user gives under a name: a short form, an Arm, one change, or several."""
    from vitmods.changes import Change

    if isinstance(given, str | Arm):
        return replace(arm_from_text(given) if isinstance(given, str) else given, name=name)
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, type) else (given,)
    for change in listed:
        if not isinstance(change, Change):
            raise UserError(
                f"Arm {name}: {change!r} is no change. Give changes as DualPatchNorm(), or as text: 'dpn+rms'."
            )
    return Arm(name, listed)


def _check_arms(arms: Sequence[Arm]) -> None:
    if not arms:
        raise UserError("A study needs an arm beside base, for example dpn; `vitmods changes` lists what there is.")
    names: set[str] = set()
    contents: dict[str, str] = {}
    for arm in arms:
        if arm.name == BASE:
            raise UserError("The arm named base is the model without changes. Give this arm another name.")
        if not arm.changes and not arm.recipe and arm.start is None:
            raise UserError(f"Arm {arm.name} changes nothing. Base is always part of the study; leave this arm out.")
        if arm.name in names:
            raise UserError(f"Two arms are named {arm.name}. Leave one out, or name it differently: NAME=CHANGES.")
        content = repr(arm.identity())
        if content in contents:
            raise UserError(
                f"Arms {contents[content]} and {arm.name} are the same changes ({arm.text}). Leave one out."
            )
        names.add(arm.name)
        contents[content] = arm.name


def make_seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    """A number of seeds (0, 1, ...) or the seeds themselves. UserError for none, a repeated or a too large one."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise UserError(f"A study needs at least one seed, not {seeds}.")
        if seeds > OTHER_SEEDS:
            raise UserError(f"{seeds} seeds are more than the {OTHER_SEEDS} that a study keeps apart.")
        return tuple(range(seeds))
    chosen = tuple(int(seed) for seed in seeds)
    if not chosen:
        raise UserError("A study needs at least one seed.")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"A seed is given twice in {list(chosen)}.")
    if min(chosen) < 0 or max(chosen) >= OTHER_SEEDS:
        raise UserError(f"Seeds are whole numbers from 0 to {OTHER_SEEDS - 1}; got {list(chosen)}.")
    return chosen


@dataclass(frozen=True)
class Settings:
    """Everything that defines a study.

    fixed:       name -> JSON value, nested where it helps (`recipe.lr`): what every trial depends on; may never change
    arms, seeds: what is compared; may grow
    noise_floor: whether base is also run with other seeds; may be switched on
    margin:      points within which an arm counts as no worse; concerns the reading of the results alone
    """

    fixed: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    noise_floor: bool = False
    margin: float = 0.5

    @property
    def recipe(self) -> Recipe:
        from vitmods.recipes import Recipe

        return Recipe.from_dict(dict(self.fixed["recipe"]))

    def recipe_of(self, arm: Arm) -> Recipe:
        return self.recipe.with_(**arm.recipe) if arm.recipe else self.recipe

    def arm(self, name: str) -> Arm:
        return next(arm for arm in (Arm(BASE), *self.arms) if arm.name == name)

    def trials(self) -> list[Trial]:
        """Every trial, base (and the noise floor) first, then seed by seed so that an early stop leaves whole pairs."""
        base = Arm(BASE)
        planned = [Trial(base, seed) for seed in self.seeds]
        if self.noise_floor:
            planned += [Trial(base, seed + OTHER_SEEDS) for seed in self.seeds]
        return planned + [Trial(arm, seed) for seed in self.seeds for arm in self.arms]

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.fixed,
            "arms": {arm.name: arm.identity() for arm in self.arms},
            "seeds": list(self.seeds),
            "noise_floor": self.noise_floor,
            "margin": self.margin,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        from vitmods.changes import parse_changes

        rest = dict(values)
        arms = tuple(
            Arm(name, tuple(parse_changes(arm["changes"])), arm["recipe"], arm.get("start"))
            for name, arm in rest.pop("arms").items()
        )
        seeds, noise_floor, margin = tuple(rest.pop("seeds")), rest.pop("noise_floor"), rest.pop("margin")
        return cls(rest, arms, seeds, noise_floor, margin)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings in which `new` is another study than `old` (both from `Settings.to_dict`), as `name: old -> new`.

    Added arms, added seeds, a noise floor and another margin are no difference: nothing that was run depends on them.
    """
    found = []
    before, after = _flat(_fixed(old)), _flat(_fixed(new))
    for name in [*before, *(name for name in after if name not in before)]:
        was, now = before.get(name, "(not set)"), after.get(name, "(not set)")
        if was != now:
            found.append(f"{name}: {_show(was)} -> {_show(now)}")
    for name, arm in old["arms"].items():
        if name not in new["arms"]:
            found.append(f"arm {name}: {arm['changes']} -> (missing)")
        elif new["arms"][name] != arm:
            found.append(f"arm {name}: {_show_arm(arm)} -> {_show_arm(new['arms'][name])}")
    missing = [seed for seed in old["seeds"] if seed not in new["seeds"]]
    if missing:
        found.append(f"seeds: {old['seeds']} -> {new['seeds']}")
    if old["noise_floor"] and not new["noise_floor"]:
        found.append("noise_floor: true -> false")
    return found


def _fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in ("arms", "seeds", "noise_floor", "margin")}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{name}" if prefix else str(name)))
    return flat


def _show(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _show_arm(arm: Mapping[str, Any]) -> str:
    overrides = ", ".join(f"{name}={value}" for name, value in arm["recipe"].items())
    begins = f" from {arm['start']}" if "start" in arm else ""
    return arm["changes"] + begins + (f" with {overrides}" if overrides else "")
