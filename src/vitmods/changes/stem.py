"""Other stems: hierarchical MLP, LeViT's convolutions, a transformer in each patch, the linear one with BN or GELU."""

from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Literal

from vitmods.changes.base import Change
from vitmods.changes.insertions import Insertion, NewStem, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig, Slot
from vitmods.util.errors import UnfitStem, UserError, nearest

if TYPE_CHECKING:
    from vitmods import layers

_NORMS = {"batch": ("batch", 1e-5), "layer": ("layer", 1e-6), "none": None}
_INNER_NORMS = range(1, 30, 3)  # their places among the layers of hmlp and levit


def kinds() -> "dict[str, type[layers.Stem]]":
    """The stems that fit a patch of any side that they can be built for, by name."""
    from vitmods.layers.stems import STEMS  # layers import torch, which describing other changes does without

    return {name: stem for name, stem in STEMS.items() if stem.published_norm is not None}


@dataclass(frozen=True)
class Stem(Change):
    """Another map from images to patch tokens: the rows of Three Things' Table 7.

    ``hmlp`` is the paper's own (section 5): linear maps that join 2 x 2 neighbors from 4 x 4 pixels up to the patch,
    each with a norm and, except the last, a GELU; tokens depend only on their own patch, so that it commutes with
    masking. ``levit`` convolves with overlap, ``local`` runs a transformer inside each patch, ``linear`` is the usual
    one. ``norm`` is ``batch``, ``layer`` or ``none``, in every layer of hmlp and levit and after the projection of the
    others; left out, as published (batch for hmlp and levit, none else). ``gelu`` adds a GELU at the end of ``linear``.

    The stem is new and trains from its start; all other weights are kept. Raises UserError where the patch does not
    fit the stem.
    """

    name = "stem"
    title = "Stem"
    paper = "Touvron et al.: Three things everyone should know about Vision Transformers. ECCV 2022"
    url = "https://arxiv.org/abs/2203.09795"
    summary = "Replaces the linear patch projection by a stem of several layers inside each patch (hMLP), or another."
    cost = "multiply-adds of B/16: hmlp +0.8 %, levit +8.4 %, local +8.6 %; parameters: +0.2 %, +3.3 %, +0.6 %"
    published = (
        "ImageNet-1k top-1, ViT-B (82.20 ± 0.06): hmlp 82.54 ± 0.09, hmlp with LayerNorm 82.50 ± 0.07, levit 82.57, "
        "local 82.26, linear with BatchNorm 82.31; after BeiT pre-training (83.05 ± 0.08): hmlp 83.43 ± 0.10, levit "
        "83.04, local 82.38 (Table 7)"
    )
    short_forms = {  # noqa: RUF012
        "hmlp": {"kind": "hmlp"},
        "hmlp-ln": {"kind": "hmlp", "norm": "layer"},
        "levit": {"kind": "levit"},
        "local": {"kind": "local"},
    }
    fills = frozenset({Slot.STEM, Slot.STEM_BEFORE, Slot.STEM_AFTER})

    kind: str = ""
    norm: Literal["batch", "layer", "none"] | None = None
    gelu: bool = False

    def __post_init__(self) -> None:
        known_kinds = kinds()
        if self.kind not in known_kinds:
            raise UserError(f"stem(kind=...) cannot be '{self.kind}'. {nearest(self.kind, known_kinds)}")
        if self.norm is not None and self.norm not in _NORMS:
            raise UserError(f"stem(norm=...) cannot be '{self.norm}'. {nearest(self.norm, _NORMS)}")
        if self.gelu and self.kind != "linear":
            raise UserError("stem(gelu=true) is for kind=linear; hmlp and levit have theirs between the layers.")

    def describe(self) -> dict[str, str]:
        """Describe this kind instead of the change in general; published numbers and costs are of the table's kinds."""
        from vitmods.layers.stems import STEMS

        kind = kinds()[self.kind]
        facts = {"title": f"Stem: {kind.title}", "paper": kind.paper, "url": kind.url}
        if STEMS.is_from_outside(self.kind):
            facts |= {"summary": f"Replaces the linear patch projection: {kind.title}.", "published": "", "cost": ""}
        return super().describe() | facts

    def edit(self, config: ViTConfig) -> ViTConfig:
        kind = kinds()[self.kind]
        chosen = _NORMS[self.norm or str(kind.published_norm)]
        norm = NormConfig(*chosen) if chosen else None
        bias = config.stem.bias if self.kind == config.stem.kind else signature(kind).parameters["bias"].default
        inner = norm if kind.inner else None
        stem = replace(config.stem, bias=bias, before=None, after=norm, kind=self.kind, inner=inner, gelu=self.gelu)
        return config.with_(stem=stem)

    def insertions(self, parts: Parts) -> list[Insertion]:
        if parts.stem is None:
            raise UnfitStem(f"'{self}' needs a stem of one projection of patches, and this model does not have one.")
        return [NewStem(parts.stem, self.edit(ViTConfig()).stem)]

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        if old.stem.kind != new.stem.kind:
            return ("patch_embed.*",)
        gone = ["norm_before"] if old.stem.before else []
        gone += ["norm"] if old.stem.after != new.stem.after else []
        gone += [f"layers.{i}" for i in _INNER_NORMS] if old.stem.inner != new.stem.inner else []
        return tuple(f"patch_embed.{name}.*" for name in gone)
