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
    """Every LayerNorm or RMSNorm of the blocks and at the end becomes the other (Zhang & Sennrich, 2019).

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
        edited = config.with_slots(self._edit_branch, self._edit_branch)
        return edited.with_(final_norm=self._edit_norm(config.final_norm))

    def _edit_branch(self, branch: BranchConfig) -> BranchConfig:
        return replace(branch, **{slot: self._edit_norm(getattr(branch, slot)) for slot in _BRANCH_SLOTS})

    def _edit_norm(self, norm: NormConfig | None) -> NormConfig | None:
        return replace(norm, kind=self.kind) if norm and norm.kind in _KINDS else norm

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        if self.kind != "rms":
            return weights
        gone = self.drops(old, new)
        return {name: value for name, value in weights.items() if not any(fnmatch(name, p) for p in gone)}

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        if self.kind != "rms":
            return ()
        slots = [_biases(i, branch, n) for i in range(new.depth) for n, branch in enumerate(new.branches(i))]
        return "norm.bias", "fc_norm.bias", "attn_pool.norm.bias", *(name for names in slots for name in names)


_PLACES = {"before": "norm{n}", "branch": "norm{n}_branch", "after": "norm{n}_after", "inner": "{branch}.norm"}


def _biases(block: int, slots: BranchConfig, branch: int) -> list[str]:
    """Names of the biases of a branch's norms that are RMSNorms now."""
    found = [place for slot, place in _PLACES.items() if (norm := getattr(slots, slot)) and norm.kind == "rms"]
    return [f"blocks.{block}.{p.format(n=branch + 1, branch=('attn', 'mlp')[branch])}.bias" for p in found]
