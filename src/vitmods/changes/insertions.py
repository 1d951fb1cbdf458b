"""Insertions: where a change puts modules into a model of another library, whose own modules stay."""

from dataclasses import dataclass
from typing import Literal

from vitmods.model.slots import NormConfig, StemConfig


@dataclass(frozen=True)
class Branch:
    """A residual branch of a block in a foreign model.

    ``module`` is the outermost module whose output is only the branch's, without the residual; ``projection`` the
    linear map that ends the branch, from ``hidden`` channels to ``dim``. ``norm`` is the norm before the branch, None
    in post-norm blocks. ``axis`` is that of the channels in what ``module`` puts out, -1 or 1.
    """

    kind: Literal["attn", "mlp"]
    block: str
    module: str
    projection: str
    dim: int
    hidden: int
    norm: str | None
    axis: int = -1


@dataclass(frozen=True)
class Parts:
    """The parts of a foreign model that a change may refer to, by the names of their modules.

    ``attentions`` are the attention modules of the blocks, in order; ``stem`` is the one projection of patches before
    the first block, None if the model does not have one. ``norm`` is the kind and eps of the norms of the blocks.
    ``post_norm`` are the blocks whose branches are added in front of a norm. ``others`` are the attentions outside the
    blocks, with the reason.
    """

    blocks: tuple[str, ...]
    branches: tuple[Branch, ...]
    attentions: tuple[str, ...]
    stem: str | None
    norm: NormConfig
    post_norm: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()


_KINDS: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp")
EXAMPLE = Parts(
    ("block",),
    tuple(Branch(kind, "block", kind, f"{kind}.proj", 4, 4, f"{kind}.norm") for kind in _KINDS),
    ("attn",),
    "stem",
    NormConfig(),
)
"""of a model with all parts"""


@dataclass(frozen=True)
class Factor:
    """A learned factor for each channel, ``init`` at first."""

    init: float


@dataclass(frozen=True)
class OnBranch:
    """An insertion at a branch of a block."""

    branch: Branch


@dataclass(frozen=True)
class After(OnBranch):
    """A norm or a factor on the output of a branch, before it is added to the stream."""

    module: NormConfig | Factor


@dataclass(frozen=True)
class Before(OnBranch):
    """A norm on what the last projection of a branch reads."""

    module: NormConfig


@dataclass(frozen=True)
class Without(OnBranch):
    """The norm before a branch becomes the identity."""


@dataclass(frozen=True)
class AroundPatches:
    """Norms on the values of each patch before its projection and on the channels of its token after it."""

    stem: str
    before: NormConfig | None
    after: NormConfig | None


@dataclass(frozen=True)
class Heads:
    """A norm over the channels of each head's queries and keys, in each of the attention modules."""

    attentions: tuple[str, ...]
    norm: NormConfig


@dataclass(frozen=True)
class Gate(OnBranch):
    """Gates of what the last projection of an attention branch reads, set by what its queries read: one for each
    channel or for each head."""

    per: Literal["channel", "head"]


@dataclass(frozen=True)
class Swap:
    """Other norms in all blocks, as `vitmods.replace_norms` chooses them for the change."""


@dataclass(frozen=True)
class ExactRMS:
    """RMSNorms for the LayerNorms before the branches, with a stream of zero mean: all outputs stay the same."""


@dataclass(frozen=True)
class GatedMLP(OnBranch):
    """SwiGLU with ``hidden`` channels for the MLP of a branch."""

    hidden: int


@dataclass(frozen=True)
class NewStem:
    """Another stem for the projection of patches, with the same grid and channels."""

    stem: str
    config: StemConfig


@dataclass(frozen=True)
class PromptTokens:
    """``count`` learned tokens behind those that each block reads."""

    blocks: tuple[str, ...]
    count: int


Insertion = (
    After | Before | Without | AroundPatches | Heads | Gate | Swap | ExactRMS | GatedMLP | NewStem | PromptTokens
)
