"""Arms: what is compared with base, and how users name it.

What an arm does to base besides changes: other norms in any transformer, or a function of the user's.

Imports without torch.
"""

from __future__ import annotations

import json
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vitmods.finetune.roles import chosen_roles
from vitmods.study.line_ups import find_line_up, refuse_line_ups
from vitmods.util.errors import UserError
from vitmods.util.registry import load_plugins, named_by_user
from vitmods.util.shorthand import read_settings, split_form, split_outside

if TYPE_CHECKING:
    from torch import nn

    from vitmods.changes import Change


PYTHON = "python"
LIBRARIES = ("timm", "torchvision", "hf", "hf-text", PYTHON)


@dataclass(frozen=True)
class Replace:
    """`vm.replace_norms` as an arm: other norms in any transformer, in short form `replace(dtn)`,
    `replace(rms,where=attn)`, `replace(dtn(norms=both),heads=4)`.

    Args:
        change: what the norms become: `Norm(kind)` or `DynamicTokenNorm(...)`. RMSNorm keeps the weights, not the
            outputs, as `Norm("rms", exact=False)`.
        where: a role of norms, or a pattern of module names; None: as `replace_norms` chooses.
        heads: of norms by heads, instead of those of the attention beside.
    """

    change: Change
    where: str | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        from vitmods.changes.dynamic_token_norm import DynamicTokenNorm
        from vitmods.changes.norm import Norm

        if not isinstance(self.change, Norm | DynamicTokenNorm):
            raise UserError(f"replace(...) takes a kind of norm, as rms or dtn, not '{self.change}'.")
        if self.change == Norm("rms"):
            object.__setattr__(self, "change", Norm("rms", exact=False))
        if not isinstance(self.where, str | None):
            raise UserError(
                f"replace({self.change}): where is a role or a pattern of names, not {self.where!r}, which no file can "
                "record. For other choices give the arm as a function that calls vm.replace_norms."
            )
        if self.where is not None and set(self.where) & set(",()+"):
            raise UserError(f"replace({self.change}): where has a character of , ( ) + in it: {self.where!r}.")

    def __str__(self) -> str:
        chosen = (("where", self.where), ("heads", self.heads))
        return f"replace({','.join([self.kind, *(f'{name}={value}' for name, value in chosen if value is not None)])})"

    @property
    def kind(self) -> str:
        """The short form of what the norms become."""
        from vitmods.changes.norm import Norm

        return "rms" if self.change == Norm("rms", exact=False) else str(self.change)

    @property
    def on_slots(self) -> Change:
        """The same on a vitmods ViT. UserError where it chooses norms, since such a ViT has slots."""
        if self.where is not None or self.heads is not None:
            raise UserError(f"This model is a vitmods ViT, which has slots: write {self.kind}, not {self}.")
        return self.change

    def describe(self) -> dict[str, str]:
        """As of a change, for reports."""
        about = self.change.describe()
        chosen = f"those that match '{self.where}'" if self.where else "those that suit this kind"
        summary = f"The norms of the transformer ({chosen}) become {about['title']}; gains and biases are carried."
        return {**about, "summary": summary, "preserves": "weights", "cost": ""}


@dataclass(frozen=True)
class Function:
    """A user's function: of an arm `model -> model`, or of base `(num_classes, img_size, in_chans) -> model`.

    name: `module:qualname` where other processes can import it; otherwise any name, and it is called in this process
    alone. Two of the same name are the same: what a function does is not compared.
    """

    name: str
    call: Callable[..., nn.Module] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, call: Callable[..., nn.Module], otherwise: str) -> Function:
        """The function by the name under which it can be imported, or `otherwise`. From then on files may name it."""
        name = _importable(call)
        named_by_user.update([name] if name else [])
        return cls(name or otherwise, call)

    def load(self) -> None:
        """Import its module, for the user names it now. UserError where there is none, or no such function."""
        if self.call is None and self.module is not None:
            load_plugins([self.module])
        self.resolve()

    def __str__(self) -> str:
        return f"{PYTHON}({self.name})"

    @property
    def module(self) -> str | None:
        """What a process must import to know it; None where it is known in this one alone."""
        module, colon, _ = self.name.partition(":")
        return module if colon else None

    def resolve(self) -> Callable[..., nn.Module]:
        """The function itself. A file that names a function neither imports its module nor chooses among what other
        modules of this process happen to hold: the user has to have named the module.

        Raises:
            UserError: the user did not name its module, or the module does not define such a function.
        """
        if self.call is not None:
            return self.call
        if self.module is None:
            raise UserError(
                f"'{self.name}' is a function of the script or notebook that began this study and is known there "
                "alone: run that again. A function of a module that can be imported is known everywhere."
            )
        if self.module.partition(".")[0] in sys.stdlib_module_names:
            raise UserError(f"{self.name} is a function of Python's own, and makes no model: name one of yours.")
        path = self.name.partition(":")[2]
        module = sys.modules.get(self.module)
        found: Any = vars(module).get(path) if module else None
        if module is None or not ({self.name, self.module} & named_by_user or _script_imports(module, found)):
            raise UserError(
                f"{self.name} is not called, because you did not name its module: import {self.module} in your script, "
                f"or add --plugin {self.module} in the shell. Installed packages need --plugin."
            )
        if not callable(found) or getattr(found, "__module__", None) != self.module:
            raise UserError(f"The module {self.module} does not define a function '{path}'.")
        function: Callable[..., nn.Module] = found
        return function

    def describe(self) -> dict[str, str]:
        """As of a change, for reports: its docstring is all that is known."""
        try:
            text = " ".join((self.resolve().__doc__ or "").split())
        except UserError:
            text = ""
        title = self.name.rpartition(":")[2].rpartition(".")[2]
        return {"name": PYTHON, "title": title, "summary": text or "A function of the user's.", "paper": "", "url": ""}


