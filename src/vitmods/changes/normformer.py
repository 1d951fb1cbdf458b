"""NormFormer: a norm on the attention branch's output and one inside the MLP."""

from dataclasses import dataclass, replace

from vitmods.changes.base import Change
from vitmods.changes.insertions import After, Before, Insertion, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig, Slot
from vitmods.util.errors import NeedsReading


@dataclass(frozen=True)
class NormFormer(Change):
    """``x + LN(Attn(LN(x)))`` and ``x + fc2(LN(gelu(fc1(LN(x)))))`` (Shleifer et al., 2021).

    ``head_scale`` adds the paper's learned factor for each head, before the output projection; ``residual_scale`` a
    learned vector r on the stream to which the MLP's output is added, ``r x + fc2(...)``, 1 at first: an option of the
    released code. The variant that Dual PatchNorm compares with has only the two norms, which is the default.
    """

    name = "normformer"
    title = "NormFormer"
    paper = "Shleifer, Weston & Ott: NormFormer: Improved Transformer Pretraining with Extra Normalization. 2021"
    url = "https://arxiv.org/abs/2110.09456"
    summary = "Adds a norm after the attention's output projection and one after the activation of the MLP."
    cost = "2 (width + width of the MLP) parameters a block; no multiply-adds"
    published = "ImageNet-1k: some gain for patch 32, none elsewhere (Dual PatchNorm, Figure 1)"

    head_scale: bool = False
    residual_scale: bool = False
    eps: float = 1e-5

    @property
    def fills(self) -> frozenset[Slot]:
        slots = {Slot.ATTN_BRANCH, Slot.MLP_INNER}
        scales = {Slot.HEAD_SCALE: self.head_scale, Slot.RESIDUAL_SCALE: self.residual_scale}
        return frozenset(slots | {slot for slot, chosen in scales.items() if chosen})

    def edit(self, config: ViTConfig) -> ViTConfig:
        norm = NormConfig("layer", self.eps)
        config = config.with_slots(lambda attn: replace(attn, branch=norm), lambda mlp: replace(mlp, inner=norm))
        return config.with_(
            head_scale=self.head_scale or config.head_scale,
            residual_scale=self.residual_scale or config.residual_scale,
        )

    def insertions(self, parts: Parts) -> list[Insertion]:
        if self.head_scale or self.residual_scale:
            raise NeedsReading(
                f"'{self}' scales heads or the stream, for which it needs a model that vm.apply can read "
                "(docs/models.md): write normformer for only the two norms."
            )
        norm = NormConfig("layer", self.eps)
        return [(After if branch.kind == "attn" else Before)(branch, norm) for branch in parts.branches]
