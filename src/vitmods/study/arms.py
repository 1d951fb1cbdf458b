"""Arms: changes, other norms in any transformer, or functions of the user's, and how users name them.

Line-ups are the arms of a study under one name, such as those of a published table (`paper:dpn-table6`).

Imports without torch.
"""

from __future__ import annotations

import json
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.adapters.libraries import LIBRARIES
from vitmods.finetune.roles import ALL, MATCH, WAYS, TrainedPart
from vitmods.recipes.recipe import fields_by_name
from vitmods.recipes.registry import network
from vitmods.study.grid import read_value, show_value
from vitmods.util.errors import UserError
from vitmods.util.registry import Registry, load_plugins, named_by_user
from vitmods.util.shorthand import read_settings, split_form, split_outside

if TYPE_CHECKING:
    from torch import nn

    from vitmods.changes import Change


@dataclass(frozen=True)
class LineUp:
    """The arms of a study, and the settings that it has unless others are given.

    name: names the study's folder.
    title: what it compares, for people.
    arms: each as text, `NAME=CHANGES`.
    bases: models, with patches for images of 224 pixels.
    sweep: field -> values, besides the bases.
    start: the trained weights that it needs; empty: none.
    pretrain: the task without labels that trains all arms first; empty: none.
    recipe: of its paper; empty: none.
    network: the recipe whose paper says what base is besides its size; empty: its size alone.
    """

    name: str
    title: str
    arms: tuple[str, ...]
    bases: tuple[str, ...]
    task: str = "classification"
    metric: str | None = None
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    start: str = ""
    pretrain: str = ""
    recipe: str = ""
    network: str = ""

    def scaled(self, patch: int = 16, paper: str = "") -> list[str]:
        """The bases for smaller images, where the side of a patch is `patch` and not 16: S/32 becomes S/4 for 2. Models
        of other libraries stay as they are. paper: the recipe whose paper says what else the bases are."""

        def smaller(side: re.Match[str]) -> str:
            return f"/{max(1, int(side[1]) * patch // 16)}"

        return [
            base if ":" in base else re.sub(r"/(\d+)(?=\?|$)", smaller, network(base, paper)) for base in self.bases
        ]


LINE_UPS: Registry[Callable[[str], LineUp | None]] = Registry("kind of line-up", "vitmods.papers.table")
"""kind -> a function that finds the line-up of a text. It returns None for other texts, and raises UserError where the
text names none of this kind."""


_VIT5 = {
    "rms": "norm(kind=rms,exact=false)",
    "layerscale": "layerscale",
    "qknorm": "qknorm(norm=rms)",
    "nobias": "nobias",
    "registers": "registers",
    "rope": "rope(base=10000)",
    "registers-turn": "rope(base=10000,register_base=100)",
}


@LINE_UPS.register("vit5")
def _vit5(text: str) -> LineUp | None:
    """ViT-5 (Wang et al., 2026) whole, each of its parts alone, and each left out. Registers turn with the rotary
    positions, so that these, and registers, are alone and whole next to that part."""
    if text != "vit5":
        return None

    def join(*names: str) -> str:
        names = tuple(name for name in names if name != "rope" or "registers-turn" not in names)
        return "+".join(_VIT5[name] for name in names)

    arms = [f"vit5={join(*_VIT5)}"]
    for name in _VIT5:
        others = [other for other in _VIT5 if other != name]
        if name == "registers-turn":
            arms += [f"{name}={join('registers', name)}", f"without-{name}={join(*others)}"]
            continue
        if name in ("registers", "rope"):  # without one of the two nothing is left to turn
            others.remove("registers-turn")
        arms += [f"{name}={join(name)}", f"without-{name}={join(*others)}"]
    return LineUp("vit5", "ViT-5, each of its parts alone, and each left out", tuple(arms), ("S/16",))


@LINE_UPS.register("adapt")
def _adapt(text: str) -> LineUp | None:
    """Ways to adapt trained weights, beside base, which trains all of them."""
    if text != "adapt":
        return None
    arms = ("attention", "ffn", "head", "train(norms)", "biases", "last", "lora(rank=8)", "dora(rank=8)")
    return LineUp("adapt", "Eight ways to adapt trained weights", arms, (), start="a checkpoint or a timm model")


def find_line_up(text: str) -> LineUp | None:
    """The line-up that a text names; None for anything else."""
    return next((line_up for find in LINE_UPS.values() if (line_up := find(text.strip()))), None)


PROMISING = "promising"
"""instead of arms: those that other studies found promising (`vitmods.study.candidates`)"""


def is_promising(arms: Any) -> bool:
    """Whether arms are the word for those that other studies found promising."""
    alone = arms[0] if isinstance(arms, tuple | list) and len(arms) == 1 else arms
    return isinstance(alone, str) and alone.strip() == PROMISING


