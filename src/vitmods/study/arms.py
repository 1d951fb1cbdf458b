"""Arms: what is compared with base, and how users name it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.finetune.roles import chosen_roles
from vitmods.papers.line_up import line_up
from vitmods.study.edits import Function, Replace, functions_of, parse_edits
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.study.edits import Edit

BASE = "base"
TRAINING = {"full": "train(all)", **{role: f"train({role})" for role in ("attention", "ffn", "head")}}


@dataclass(frozen=True)
class Arm:
    """A named list of changes or other edits, with recipe overrides if any; `base` is the arm with none."""

    name: str
    changes: tuple[Edit, ...] = ()
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
        """What makes it this arm, as JSON gives it back (which has no tuples)."""
        begins = {"start": self.start} if self.start else {}
        return {"changes": self.short, "recipe": json.loads(json.dumps(dict(self.recipe))), **begins}

    @classmethod
    def from_identity(cls, name: str, values: Mapping[str, Any]) -> Arm:
        """The inverse of `identity`. KeyError or TypeError where `values` are none."""
        return cls(name, parse_edits(values["changes"]), values["recipe"], values.get("start"))


def arm_from_text(text: str) -> Arm:
    """Read `CHANGES` or `NAME=CHANGES`, e.g. `dpn`, `post=placement(attn=post)`, `replace(dtn)` of any transformer,
    `python(module:function)`. UserError for an unknown change, or where there is no such function.

    Among the changes `train(ROLES)` may say what is trained, e.g. `dpn+train(attention)`; the words `attention`,
    `ffn`, `head` and `full` are short for that.
    """
    named = re.match(r"\s*([^=()]+?)\s*=\s*(.+)$", text, flags=re.DOTALL)
    name, record = (named[1], named[2]) if named else (text.strip(), text)
    changes, recipe = split_training(record)
    edits = parse_edits(changes)
    for function in functions_of(edits):
        function.load()
    return Arm(name, edits, recipe)


def split_training(text: str) -> tuple[str, dict[str, Any]]:
    """The changes, and the recipe override that `train(...)` among them, or a word for it, is."""
    text = TRAINING.get(text.strip(), text)
    pattern = r"(?:(?<=\+)|^)\s*train\(([^()]*)\)\s*(?:\+|$)"
    found = re.findall(pattern, text)
    if len(found) > 1:
        raise UserError(f"'{text}' says twice what is trained: join the roles, train({'+'.join(found)}).")
    if not found:
        return text, {}
    chosen_roles(found[0])  # an unknown role is reported before anything runs
    return re.sub(pattern, "", text).rstrip("+ "), {"train": found[0].strip()}


def arms_from_text(text: str) -> list[Arm]:
    """The same, or the arms of a published table, e.g. `paper:dpn-table6`, or `norms`, short for one."""
    table = line_up(text)
    return [arm_from_text(arm) for arm in table.study.every_arm] if table and table.study else [arm_from_text(text)]


def make_arms(arms: Mapping[str, Any] | Iterable[Any]) -> tuple[Arm, ...]:
    """The arms that users name: a mapping name -> changes, functions `model -> model`, or short forms, line-ups and Arm
    objects. Without `base`.

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
    """The arm that a user gives under a name: a short form, an Arm, one change or function, or several."""
    if isinstance(given, str | Arm):
        return replace(arm_from_text(given) if isinstance(given, str) else given, name=name)
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, type) else (given,)
    functions = sum(_is_function(one) for one in listed)
    return Arm(name, tuple(_edit(name, one, f"{name}{i}" if functions > 1 else name) for i, one in enumerate(listed)))


def _edit(arm: str, given: Any, label: str) -> Edit:
    """A change or another edit; a function that no other process could import is called `label`."""
    from vitmods.changes import Change

    if isinstance(given, Change | Replace | Function):
        return given
    if _is_function(given):
        return Function.of(given, label)
    raise UserError(
        f"Arm {arm}: {given!r} is no change. Give changes as DualPatchNorm(), as text ('dpn+rms'), or a function "
        "model -> model."
    )


def _is_function(given: Any) -> bool:
    from vitmods.changes import Change

    return (
        callable(given)
        and not isinstance(given, Function)
        and not (isinstance(given, type) and issubclass(given, Change))
    )


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
