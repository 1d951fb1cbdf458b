"""Another normalizer in every block and at the end."""

from dataclasses import dataclass, replace
from typing import Literal

from vitmods.changes.base import Change, Preserves, Weights
from vitmods.changes.norm_kinds import KINDS
from vitmods.changes.norm_weights import carry_norms, dropped_by_norms
from vitmods.model import rms_conversion as rms_conversion
from vitmods.model.config import BranchConfig, NormConfig, ViTConfig
from vitmods.util.errors import UserError, nearest

_MIXING = ("batch", "instance", "group", "power", "switchable")  # a token's output depends on others
_BRANCH_SLOTS = ("before", "inner", "branch", "after")


@dataclass(frozen=True)
class Norm(Change):
    """Every norm of the blocks and the final norm becomes another: the kinds that Dynamic Token Normalization compares.

    RMSNorm (Zhang & Sennrich, 2019) is ``gamma * x / sqrt(mean(x^2) + eps)``: no mean is taken off and there is no
    bias. ``rms`` is exact in a pre-norm ViT: what is written to the residual stream is centered over channels, what
    reads a norm takes up its bias (``vitmods.model.rms_conversion``), and the outputs stay equal in evaluation. Only
    norms that read the stream become RMSNorm; those inside the branches, of queries and keys and of map pooling stay.
    Raises UserError where it cannot be so (post-norm, a stem norm whose gain was trained, a final norm without head).

    Elsewhere, and with ``exact=False``, all norms of the blocks are replaced, biases without a place are dropped and
    outputs differ. eps and the gains are kept; ScaleNorm's are multiplied by sqrt(width), its unit. Kinds that mix
    tokens or images leave the final norm as it is: it may read one pooled token. Norms of the stem and dynamic token
    norms belong to other changes.

    ``warmup`` is PowerNorm's, in training batches; ``batch`` False takes SwitchableNorm's batch branch away; ``gain``
    is ScaleNorm's. PowerNorm and GroupNorm have the attention heads for groups.
    """

    name = "norm"
    title = "Kind of norm"
    paper = "Zhang & Sennrich: Root Mean Square Layer Normalization. NeurIPS 2019"
    url = "https://arxiv.org/abs/1910.07467"
    summary = "Replaces the LayerNorms of all blocks and the final one by another normalizer; RMSNorm exactly."
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
    exact: bool = True
    warmup: int = 3000
    batch: bool = True
    gain: Literal["channel", "scalar"] = "channel"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"norm(kind=...) cannot be '{self.kind}'. {nearest(self.kind, KINDS)}")
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
        if not self.exact and self.kind != "rms":
            raise UserError(f"norm(kind={self.kind}) is never exact: leave exact=false out, it concerns kind=rms.")

    def describe(self) -> dict[str, str]:
        """As of every change, but about this kind."""
        kind = KINDS[self.kind]
        exact = " No output changes." if self._is_exact else ""
        summary = f"The norms of all blocks become {kind.title}: {kind.how}.{exact}"
        about = {"title": kind.title, "paper": kind.paper, "url": kind.url, "published": kind.published}
        return {**super().describe(), **about, "summary": summary}

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
            return rms_conversion.rms_config(config)
        if self.kind in ("instance", "switchable") and config.num_patches + config.num_prefix_tokens < 2:
            raise UserError(
                f"'{self}' needs the variance over tokens, and this model has one token: take smaller patches."
            )
        final, pool = config.final_norm, config.pool_norm
        if self.kind not in _MIXING:
            final, pool = self.edit_norm(final), self.edit_norm(pool)
        return config.with_slots(self._edit_branch, self._edit_branch).with_(final_norm=final, pool_norm=pool)

    def _edit_branch(self, branch: BranchConfig) -> BranchConfig:
        return replace(branch, **{slot: self.edit_norm(getattr(branch, slot)) for slot in _BRANCH_SLOTS})

    def edit_norm(self, norm: NormConfig | None) -> NormConfig | None:
        """What a norm becomes; an empty slot and a dynamic token norm stay."""
        if norm is None or norm.kind == "dynamic_token":
            return norm
        return replace(norm, kind=self.kind, options=self._options())

    def _options(self) -> tuple[tuple[str, object], ...]:
        field = {"power": "warmup", "switchable": "batch", "scale": "gain"}.get(self.kind)
        return ((field, getattr(self, field)),) if field else ()

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        if self._is_exact:
            return rms_conversion.rms_weights(weights, old)
        return carry_norms(weights, old, new)

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return rms_conversion.ABSORBED if self._is_exact else dropped_by_norms(old, new)
