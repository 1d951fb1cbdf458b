"""Another normalizer in every block and at the end."""

from dataclasses import dataclass, replace
from fnmatch import fnmatch

from .. import centre
from ..config import BranchConfig, NormConfig, ViTConfig, nearest
from ..errors import UserError
from .base import Change, Preserves, Weights

_KINDS = ("layer", "rms")
_BRANCH_SLOTS = ("before", "inner", "branch", "after")


@dataclass(frozen=True)
class Norm(Change):
    """Every norm of the blocks and the final norm becomes LayerNorm or RMSNorm (Zhang & Sennrich, 2019).

    RMSNorm is ``gamma * x / sqrt(mean(x^2) + eps)``: no mean is taken off and there is no bias. eps and the gains are
    kept. Norms of the stem belong to other changes.

    ``rms`` is exact in a pre-norm ViT: what is written to the residual stream is centred over channels, what reads a
    norm takes up its bias (``vitmods.centre`` has the algebra), and the outputs stay equal in evaluation. Only norms
    that read the stream become RMSNorm; those inside the branches, of queries and keys and of map pooling stay.
    Raises UserError where it cannot be so (post-norm, a stem norm whose gain was trained, a final norm without head).
    With ``exact=False`` all norms of the blocks are replaced, the old biases are dropped and the outputs differ.
    """

    name = "norm"
    title = "Kind of norm"
    paper = "Zhang & Sennrich: Root Mean Square Layer Normalization. NeurIPS 2019"
    url = "https://arxiv.org/abs/1910.07467"
    summary = "Replaces the LayerNorms of all blocks and the final one by RMSNorm, exactly where that can be (or back)."
    cost = "width parameters fewer for each norm; no multiply-adds"
    published = "none for ViTs in the five documents; as part of Dual PatchNorm, RMSNorm loses 0.0 to 1.7 (Table 6)"
    short_forms = {"rms": {"kind": "rms"}, "rmsnorm": {"kind": "rms"}, "layernorm": {"kind": "layer"}}  # noqa: RUF012

    kind: str = ""
    exact: bool = True

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UserError(f"norm(kind=...) cannot be '{self.kind}'. {nearest(self.kind, _KINDS)}")
        if not self.exact and self.kind != "rms":
            raise UserError(f"norm(kind={self.kind}) is never exact: leave exact=false out, it concerns kind=rms.")

    @property
    def preserves(self) -> Preserves:
        return "function" if self._is_exact else "weights"

    @property
    def _is_exact(self) -> bool:
        return self.kind == "rms" and self.exact

    @property
    def fills(self) -> frozenset[str]:
        return frozenset({"kind of norm"})

    def edit(self, config: ViTConfig) -> ViTConfig:
        if self._is_exact:
            return centre.rms_config(config)
        return config.with_(
            attn=self._edit_branch(config.attn),
            mlp=self._edit_branch(config.mlp),
            final_norm=self._edit_norm(config.final_norm),
            pool_norm=self._edit_norm(config.pool_norm),
        )

    def _edit_branch(self, branch: BranchConfig) -> BranchConfig:
        return replace(branch, **{slot: self._edit_norm(getattr(branch, slot)) for slot in _BRANCH_SLOTS})

    def _edit_norm(self, norm: NormConfig | None) -> NormConfig | None:
        return norm and replace(norm, kind=self.kind)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        if self.kind != "rms":
            return weights
        if self.exact:
            return centre.rms_weights(weights, old)
        return {name: value for name, value in weights.items() if not _is_norm_bias(name)}

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        if self._is_exact:
            return centre.ABSORBED
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