def table_of(arms: Any) -> LineUp | None:
    """Return the line-up whose bases and settings a study of these arms has; None without one. A word for some arms of
    a table, such as `norms`, has none. Raises UserError for two."""
    is_list = isinstance(arms, Iterable) and not isinstance(arms, str | Mapping)
    texts = arms if is_list else [arms]
    named = {text: line_up for text in texts if isinstance(text, str) and (line_up := find_line_up(text))}
    tables = {text: it for text, it in named.items() if text.strip() in (it.name, f"paper:{it.name}")}
    if len(tables) > 1:
        raise UserError(f"A study has the bases and settings of one table: give one of {' and '.join(tables)}.")
    return next(iter(tables.values()), None)


def refuse_line_ups(text: str) -> None:
    """Raise UserError where one of several changes, joined by +, is a line-up."""
    for part in text.split("+"):
        if line_up := find_line_up(part):
            name = part.strip()
            raise UserError(
                f"'{name}' is a line-up, several arms of a study: use it alone, as in `vitmods compare --arms {name}`, "
                f"or choose one of its arms here: {', '.join(line_up.arms)}."
            )


PYTHON = "python"


@dataclass(frozen=True)
class Replace:
    """`vm.replace_norms` as an arm: other norms in any transformer, in short form `replace(dtn)`,
    `replace(rms,where=attn)`, `replace(dtn(norms=both),heads=4)`.

    Args:
        change: what the norms become: `Norm(kind)` or `DynamicTokenNorm(...)`. RMSNorm keeps the weights, not the
            outputs, as `Norm("rms", exact=False)`.
        where: a role of norms, or a pattern of module names; None: as `replace_norms` chooses.
        heads: of norms by heads, instead of those of the attention next to it.
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
        chosen = [f"{name}={value}" for name in ("where", "heads") if (value := getattr(self, name)) is not None]
        return f"replace({','.join([self.kind, *chosen])})"

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
        """Describe the edit for reports, as changes do."""
        change = self.change.describe()
        chosen = f"those that match '{self.where}'" if self.where else "those that suit this kind"
        summary = f"The norms of the transformer ({chosen}) become {change['title']}; gains and biases are carried."
        return {**change, "summary": summary, "preserves": "weights", "cost": ""}


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
        """Name a function `module:name` if other processes can import that very object, and let files name it then;
        `otherwise` for lambdas, methods and functions of a script itself."""
        module, name = str(getattr(call, "__module__", "")), str(getattr(call, "__qualname__", ""))
        if module == "__main__" or module not in sys.modules or vars(sys.modules[module]).get(name) is not call:
            return cls(otherwise, call)
        named_by_user.add(f"{module}:{name}")
        return cls(f"{module}:{name}", call)

    def load(self) -> None:
        """Import its module, for the user names it now. Raises UserError if it does not exist or lacks the function."""
        if self.call is None and self.module is not None:
            load_plugins([self.module])
        self.resolve()

    def __str__(self) -> str:
        return f"{PYTHON}({self.name})"

    @property
    def module(self) -> str | None:
        """The module that defines it; None if only this process knows it."""
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
            raise UserError(
                f"{self.name} is one of Python's own functions, and does not make a model: name one that does."
            )
        path, module = self.name.partition(":")[2], sys.modules.get(self.module)
        function: Any = vars(module).get(path) if module else None
        is_named = bool({self.name, self.module} & named_by_user)
        file = getattr(module, "__file__", None)
        if file is not None and not is_named and not is_installed(Path(file)):  # scripts import packages for more
            imported = {id(value) for value in vars(sys.modules["__main__"]).values()}
            is_named = not imported.isdisjoint((id(module), id(function)))
        if module is None or not is_named:
            raise UserError(
                f"{self.name} is not called, because you did not name its module: import {self.module} in your script, "
                f"or add --plugin {self.module} in the shell. Installed packages need --plugin."
            )
        if not callable(function) or getattr(function, "__module__", None) != self.module:
            raise UserError(f"The module {self.module} does not define a function '{path}'.")
        return function

    def describe(self) -> dict[str, str]:
        """Describe the edit for reports, as changes do, by its docstring."""
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
    library, colon, _ = base.partition(":") if isinstance(base, str) else ("", "", "")
    return bool(colon) and (library == PYTHON or library in LIBRARIES)


if TYPE_CHECKING:
    Edit = Change | Replace | Function


def functions_of(edits: Iterable[Edit]) -> list[Function]:
    """Select the edits that are functions."""
    return [edit for edit in edits if isinstance(edit, Function)]


def parse_edits(text: str) -> tuple[Edit, ...]:
    """Parse the edits that a short form names, in order: changes, `replace(...)` and `python(module:function)`.

    Raises:
        UserError: as `parse_changes`.
    """
    from vitmods.changes import parse_changes

    edits: list[Edit] = []
    refuse_line_ups(text)
    for part in split_outside(text, "+"):
        name, inside = split_form(part) or ("", "")
        if name == PYTHON:
            edits.append(Function(inside.strip()))
        elif name == "replace":
            norm, *options = split_outside(inside, ",")
            changes = parse_changes(norm)
            if len(changes) != 1:
                raise UserError("replace(...) takes one kind of norm, as in replace(rms) or replace(dtn,where=attn).")
            kinds = {"where": str, "heads": int}
            edits.append(Replace(changes[0], **read_settings("replace", "arm", ",".join(options), kinds)))
        else:
            edits += parse_changes(part)
    return tuple(edits)


def is_installed(file: Path) -> bool:
    """Whether a module's file is in a folder of installed packages, of Python's own modules, or of vitmods."""
    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots = {Path(__file__).parents[1], *map(Path, [*folders, *site.getsitepackages(), site.getusersitepackages()])}
    roots |= {root.resolve() for root in roots}
    file = file.absolute()
    return any(
        not roots.isdisjoint(path.parents) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        for path in (file, file.resolve())
    )


BASE = "base"
_TRAINED = {"full": ALL, "attention": "attention", "ffn": "ffn", "head": "head"}
"""words of an arm for what is trained; `biases`, `last(4)`, `lora(...)` and `dora(...)` are words too"""
_FIELDS = {"layerdecay": "layer_decay", "probe_first": "head_start"}
"""other names of recipe fields in arms"""


@dataclass(frozen=True)
class Arm:
    """A named list of changes or other edits, with recipe overrides if any; `base` is the arm with none."""

    name: str
    changes: tuple[Edit, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict, hash=False)
    start: str | None = None
    """trained weights that it starts from, changes included; None: base's"""

    def __post_init__(self) -> None:
        """What its changes train joins what is trained: it starts from nothing trained."""
        added = [role for change in self.changes if (role := getattr(change, "trains", ""))]
        trained = self.recipe.get("train", "")
        if added and trained != ALL:
            parts = dict.fromkeys([*filter(None, split_outside(trained, "+")), *added])
            object.__setattr__(self, "recipe", {**self.recipe, "train": "+".join(parts)})

    @property
    def short(self) -> str:
        """The changes in their shell form, e.g. `dpn+norm(rms)`."""
        return "+".join(str(change) for change in self.changes)

    @property
    def text(self) -> str:
        """The changes and the recipe overrides, for people, e.g. `dpn+train(attention)`."""
        overrides = (f"{name}({show_value(value)})" for name, value in self.recipe.items())
        origin = f"from {Path(self.start).name}" if self.start and not self.changes else ""
        return "+".join(filter(None, (self.short, origin, *overrides)))

    def identity(self) -> dict[str, Any]:
        """Return everything but the name, in JSON's types."""
        begins = {"start": self.start} if self.start else {}
        return {"changes": self.short, "recipe": json.loads(json.dumps(dict(self.recipe))), **begins}

    @classmethod
    def from_identity(cls, name: str, values: Mapping[str, Any]) -> Arm:
        """The inverse of `identity`. Raises KeyError or TypeError for other values."""
        return cls(name, parse_edits(values["changes"]), values["recipe"], values.get("start"))


