"""Another normalizer in every block and at the end."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Self

from vitmods.changes.base import Change, Preserves, Weights
from vitmods.changes.insertions import ExactRMS, Insertion, Parts, Swap
from vitmods.model import rms_conversion
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, Slot
from vitmods.util.errors import UserError, nearest
from vitmods.util.shorthand import read_settings

if TYPE_CHECKING:
    from torch import nn

    from vitmods.layers.norms import NormKind

_BRANCH_SLOTS = ("before", "inner", "branch", "after")
_MODULES = {
    "attn": {"before": "norm1", "inner": "attn.norm", "branch": "norm1_branch", "after": "norm1_after"},
    "mlp": {"before": "norm2", "inner": "mlp.norm", "branch": "norm2_branch", "after": "norm2_after"},
}


def kinds() -> dict[str, "NormKind"]:
    """The kinds of norm that can take LayerNorm's place in any block, by name."""
    from vitmods.layers.norms import NORMS  # layers import torch, which describing other changes does without

    return {name: kind for name, kind in NORMS.items() if kind.replaces}


class _ShortForms:
    """The short forms that kinds of norm define, read on first use."""

    def __get__(self, change: object, owner: type) -> Mapping[str, Mapping[str, Any]]:
        return {short: {"kind": name} for name, kind in kinds().items() for short in kind.shorts}


@dataclass(frozen=True, init=False)
class Norm(Change):
    """Every norm of the blocks and the final norm becomes another of the kinds in ``vitmods.layers.norms``.

    RMSNorm (Zhang & Sennrich, 2019) is ``gamma * x / sqrt(mean(x^2) + eps)``: no mean is taken off and there is no
    bias. ``rms`` is exact in a pre-norm ViT: what is written to the residual stream is centered over channels, what
    reads a norm takes up its bias (``vitmods.model.rms_conversion``), and the outputs stay equal in evaluation. Only
    norms that read the stream become RMSNorm; those inside the branches, of queries and keys and of map pooling stay,
    and so does the final norm of a model without head. A norm before the blocks (CLIP's) has its output centered.
    Raises UserError where it cannot be exact (post-norm, a stem norm whose gain was trained).

    Elsewhere, and with ``exact=False``, all norms of the blocks are replaced, biases without a place are dropped and
    outputs differ. eps and the gains are kept; ScaleNorm's are multiplied by sqrt(width), its unit. Kinds that mix
    tokens or images leave the final norm as it is: it may read one pooled token. Norms of the stem and dynamic token
    norms belong to other changes.

    ``options`` are those of the kind, also as keywords: ``Norm("power", warmup=100)``. PowerNorm and GroupNorm have the
    attention heads for groups.
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
    short_forms = _ShortForms()
    words = ("norms",)
    fills = frozenset({Slot.NORM_KIND})

    kind: str = ""
    exact: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def __init__(
        self, kind: str = "", exact: bool = True, options: Mapping[str, Any] | tuple[Any, ...] = (), **more: Any
    ) -> None:
        norms = kinds()
        if kind not in norms:
            what = f"norm(kind=...) cannot be '{kind}'." if kind else "norm needs a kind, as in norm(batch)."
            raise UserError(f"{what} {nearest(kind, norms)}")
        chosen = {**dict(options), **more}
        for name in chosen:
            others = [other for other, facts in norms.items() if name in facts.options]
            if name not in norms[kind].options and others:
                raise UserError(f"norm({name}=...) is only for kind={' or '.join(others)}, not {kind}: leave it out.")
        norms[kind].check(True, chosen)
        if not exact and kind != "rms":
            raise UserError(f"norm(kind={kind}) is never exact: leave exact=false out, which is for kind=rms.")
        arguments = norms[kind].arguments
        options = tuple((name, value) for name, value in sorted(chosen.items()) if value != arguments[name].default)
        for field, value in zip(fields(self), (kind, exact, options), strict=True):
            object.__setattr__(self, field.name, value)

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Settings as for every change, and the options of all kinds by name."""
        settings = {"kind": None, "exact": True}
        for kind in kinds().values():
            defaults = {name: kind.arguments[name].default for name in kind.options}
            settings |= {name: None if value is Parameter.empty else value for name, value in defaults.items()}
        return settings

    @classmethod
    def from_settings(cls, inside: str, **values: Any) -> Self:
        norms = kinds()
        if inside.partition(",")[0].strip() in norms:  # norm(batch)
            inside = f"kind={inside}"
        named = re.search(r"\bkind\s*=\s*([\w-]+)", inside)
        first = norms.get(named[1] if named else values.get("kind", ""))
        types = {name: kind for facts in norms.values() for name, kind in facts.options.items()}
        types |= {"kind": str, "exact": bool, **(first.options if first else {})}
        return cls(**values | read_settings(cls.name, "change", inside, types))

    def values(self) -> dict[str, Any]:
        return {"kind": self.kind, **({} if self.exact else {"exact": False}), **dict(self.options)}

    @property
    def about(self) -> "NormKind":
        return kinds()[self.kind]

    def describe(self) -> dict[str, str]:
        """Describe this kind instead of the change in general."""
        kind = self.about
        exact = " No output changes." if self._is_exact else ""
        summary = f"The norms of all blocks become {kind.title}: {kind.how}.{exact}"
        facts = {"title": kind.title, "paper": kind.paper, "url": kind.url, "published": kind.published}
        return {**super().describe(), **facts, "summary": summary}

    @property
    def preserves(self) -> Preserves:
        return "function" if self._is_exact else "weights"

    @property
    def _is_exact(self) -> bool:
        return self.kind == "rms" and self.exact

    @property
    def undoes(self) -> frozenset[Slot]:
        return frozenset({Slot.QKV_BIAS} if self._is_exact else ())  # it takes up the biases of the norms

    def edit(self, config: ViTConfig) -> ViTConfig:
        if self._is_exact:
            return rms_conversion.rms_config(config)
        if config.num_patches + config.num_prefix_tokens < self.about.least_tokens:
            raise UserError(
                f"'{self}' needs the variance over tokens, and this model has one token: take smaller patches."
            )
        final, pool = config.final_norm, config.pool_norm
        if self.about.token_wise:
            final, pool = self.edit_norm(final), self.edit_norm(pool)
        return config.with_slots(self._edit_branch, self._edit_branch).with_(final_norm=final, pool_norm=pool)

    def _edit_branch(self, branch: BranchConfig) -> BranchConfig:
        return replace(branch, **{slot: self.edit_norm(getattr(branch, slot)) for slot in _BRANCH_SLOTS})

    def edit_norm(self, norm: NormConfig | None) -> NormConfig | None:
        """Return the new norm; an empty slot and a norm that belongs to another change stay."""
        if norm is None or not norm.facts.replaces:
            return norm
        affine = norm.affine or "affine" not in self.about.arguments
        return replace(norm, kind=self.kind, affine=affine, options=self.options)

    def carry(self, weights: Weights, old: ViTConfig, new: ViTConfig) -> Weights:
        """Carry what the new norms have a place for; gains that enter or leave ScaleNorm are put into its unit, the
        length sqrt(C) of a token of size 1, and a single gain takes or gives the mean or itself."""
        if self._is_exact:
            return rms_conversion.rms_weights(weights, old)
        carried = dict(weights)
        for module, before, after in _changed(old, new):
            now = dict(_blank(module, after, new).named_parameters())
            for name in _lost(module, before, after, old, new):
                carried.pop(name, None)
            if f"{module}.weight" in weights and "weight" in now:
                dim = _width(module, new)
                gain, factor = weights[f"{module}.weight"], after.facts.unit(dim) / before.facts.unit(dim)
                if gain.shape != now["weight"].shape:
                    gain = gain.mean(0, keepdim=True) if len(now["weight"]) == 1 else gain.expand(dim)
                carried[f"{module}.weight"] = gain if factor == 1 else gain * factor
        return carried

    def insertions(self, parts: Parts) -> list[Insertion]:
        return [ExactRMS() if self._is_exact else Swap()]

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        """List weights that the new norms lack or hold in another unit."""
        if self._is_exact:
            return rms_conversion.absorbed(old)
        return tuple(name for norm in _changed(old, new) for name in _lost(*norm, old, new))


