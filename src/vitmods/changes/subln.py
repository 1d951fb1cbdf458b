"""Sub-LN: a norm before the last linear map of each branch, with an initialization that grows with depth."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vitmods.changes.base import Change, Preserves, Weights
from vitmods.changes.insertions import Before, Insertion, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig, Slot
from vitmods.util.errors import NeedsReading

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SubLN(Change):
    """``x + proj(LN(heads(LN(x))))`` and ``x + fc2(LN(gelu(fc1(LN(x)))))`` (Wang et al., 2022, Magneto).

    With ``rescale`` the weights and biases of the value projection, the output projection, fc1 and fc2 are multiplied
    by sqrt(ln(2 depth)), the paper's initialization for an encoder. Set it to False on a model that is trained
    already: then every weight is carried as it is.
    """

    name = "subln"
    title = "Sub-LN"
    paper = "Wang et al.: Foundation Transformers. 2022"
    url = "https://arxiv.org/abs/2210.06423"
    summary = "Adds a norm before the output projection of attention and before the second layer of the MLP."
    cost = "2 (width + width of the MLP) parameters a block; no multiply-adds"
    published = "ImageNet-1k: no gain over pre-norm in five ViTs (Dual PatchNorm, Figure 1)"
    fills = frozenset({Slot.ATTN_INNER, Slot.MLP_INNER})

    rescale: bool = True
    eps: float = 1e-5

    @property
    def preserves(self) -> Preserves:
        return "nothing" if self.rescale else "weights"

    @property
    def adds_norms(self) -> bool:
        return not self.rescale

    def edit(self, config: ViTConfig) -> ViTConfig:
        norm = NormConfig("layer", self.eps)
        return config.with_slots(lambda attn: replace(attn, inner=norm), lambda mlp: replace(mlp, inner=norm))

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        if not self.rescale:
            return weights
        gain = math.sqrt(math.log(2 * new.depth))
        return {name: _scaled(name, value, gain) for name, value in weights.items()}

    def insertions(self, parts: Parts) -> list[Insertion]:
        if self.rescale:
            raise NeedsReading(
                f"'{self}' multiplies weights, for which it needs a model that vm.apply can read "
                "(docs/models.md): write subln(rescale=false) for only the norms."
            )
        return [Before(branch, NormConfig("layer", self.eps)) for branch in parts.branches]


def _scaled(name: str, value: "Tensor", gain: float) -> "Tensor":
    if not name.startswith("blocks."):
        return value
    if ".mlp.fc" in name or ".attn.proj." in name:
        return value * gain
    if ".attn.qkv." in name:
        value = value.clone()
        value[2 * len(value) // 3 :] *= gain  # rows of query, key and value in turn
    return value
