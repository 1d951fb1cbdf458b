"""Another normalizer in every block and at the end."""

from dataclasses import dataclass, replace
from typing import Literal

from ..config import BranchConfig, NormConfig, ViTConfig, nearest
from ..errors import UserError
from .base import Change, Weights
from .norm_weights import carry_norms, dropped_by_norms

_KINDS = ("layer", "rms", "scale", "batch", "instance", "group", "power", "switchable")
_MIXING = ("batch", "instance", "group", "power", "switchable")  # a token's output depends on others
_BRANCH_SLOTS = ("before", "inner", "branch", "after")


@dataclass(frozen=True)
class Norm(Change):
    """Every norm of the blocks and the final norm becomes another: the kinds that Dynamic Token Normalization compares.

    RMSNorm (Zhang & Sennrich, 2019) is ``gamma * x / sqrt(mean(x^2) + eps)``: no mean is taken off and there is no
    bias, so the biases of the old norms are dropped and outputs differ. eps and the gains are kept; ScaleNorm's are
    multiplied by sqrt(width), its unit. Kinds that mix tokens or pictures leave the final norm as it is: it may read
    one pooled token. Norms of the stem belong to other changes.

    ``warmup`` is PowerNorm's, in training batches; ``batch`` False takes SwitchableNorm's batch branch away; ``gain``
    is ScaleNorm's. PowerNorm and GroupNorm have the attention heads for groups.
    """

    name = "norm"
    title = "Kind of norm"
    paper = "Zhang & Sennrich: Root Mean Square Layer Normalization. NeurIPS 2019"
    url = "https://arxiv.org/abs/1910.07467"
    summary = "Replaces the LayerNorms of all blocks, and the final one where it can, by another normalizer (or back)."
    cost = "rms and scale have width parameters fewer for each norm, switchable has 6 more; no multiply-adds"
    published = (
        "Dynamic Token Normalization, Table 3, ViT-S on ImageNet, LayerNorm 79.9: batch -2.6, instance -2.2, "
        "group -1.6, switchable +0.2, scale +0.1, power -0.1; rms: none for ViTs, as part of Dual PatchNorm it loses "
        "0.0 to 1.7 (Table 6)"
    )
    short_forms = {  # noqa: RUF012
        "rms": {"kind": "rms"},
        "rmsnorm": {"kind": "rms"},
        "layernorm": {"kind": "layer"},
        "scalenorm": {"kind": "scale"},
        "batchnorm": {"kind": "batch"},
        "instancenorm": {"kind": "instance"},
        "groupnorm": {"kind": "group"},
        "powernorm": {"kind": "power"},
        "switchnorm": {"kind": "switchable"},
    }

    kind: str = ""
    warmup: int = 3000
    batch: bool = True
    gain: Literal["channel", "scalar"] = "channel"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UserError(f"norm(kind=...) cannot be '{self.kind}'. {nearest(self.kind, _KINDS)}")
        if self.gain not in ("channel", "scalar"):
            raise UserError(f"norm(gain=...) is channel or scalar, got '{self.gain}'.")
        if self.warmup < 0:
            raise UserError(f"norm(warmup=...) is a number of training batches, got {self.warmup}.")
        for name, kind, default in (
            ("warmup", "power", 3000),
            ("batch", "switchable", True),
            ("gain", "scale", "channel"),
        ):
            if self.kind != kind and getattr(self, name) != default:
                raise UserError(
                    f"norm({name}=...) belongs to kind={kind}, and the kind here is {self.kind}: leave it out."
                )

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"kind of norm"})

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(
            attn=self._edit_branch(config.attn),
            mlp=self._edit_branch(config.mlp),
            final_norm=config.final_norm if self.kind in _MIXING else self._edit_norm(config.final_norm),
        )

    def _edit_branch(self, branch: BranchConfig) -> BranchConfig:
        return replace(branch, **{slot: self._edit_norm(getattr(branch, slot)) for slot in _BRANCH_SLOTS})

    def _edit_norm(self, norm: NormConfig | None) -> NormConfig | None:
        return norm and replace(norm, kind=self.kind, options=self._options())

    def _options(self) -> tuple[tuple[str, object], ...]:
        field = {"power": "warmup", "switchable": "batch", "scale": "gain"}.get(self.kind)
        return ((field, getattr(self, field)),) if field else ()

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        return carry_norms(weights, old, new)

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return dropped_by_norms(old, new)
