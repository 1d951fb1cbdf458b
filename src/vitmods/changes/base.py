"""A change: an edit of the config, a rule for the weights, and what it promises to preserve."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_type_hints

from vitmods.changes.insertions import EXAMPLE, Insertion, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import ADDED_NORMS, Slot
from vitmods.util.errors import NeedsReading, UserError, nearest
from vitmods.util.registry import Registry
from vitmods.util.shorthand import read_settings

if TYPE_CHECKING:
    from torch import Tensor, nn

Start = Literal["published", "gentle"]
Preserves = Literal["function", "weights", "nothing"]
Weights = dict[str, "Tensor"]


@dataclasses.dataclass(frozen=True)
class Change:
    """One published design change of a Vision Transformer, as a frozen dataclass whose fields are its variants.

    A subclass in a file of this folder is found by itself: it joins ``REGISTRY`` under ``name``, the shell's list and
    the tests over all changes.
    """

    name: ClassVar[str]
    """Short name for the shell."""
    title: ClassVar[str]
    paper: ClassVar[str]
    url: ClassVar[str]
    summary: ClassVar[str]
    """One sentence: what it does and where it sits."""
    cost: ClassVar[str]
    published: ClassVar[str]
    """The gain reported in its paper."""
    example: ClassVar[Mapping[str, Any]] = {}
    """example settings, if the default changes nothing"""
    short_forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Other names for the shell, each with the fields that it sets."""
    words: ClassVar[tuple[str, ...]] = ()
    """Search keywords, which an error suggests."""
    acts_in: ClassVar[Literal["model", "training"]] = "model"
    """``training``: a change whose model computes the same in evaluation and has the same weights."""

    def __init_subclass__(cls) -> None:
        REGISTRY.add(cls.name, cls, words=cls.words)

    trains: ClassVar[str] = ""
    """The role of what an arm with this change trains of trained weights, with the head, instead of all."""

    @property
    def preserves(self) -> Preserves:
        """``function``: same outputs in evaluation, weights may be rewritten to that end. ``weights``: every old weight
        outside the filled slots is kept, the outputs differ. ``nothing``: neither. ``apply`` verifies it."""
        return "weights"

    @property
    def fills(self) -> frozenset[Slot]:
        """The slots that this change claims; two changes of one arm may not claim the same."""
        raise NotImplementedError

    @property
    def adds_norms(self) -> bool:
        """Whether a model without the norms that it adds computes what it did before the change, so that training can
        blend them in."""
        return bool(self.fills & ADDED_NORMS) and Slot.STEM not in self.fills

    @property
    def claims(self) -> frozenset[Slot]:
        """``fills``, checked. Raises UserError for an unknown slot."""
        for name in self.fills:
            if name not in list(Slot):
                raise UserError(f"The change '{self.name}' fills '{name}', which is not a slot. {nearest(name, Slot)}")
        return frozenset(map(Slot, self.fills))

    @property
    def undoes(self) -> frozenset[Slot]:
        """The slots of other changes that this one would empty again; those changes may only come after it."""
        return frozenset()

    def edit(self, config: ViTConfig) -> ViTConfig:
        """The config with this change. A config that comes back equal means that the change does nothing here."""
        raise NotImplementedError

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        """The old model's weights under the new model's names. Weights left out start as in a new model.

        Models with parallel branches are shown here, and to ``drops``, as the sequential models with the same branches
        (``config.unrolled``, vitmods.model.branch_names), so that a rule need not know of them.
        """
        return weights

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        """Patterns (fnmatch) of old weights without a place in the new model. Any other loss is an error."""
        return ()

    def insertions(self, parts: Parts) -> Iterable[Insertion]:
        """The modules that this change puts into a model of another library, which keeps its class and its names.

        Raises UserError if the change, with these settings, needs a model that `vm.apply` can read.
        """
        raise NeedsReading(f"'{self}' needs a model that vm.apply can read (docs/models.md).")

    def check_start(self, model: "nn.Module") -> None:
        """Raise UserError if the insertions would multiply or replace what was trained in this model."""

    @property
    def needs_reading(self) -> str:
        """Explain why the change needs a vitmods ViT and cannot be made in place; empty if it can."""
        try:
            self.insertions(EXAMPLE)
        except NeedsReading as error:
            return str(error)
        return ""

    def fit(self, model: "nn.Module", images: "Iterable[Tensor]") -> bool:
        """Compute what a model with this change needs of training images (B, channels, height, width) before its first
        step. False if it needs nothing; the images are then not read."""
        return False

    def advice(self, config: ViTConfig) -> str:
        """Return what the paper advises against in a model with this config, which has the change; or an empty string.
        Studies report it once before they train."""
        return ""

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Setting of the shell -> its default; None where there is none."""
        return {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(cls)}

    @classmethod
    def from_settings(cls, inside: str, **values: Any) -> Self:
        """The change with what the shell writes in its parentheses over these values; a number without a name is the
        first setting. Raises UserError for others."""
        hints = get_type_hints(cls)
        if re.match(r"\s*[\d.]", inside) and cls.settings():
            inside = f"{next(iter(cls.settings()))}={inside}"
        return cls(**values | read_settings(cls.name, "change", inside, {name: hints[name] for name in cls.settings()}))

    def values(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        values = {name: getattr(self, name) for name in self.settings()}
        return {name: value for name, value in values.items() if value != self.settings()[name]}

    def describe(self) -> dict[str, str]:
        """Describe the change to a reader who does not know it; for lists and reports."""
        record = ("name", "title", "paper", "url", "summary", "preserves", "cost", "published")
        return {name: getattr(self, name) for name in record}

    def __str__(self) -> str:
        values = self.values()
        for short, fields in self.short_forms.items():
            if values and values == dict(fields):
                return short
        inside = ",".join(f"{key}={_spell(value)}" for key, value in values.items())
        return f"{self.name}({inside})" if inside else self.name


REGISTRY: Registry[type[Change]] = Registry("change", "vitmods.changes", advice="`vitmods changes` lists all.")


def _spell(value: object) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(_spell, value))})"
    return str(value).lower() if isinstance(value, bool) else str(value)