def _lost(module: str, before: NormConfig, after: NormConfig, old: ViTConfig, new: ViTConfig) -> list[str]:
    """Weights of a norm that another cannot take as they are, and its running statistics."""
    was, dim = _blank(module, before, old), _width(module, new)
    now = {name: parameter.shape for name, parameter in _blank(module, after, new).named_parameters()}
    kept = {name for name, parameter in was.named_parameters() if now.get(name) == parameter.shape}
    if before.facts.unit(dim) != after.facts.unit(dim):
        kept.discard("weight")
    return [f"{module}.{name}" for name in was.state_dict() if name not in kept]


def _blank(module: str, norm: NormConfig, config: ViTConfig) -> "nn.Module":
    """Return the norm of that name on the meta device, without numbers."""
    import torch

    from vitmods.model.build import make_norm

    model = {"num_heads": config.num_heads, "grid_size": config.grid, "prefix_tokens": config.num_prefix_tokens}
    with torch.device("meta"):
        return make_norm(norm, _width(module, config), **model)


def _changed(old: ViTConfig, new: ViTConfig) -> Iterator[tuple[str, NormConfig, NormConfig]]:
    """(module, its old config, its new config) of every norm whose config is another."""
    pairs = []
    for i in range(new.depth):
        for names, before, after in zip(_MODULES.values(), old.branches(i), new.branches(i), strict=True):
            slots = [(name, getattr(before, slot), getattr(after, slot)) for slot, name in names.items()]
            pairs += [(f"blocks.{i}.{name}", a, b) for name, a, b in slots]
    pairs += [(name, old.final_norm, new.final_norm) for name in ("norm", "fc_norm")]
    pairs.append(("attn_pool.norm", old.pool_norm or old.final_norm, new.pool_norm or new.final_norm))
    return ((name, a, b) for name, a, b in pairs if a is not None and b is not None and a != b)


def _width(module: str, config: ViTConfig) -> int:
    return config.mlp_dim if module.endswith("mlp.norm") else config.embed_dim