class FunctionSpec(str):
    """A base's spec that remembers the function that it names."""

    call: Callable[..., nn.Module]

    @classmethod
    def of(cls, call: Callable[..., nn.Module]) -> FunctionSpec:
        spec = cls(f"{PYTHON}:{Function.of(call, 'base').name}")
        spec.call = call
        return spec


def base_function(base: Any) -> Function | None:
    """The function that a base's spec names; None where it names none."""
    if not isinstance(base, str) or not base.startswith(f"{PYTHON}:"):
        return None
    return Function(base.partition(":")[2], getattr(base, "call", None))


def is_foreign(base: Any) -> bool:
    """Whether a base, as settings hold it, is the spec of another library's model or of a function."""
    return isinstance(base, str) and base.partition(":")[0] in LIBRARIES and ":" in base


if TYPE_CHECKING:
    Edit = Change | Replace | Function


def functions_of(edits: Iterable[Edit]) -> list[Function]:
    """Those of the edits that are functions."""
    return [edit for edit in edits if isinstance(edit, Function)]


def parse_edits(text: str) -> tuple[Edit, ...]:
    """The edits that a short form names, in order: changes, `replace(...)` and `python(module:function)`.

    Raises:
        UserError: as `parse_changes`.
    """
    from vitmods.changes import parse_changes

    found: list[Edit] = []
    refuse_line_ups(text)
    for part in split_outside(text, "+"):
        form = split_form(part)
        if form and form[0] == "replace":
            found.append(_replace(form[1]))
        elif form and form[0] == PYTHON:
            found.append(Function(form[1].strip()))
        else:
            found += parse_changes(part)
    return tuple(found)


def _replace(inside: str) -> Replace:
    from vitmods.changes import parse_changes

    first, *rest = split_outside(inside, ",")
    changes = parse_changes(first)
    if len(changes) != 1:
        raise UserError("replace(...) takes one kind of norm, as in replace(rms) or replace(dtn,where=attn).")
    return Replace(changes[0], **read_settings("replace", "arm", ",".join(rest), {"where": str, "heads": int}))


def _importable(call: Any) -> str | None:
    """`module:name` where that is this very object; None for lambdas, methods, and what a script itself defines."""
    module, name = getattr(call, "__module__", None), getattr(call, "__qualname__", None)
    if not module or not name or module == "__main__" or module not in sys.modules:
        return None
    return f"{module}:{name}" if vars(sys.modules[module]).get(name) is call else None


def _script_imports(module: ModuleType, function: Any) -> bool:
    """Whether the script or notebook of this process has imported a user's module, or that function of it.

    Scripts import installed packages for other reasons than to name a function of theirs: those do not count.
    """
    imported = {id(value) for value in vars(sys.modules["__main__"]).values()}
    return not _is_installed(module) and not imported.isdisjoint((id(module), id(function)))


def _is_installed(module: ModuleType) -> bool:
    """Whether the file of a module is in a folder of installed packages, of Python's own modules, or of vitmods."""
    if getattr(module, "__file__", None) is None:
        return True
    known = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots = {Path(__file__).parents[1], *map(Path, [*known, *site.getsitepackages(), site.getusersitepackages()])}
    roots |= {root.resolve() for root in roots}
    file = Path(str(module.__file__)).absolute()
    return any(
        not roots.isdisjoint(one.parents) or not {"site-packages", "dist-packages"}.isdisjoint(one.parts)
        for one in (file, file.resolve())
    )


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
    line_up = find_line_up(text)
    return [arm_from_text(arm) for arm in line_up.arms] if line_up else [arm_from_text(text)]


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
