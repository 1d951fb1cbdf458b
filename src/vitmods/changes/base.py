"""What a change is: an edit of the config, a rule for the weights, and what it promises to preserve."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vitmods.model.config import ViTConfig
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

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
    """The gain that its paper reports."""
    short_forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Other names for the shell, each with the fields that it sets."""

    def __init_subclass__(cls) -> None:
        known = REGISTRY.setdefault(cls.name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UserError(f"'{cls.name}' is {known.__qualname__}'s name already: give {cls.__qualname__} another.")
        REGISTRY[cls.name] = cls

    @property
    def preserves(self) -> Preserves:
        """``function``: same outputs in evaluation, weights may be rewritten to that end. ``weights``: every old weight
        outside the filled slots lives on unchanged, the outputs differ. ``nothing``: neither. ``apply`` verifies it."""
        return "weights"

    @property
    def fills(self) -> frozenset[str]:
        """The slots that this change claims; two changes of one arm may not claim the same."""
        raise NotImplementedError

    def edit(self, config: ViTConfig) -> ViTConfig:
        """The config with this change. A config that comes back equal means that the change has no effect here."""
        raise NotImplementedError

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        """The old model's weights under the new model's names. What is left out starts as a new model's would.

        Models with parallel branches are shown here, and to ``drops``, as the sequential models with the same branches
        (``config.unrolled``, vitmods.model.branch_names), so that a rule need not know of them.
        """
        return weights

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        """Patterns (fnmatch) of old weights that have no place in the new model. Any other loss is an error."""
        return ()

    def describe(self) -> dict[str, str]:
        """What it is, for a reader who does not know it; for lists and reports."""
        record = ("name", "title", "paper", "url", "summary", "preserves", "cost", "published")
        return {name: getattr(self, name) for name in record}

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        for short, fields in self.short_forms.items():
            if values and values == dict(fields):
                return short
        inside = ",".join(f"{key}={_spell(value)}" for key, value in values.items())
        return f"{self.name}({inside})" if inside else self.name


REGISTRY: dict[str, type[Change]] = {}


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