def arm_from_text(text: str) -> Arm:
    """Read `CHANGES` or `NAME=CHANGES`, e.g. `dpn`, `post=placement(attn=post)`, `replace(dtn)` of any transformer,
    `python(module:function)`. Raises UserError for an unknown change or function.

    Among the changes may be what is trained, `train(norms)` (the words `attention`, `ffn`, `head` and `full`, `biases`,
    `last(4)`, `lora(rank=8)` and `dora(rank=8)` do without `train`), and fields of the recipe, `lr(5e-5)`: as in
    `dpn+attention+lr(5e-5)`.
    """
    named = re.match(r"\s*([^=()]+?)\s*=\s*(.+)$", text, flags=re.DOTALL)
    name, record = (named[1], named[2]) if named else (text.strip(), text)
    changes, recipe = split_training(record)
    edits = parse_edits(changes)
    for function in functions_of(edits):
        function.load()
    return Arm(name, edits, recipe)


def split_training(text: str) -> tuple[str, dict[str, Any]]:
    """Split a short form into its changes, and the recipe overrides among them: what is trained, and other fields."""
    changes, recipe = list[str](), dict[str, Any]()
    for part in split_outside(text, "+"):
        name, inside = split_form(part) or (part, "")
        field = _FIELDS.get(name, name)
        if name == "train" or part in _TRAINED or (name in WAYS and name != "roles"):
            field, value = "train", inside.strip() if name == "train" else _TRAINED.get(part, part)
            value = TrainedPart.of(value).text  # an unknown role is reported before anything runs
        elif field in fields_by_name() and not _is_change(name):
            if not inside and name != "probe_first":
                raise UserError(f"{name} is a field of the recipe: give its value, {name}(VALUE).")
            value = read_value(field, inside.strip() or "probe")
        else:
            changes.append(part)
            continue
        if field in recipe:
            if field != "train":
                raise UserError(f"'{text}' sets {field} twice: leave one out.")
            raise UserError(f"'{text}' says twice what is trained: join it, train({recipe[field]}+{value}).")
        recipe[field] = value
    return "+".join(changes), recipe


