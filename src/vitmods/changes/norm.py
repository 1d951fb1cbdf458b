"""Another normalizer in every block and at the end."""

from dataclasses import dataclass, replace
from fnmatch import fnmatch

from ..config import BranchConfig, NormConfig, ViTConfig, nearest
from ..errors import UserError
from .base import Change, Weights

_KINDS = ("layer", "rms")
_BRANCH_SLOTS = ("before", "inner", "branch", "after")


@dataclass(frozen=True)
class Norm(Change):
    """Every norm of the blocks and the final norm becomes LayerNorm or RMSNorm (Zhang & Sennrich, 2019).

    RMSNorm is ``gamma * x / sqrt(mean(x^2) + eps)``: no mean is taken off and there is no bias, so the biases of the
    old norms are dropped and outputs differ. eps and the gains are kept. Norms of the stem belong to other changes.
    """

    name = "norm"
    title = "Kind of norm"
    paper = "Zhang & Sennrich: Root Mean Square Layer Normalization. NeurIPS 2019"
    url = "https://arxiv.org/abs/1910.07467"
    summary = "Replaces the LayerNorms of all blocks and the final one by RMSNorm (or back)."
    cost = "width parameters fewer for each norm; no multiply-adds"
    published = "none for ViTs in the five documents; as part of Dual PatchNorm, RMSNorm loses 0.0 to 1.7 (Table 6)"
    short_forms = {"rms": {"kind": "rms"}, "rmsnorm": {"kind": "rms"}, "layernorm": {"kind": "layer"}}  # noqa: RUF012

    kind: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UserError(f"norm(kind=...) cannot be '{self.kind}'. {nearest(self.kind, _KINDS)}")

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"kind of norm"})

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(
            attn=self._edit_branch(config.attn),
            mlp=self._edit_branch(config.mlp),
            final_norm=self._edit_norm(config.final_norm),
        )

    def _edit_branch(self, branch: BranchConfig) -> BranchConfig:
        return replace(branch, **{slot: self._edit_norm(getattr(branch, slot)) for slot in _BRANCH_SLOTS})

    def _edit_norm(self, norm: NormConfig | None) -> NormConfig | None:
        return norm and replace(norm, kind=self.kind)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        if self.kind != "rms":
            return weights
        return {name: value for name, value in weights.items() if not _is_norm_bias(name)}

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return _NORM_BIASES if self.kind == "rms" else ()


_NORM_BIASES = (
    "norm.bias",
    "fc_norm.bias",
    "attn_pool.norm.bias",
    "blocks.*.norm[12]*.bias",
    "blocks.*.attn.norm.bias",
    "blocks.*.mlp.norm.bias",
)


def _is_norm_bias(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _NORM_BIASES)
