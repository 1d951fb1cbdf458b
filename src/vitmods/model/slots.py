"""The parts of a ViT's config: what fills a slot, and in which blocks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitmods.util.errors import UserError, nearest
from vitmods.util.fields import check_types

if TYPE_CHECKING:
    from vitmods.layers.norms import NormKind
    from vitmods.layers.stems import Stem


def parse(kind: Any, values: Any) -> Any:
    """The inverse of ``dataclasses.asdict`` for a part of a description. Values that are parts already, and None, stay.
    Raises UserError on fields that this version does not know."""
    if not isinstance(values, Mapping):
        return values
    types = {field.name: field.type for field in fields(kind)}
    for name in values:
        if name not in types:
            raise UserError(f"{kind.__name__} does not have a setting '{name}'. {nearest(name, types)}")
    parts = {
        name: [option for option in (get_args(hint) or (hint,)) if is_dataclass(option)] for name, hint in types.items()
    }
    return kind(**{name: parse(parts[name][0], value) if parts[name] else value for name, value in values.items()})


class Slot(StrEnum):
    """The places of a ViT that a change may claim, so that two changes of one arm do not alter the same."""

    SIZE = "depth, width and heads"
    STEM = "stem"
    STEM_BEFORE = "stem norm before"
    STEM_AFTER = "stem norm after"
    PATCHES_KEPT = "patches kept"
    POSITION_NORM = "position norm"
    PREFIX_POSITION = "class-token position"
    ATTN_BEFORE = "attn norm before"
    ATTN_INNER = "attn inner norm"
    ATTN_BRANCH = "attn norm on branch"
    ATTN_AFTER = "attn norm after residual"
    MLP_BEFORE = "mlp norm before"
    MLP_INNER = "mlp inner norm"
    MLP_BRANCH = "mlp norm on branch"
    MLP_AFTER = "mlp norm after residual"
    NORM_KIND = "kind of norm"
    QK_NORM = "norm of queries and keys"
    ATTN_MASK = "mask of attention"
    ROPE = "rotary positions"
    REL_POS = "relative positions"
    GATE = "gate of attention"
    VALUE_MIX = "values of the first block"
    NORM_SCALE = "scale of norms"
    ATTN_POSITIONS = "positions in attention"
    HEAD_SCALE = "head scale"
    MLP = "mlp"
    LAYER_SCALE = "layer scale"
    RESIDUAL_SCALE = "residual scale"
    PARALLEL = "parallel branches"
    QKV_BIAS = "bias of queries, keys and values"
    ACTIVATION = "activation"
    POSITION = "position"
    PREFIX_TOKENS = "class and register tokens"
    PROMPTS = "prompts"
    FINAL_NORM = "final norm"
    POOL = "pool"
    HEAD = "head"
    DROPOUT = "dropout"
    INITIALIZATION = "initialization"


ADDED_NORMS = frozenset(
    {
        Slot.STEM_BEFORE,
        Slot.STEM_AFTER,
        Slot.POSITION_NORM,
        Slot.ATTN_INNER,
        Slot.ATTN_BRANCH,
        Slot.ATTN_AFTER,
        Slot.MLP_INNER,
        Slot.MLP_BRANCH,
        Slot.MLP_AFTER,
        Slot.QK_NORM,
    }
)
"""the slots of norms that a plain ViT does without"""


@dataclass(frozen=True)
class NormConfig:
    """The content of a norm slot: a kind of ``vitmods.layers.norms``. ``affine`` False leaves the learned gain and bias
    out; ``options`` are further keywords of the norm's class, as pairs (a mapping is taken too)."""

    kind: str = "layer"
    eps: float = 1e-6
    affine: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        pairs = self.options.items() if isinstance(self.options, Mapping) else self.options
        object.__setattr__(self, "options", tuple((str(key), value) for key, value in pairs))
        check_types(self)
        if self.kind != "layer" or self.options:
            self.facts.check(self.affine, dict(self.options))
        if not self.eps > 0:
            raise UserError(f"A norm's eps must be positive, got {self.eps}.")

    @property
    def facts(self) -> "NormKind":
        """The facts of the kind. Raises UserError for an unknown kind."""
        from vitmods.layers.norms import NORMS  # layers import torch, and a plain ViT is described without

        return NORMS[self.kind]


@dataclass(frozen=True)
class StemConfig:
    """From images to patch tokens: the kind of map (of ``vitmods.layers.STEMS``), and norms around and inside it.

    ``linear`` may have a norm on the pixels of a patch before it and a GELU at the end; ``hmlp`` and ``levit`` have
    norms between their layers; ``t2t`` has tokens-to-token stages before its linear map (``bias`` is the map's).
    """

    bias: bool = True
    before: NormConfig | None = None
    after: NormConfig | None = None
    kind: str = "linear"
    inner: NormConfig | None = None
    gelu: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.kind == "linear" and not self.inner:
            return
        facts = self.facts
        if not facts.around and (self.before or self.gelu):
            part = "A norm on the pixels of a patch" if self.before else "A GELU at the end"
            raise UserError(f"{part} is only for the linear stem, not '{self.kind}'.")
        if self.inner and not facts.inner:
            raise UserError(f"The stem '{self.kind}' does not have layers to put a norm between: leave inner out.")

    @property
    def facts(self) -> "type[Stem]":
        """The class of the kind. Raises UserError for an unknown kind."""
        from vitmods.layers.stems import STEMS  # layers import torch, and a plain ViT is described without

        return STEMS[self.kind]


@dataclass(frozen=True)
class BranchConfig:
    """Norm slots of one residual branch F: ``x = after(x + scale * branch(F(before(x))))``; ``inner`` sits inside F,
    before its last linear map (for attention on the concatenated heads, for the MLP after the activation)."""

    before: NormConfig | None = NormConfig()
    inner: NormConfig | None = None
    branch: NormConfig | None = None
    after: NormConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class FirstBlocks:
    """Norm slots of the first ``count`` blocks, where they differ from those of the others."""

    count: int
    attn: BranchConfig
    mlp: BranchConfig

    def __post_init__(self) -> None:
        check_types(self)
        if self.count < 1:
            raise UserError(f"The number of first blocks must be at least 1, got {self.count}: leave them out instead.")


@dataclass(frozen=True)
class PositionalConfig:
    """Attention of the first ``count`` blocks is mixed with a learned kernel over the grid: where the kernels start
    (``init``, as in dynamic token norms) and the logit of their fraction (``gate``)."""

    count: int
    init: Literal["local", "noise"] = "local"
    gate: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.count < 1:
            raise UserError(f"The number of blocks with positions must be at least 1, got {self.count}.")
        if not math.isfinite(self.gate):
            raise UserError(f"The gate of positions is a number, got {self.gate}.")