def _is_change(name: str) -> bool:
    from vitmods.changes.base import REGISTRY

    return name in REGISTRY


def arms_from_text(text: str) -> list[Arm]:
    """Read one arm, or the arms of a line-up, e.g. `paper:dpn-table6` or `norms`."""
    line_up = find_line_up(text)
    return [arm_from_text(arm) for arm in line_up.arms] if line_up else [arm_from_text(text)]


def make_arms(arms: Mapping[str, Any] | Iterable[Any]) -> tuple[Arm, ...]:
    """Make the arms that users name: a mapping name -> changes, functions `model -> model`, or short forms, line-ups
    and Arm objects. Without `base`.

    Raises UserError without any arm, for a name that is used twice, for two arms of the same changes, or for anything
    else than changes.
    """
    if isinstance(arms, Mapping):
        listed = [_make_arm(str(name), content) for name, content in arms.items()]
    else:
        items = [arms] if isinstance(arms, str) or not isinstance(arms, Iterable) else arms
        listed = [arm for item in items for arm in ([item] if isinstance(item, Arm) else arms_from_text(str(item)))]
    made: dict[str, Arm] = {}
    contents: dict[str, str] = {}
    for arm in listed:
        if arm.name == BASE and not arm.changes and not arm.recipe:
            continue
        if arm.name == BASE:
            raise UserError("The arm named base is the model without changes. Give this arm another name.")
        if not arm.changes and not arm.recipe and arm.start is None:
            raise UserError(f"Arm {arm.name} changes nothing. Base is always part of the study; leave this arm out.")
        if arm.name in made:
            raise UserError(f"Two arms are named {arm.name}. Leave one out, or name it differently: NAME=CHANGES.")
        same = contents.setdefault(repr(arm.identity()), arm.name)
        if same != arm.name:
            raise UserError(f"Arms {same} and {arm.name} are the same changes ({arm.text}). Leave one out.")
        made[arm.name] = arm
    if not made:
        raise UserError("A study needs an arm besides base, for example dpn; `vitmods changes` lists all changes.")
    return tuple(made.values())


def with_matched_ranks(arms: Iterable[Arm]) -> tuple[Arm, ...]:
    """The arms, where low-rank adapters have the rank with which they train as many parameters as `attention`.

    Raises UserError if no arm has such adapters.
    """
    parts = {arm: TrainedPart.of(arm.recipe.get("train", ALL)) for arm in arms}
    if not any(part.adapters for part in parts.values()):
        raise UserError(
            "--match parameters chooses ranks of low-rank adapters: add an arm lora or dora, or leave it out."
        )
    texts = {arm: part.with_rank(MATCH).text for arm, part in parts.items()}
    return tuple(
        replace(arm, name=arm.name.replace(part.text, texts[arm]), recipe={**arm.recipe, "train": texts[arm]})
        if part.adapters
        else arm
        for arm, part in parts.items()
    )


def _make_arm(name: str, content: Any) -> Arm:
    """Make an arm of a short form, an Arm, one change or function, or several."""
    from vitmods.changes import Change

    if isinstance(content, str | Arm):
        return replace(arm_from_text(content) if isinstance(content, str) else content, name=name)
    items = tuple(content) if isinstance(content, Iterable) and not isinstance(content, type) else (content,)
    are_edits = [isinstance(item, Change | Replace | Function) for item in items]
    are_changes = [isinstance(item, type) and issubclass(item, Change) for item in items]  # classes, not yet called
    functions = sum(callable(item) for item, is_edit in zip(items, are_edits, strict=True) if not is_edit)
    edits: list[Edit] = []
    for i, item in enumerate(items):
        if are_edits[i]:
            edits.append(item)
        elif callable(item) and not are_changes[i]:  # one that other processes cannot import is named after the arm
            edits.append(Function.of(item, f"{name}{i}" if functions > 1 else name))
        else:
            raise UserError(
                f"Arm {name}: {item!r} is not a change. Give changes as DualPatchNorm(), as text ('dpn+rms'), or a "
                "function model -> model."
            )
    return Arm(name, tuple(edits))
