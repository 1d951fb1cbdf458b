"""Dual PatchNorm: LayerNorms before and after the patch projection."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from vitmods.changes.base import Change, Preserves, Start
from vitmods.changes.insertions import AroundPatches, Insertion, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig, Slot
from vitmods.util.errors import NeedsReading, UnfitStem, UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

_KINDS: dict[str, dict[str, Any]] = {
    "layer": {"kind": "layer"},
    "rms": {"kind": "rms"},
    "only_learnable": {"kind": "scale_shift"},
    "no_learnable": {"kind": "layer", "affine": False},
}
_PUBLISHED_VALUES = 16 * 16 * 3  # of a patch: the least of Table 1
_WHITENINGS: dict[str, tuple[tuple[str, Any], ...]] = {"whiten": (), "whiten_norm": (("norm", True),)}


@dataclass(frozen=True)
class DualPatchNorm(Change):
    r"""Two norms in the stem, before the positions are added (Dual PatchNorm, section 4.2).

    .. math:: x = \mathrm{LN}_1(W \, \mathrm{LN}_0(p) + b)

    LN0 acts on the values of one patch, LN1 on the channels of its token. Rows of the paper's Table 6:

    - Pre ``after=False``, Post ``before=False``,
      Post PosEmb ``before=False, after=False, after_position=True`` (``class_token`` says whether the class token
      passes through that norm; the paper does not),
    - RMSNorm, Only learnable, No learnable: ``norm="rms"``, ``"only_learnable"``, ``"no_learnable"``.

    - Appendix A: ``before="whiten"`` decorrelates the patches by a fixed matrix, which trials compute from training
      images before the first step and ``model.patch_embed.fit(images)`` computes elsewhere; ``"whiten_norm"`` has LN0
      behind it, as the authors' prototype.

    ``start="gentle"`` fits gains and biases to training images before the first step, so that a trained model keeps the
    outputs of its stem as nearly as it can.

    When the input size changes later, nothing happens to the norms. When the patch size changes, the gain and bias of
    LN0 are resized bilinearly like small images, and the projection by the rule of FlexiViT: a good start, not the
    same function, because the statistics of a patch depend on its pixels.
    """

    name = "dpn"
    title = "Dual PatchNorm"
    paper = "Kumar, Dehghani & Houlsby: Dual PatchNorm. TMLR 2023"
    url = "https://openreview.net/forum?id=jgMqve6Qhw"
    summary = "Normalizes each patch before and after its linear projection; the blocks stay as they are."
    cost = "2 (patch values + width) parameters (S/16: 2,304), no multiply-adds; only the stem is slower"
    published = (
        "ImageNet-1k top-1, 93k steps: Ti/16 72.5 ± 0.07 to 73.9 ± 0.09, S/32 72.1 ± 0.07 to 74.0 ± 0.09, "
        "S/16 78.6 ± 0.32 to 79.7 ± 0.2, B/16 80.4 ± 0.06 to 81.1 ± 0.09 (Table 1)"
    )
    short_forms = {"dual_patchnorm": {}}  # noqa: RUF012

    before: bool | Literal["whiten", "whiten_norm"] = True
    after: bool = True
    after_position: bool = False
    norm: Literal["layer", "rms", "only_learnable", "no_learnable"] = "layer"
    class_token: bool = False
    eps: float = 1e-6
    start: Start = "published"

    def __post_init__(self) -> None:
        if self.norm not in _KINDS:
            raise UserError(f"dpn(norm=...) cannot be '{self.norm}'. {nearest(self.norm, _KINDS)}")
        if not isinstance(self.before, bool) and self.before not in _WHITENINGS:
            hint = nearest(str(self.before), ("true", "false", *_WHITENINGS))
            raise UserError(f"dpn(before=...) cannot be '{self.before}'. {hint}")
        if self.before == "whiten_norm" and self.norm != "layer":
            raise UserError("dpn(before=whiten_norm) already has a LayerNorm: leave norm out, or use before=whiten.")
        if not (self.before or self.after or self.after_position):
            raise UserError("dpn without any norm changes nothing: leave before, after or after_position on.")
        if self.class_token and not self.after_position:
            raise UserError("dpn(class_token=true) needs the norm after the positions: set after_position=true too.")
        if self.start == "gentle" and (
            self.norm == "no_learnable" or self.after_position or isinstance(self.before, str)
        ):
            raise UserError("dpn(start=gentle) fits only learned norms before and after the projection.")

    def describe(self) -> dict[str, str]:
        """Describe the change; the published gain is that of both norms, and of none of the ablations in Table 6."""
        return super().describe() | ({"published": ""} if self.values() else {})

    @property
    def preserves(self) -> Preserves:
        # A learned scale and shift starts as the identity.
        return "function" if self.norm == "only_learnable" and isinstance(self.before, bool) else "weights"

    @property
    def fills(self) -> frozenset[Slot]:
        places = {
            Slot.STEM_BEFORE: self.before,
            Slot.STEM_AFTER: self.after,
            Slot.POSITION_NORM: self.after_position,
        }
        return frozenset(place for place, filled in places.items() if filled)

    def edit(self, config: ViTConfig) -> ViTConfig:
        norm = NormConfig(eps=self.eps, **_KINDS[self.norm])
        before = norm
        if not isinstance(self.before, bool):
            before = NormConfig("whiten", self.eps, options=_WHITENINGS[self.before])
        stem = replace(
            config.stem,
            before=before if self.before else config.stem.before,
            after=norm if self.after else config.stem.after,
        )
        if not self.after_position:
            return config.with_(stem=stem)
        return config.with_(stem=stem, position_norm=norm, position_norm_on_prefix=self.class_token)

    def advice(self, config: ViTConfig) -> str:
        values = math.prod(config.patch_size) * config.in_chans
        if values >= _PUBLISHED_VALUES or self.before in (False, "whiten") or self.norm == "only_learnable":
            return ""
        return (
            f"its paper has patches of {_PUBLISHED_VALUES} values and more, here are {values}. The norm of the pixels "
            "takes away brightness and contrast, which may distinguish the classes: try dpn(before=false) too."
        )

    def fit(self, model: "nn.Module", images: "Iterable[Tensor]") -> bool:
        if self.start == "gentle":
            from vitmods.layers.gentle import fit_norms

            inserted = (module for module in model.modules() if hasattr(module, "norm_after"))
            stem: Any = next(inserted, None) or model.patch_embed  # a stem changed in place, or that of a vitmods ViT
            before = [stem.norm_before] if self.before else []
            after = [getattr(stem, "norm_after", None) or stem.norm] if self.after else []
            fit_norms(model, [*before, *after], images)
        return self.start == "gentle"

    def insertions(self, parts: Parts) -> list[Insertion]:
        if self.after_position or not isinstance(self.before, bool):
            raise NeedsReading(
                f"'{self}' needs a model that vm.apply can read (docs/models.md): norms before and after the "
                "projection, as in dpn, can be put into others."
            )
        if parts.stem is None:
            raise UnfitStem(f"'{self}' needs a stem of one projection of patches, and this model does not have one.")
        norm = NormConfig(eps=self.eps, **_KINDS[self.norm])
        return [AroundPatches(parts.stem, norm if self.before else None, norm if self.after else None)]
