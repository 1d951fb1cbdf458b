"""LayerScale: a learned factor for each channel of each branch's output."""

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from vitmods.changes.base import Change, Preserves, Weights
from vitmods.changes.insertions import After, Factor, Insertion, Parts
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

_GAMMAS = "blocks.*.ls?.gamma"
_FACTORS = r"LayerScale|^Scale$", r"gamma_?\d*|lambda_?\d*|ls\d"
"""classes of modules, and names of parameters, that are LayerScale in the libraries"""


@dataclass(frozen=True)
class LayerScale(Change):
    """``x + gamma * F(LN(x))`` with a vector gamma for each branch, started at ``init`` (Touvron et al., 2021, CaiT).

    Started at 1 the function is unchanged; the published small starts (1e-4 in Three Things, 1e-5 in deep CaiT) give
    a model that is nearly the identity at first. A model with LayerScale starts at ``init`` instead of its value,
    unless its factors were trained.
    """

    name = "layerscale"
    title = "LayerScale"
    paper = "Touvron et al.: Going deeper with Image Transformers. ICCV 2021"
    url = "https://arxiv.org/abs/2103.17239"
    summary = "Multiplies the output of each branch by a learned vector that starts small."
    cost = "2 width parameters a block; no multiply-adds"
    published = (
        "ImageNet-1k, with 400 instead of 300 epochs: ViT-S 79.7 to 80.7, ViT-B 82.2 to 82.7 (Three Things, Table 1)"
    )
    fills = frozenset({Slot.LAYER_SCALE})

    init: float = 1e-4

    def __post_init__(self) -> None:
        if not math.isfinite(self.init):
            raise UserError(f"layerscale(init=...) is a number, got {self.init}.")
        if self.init == 0:
            raise UserError(
                "layerscale(init=0) would cut every branch off from its gradient: use a small number as 1e-4."
            )

    @property
    def preserves(self) -> Preserves:
        return "function" if self.init == 1 else "weights"

    def edit(self, config: ViTConfig) -> ViTConfig:
        if self.init == 1 and config.layer_scale not in (None, 1):
            raise UserError(
                "layerscale(init=1) keeps the function of a model without LayerScale, and this one has it, from "
                f"{config.layer_scale:g} on: give another start, as layerscale(init=0.1)."
            )
        return config.with_(layer_scale=self.init)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        for name, gamma in weights.items():
            if fnmatch(name, _GAMMAS):
                _check_untrained(name, gamma)
        return weights

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return () if old.layer_scale is None else (_GAMMAS,)

    def check_start(self, model: "nn.Module") -> None:
        for place, module in model.named_modules() if self.init != 1 else ():
            kind = type(module).__name__
            for name, factor in () if "Norm" in kind else module.named_parameters(recurse=False):
                if re.search(_FACTORS[0], kind) or re.fullmatch(_FACTORS[1], name):
                    _check_untrained(f"{place}.{name}".removeprefix("."), factor)

    def insertions(self, parts: Parts) -> list[Insertion]:
        """Put a factor on every branch; it multiplies a factor that the model already has and that was not trained."""
        return [After(branch, Factor(self.init)) for branch in parts.branches]


def _check_untrained(name: str, factor: "torch.Tensor") -> None:
    if not factor.is_meta and bool((factor != factor.flatten()[0]).any()):
        raise UserError(
            f"The LayerScale of this model was trained ({name} differs from channel to channel), and no start is of "
            "use to it: leave layerscale out, or train from new weights."
        )
