"""Which norms of a foreign model become others, and why the rest stay."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from vitmods.adapters.anatomy import Anatomy, NormSite
from vitmods.adapters.running import check_not_wrapped
from vitmods.changes import Change
from vitmods.changes.dynamic_token_norm import DynamicTokenNorm
from vitmods.changes.norm import Norm
from vitmods.layers.norms import LayerNorm, RMSNorm
from vitmods.model.slots import NormConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import NoEffect, NotCertified, NotRecognized, UserError

Heads = int | Callable[[NormSite], int]
Where = str | re.Pattern[str] | Callable[[NormSite], bool]

_KEPT = {
    "inside": "inside attention",
    "embed": "of the embedding",
    "merge": "between stages",
    "final": "after the blocks",
    "block": "not of a branch",
}


class NormRow(NamedTuple):
    """The result for one norm: ``now`` is its new class, empty where it stayed. ``why`` is the reason to stay, or
    what is lost of the old norm."""

    site: NormSite
    now: str
    why: str

    def cells(self) -> tuple[str, str, str, str]:
        pattern = ".".join("*" if part.isdigit() else part for part in self.site.name.split("."))
        now = ", ".join(filter(None, (self.now, self.why))) if self.now else f"stays: {self.why}"
        return pattern, self.site.role, f"{self.site.kind}({self.site.dim})", now


def table(rows: tuple[NormRow, ...]) -> str:
    """The same norm in every block becomes one line."""
    lines = Counter(row.cells() for row in rows)
    cells = [("norm", "role", "was", "now"), *lines]
    counts = ["", *(f"  ({n}x)" if n > 1 else "" for n in lines.values())]
    widths = [*(max(len(line[i]) for line in cells) for i in range(3)), 0]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + count
        for line, count in zip(cells, counts, strict=True)
    )


class NormPlan:
    """``change`` and ``where`` of ``replace_norms``, asked about one norm after the other."""

    def __init__(self, anatomy: Anatomy, change: Norm | DynamicTokenNorm, where: Where | None) -> None:
        self.anatomy, self.change, self.where = anatomy, change, where
        if isinstance(change, DynamicTokenNorm) and len(change.pools) not in (1, anatomy.stages):
            raise UserError(
                f"dtn(pool=...) has {len(change.pools)} sides, and the model {anatomy.stages} stages: give one for "
                "each, or one number for all."
            )
        edited = change.edit_norm(NormConfig())
        assert edited is not None
        facts = edited.facts
        self.new, self.token_wise, self.by_heads = facts.module, facts.token_wise, "num_heads" in facts.takes
        self.biased = facts.biased

    def row(self, site: NormSite) -> NormRow:
        """Raises UserError for a norm that is chosen and cannot be replaced."""
        why = self._kept(site)
        if why:
            return NormRow(site, "", why)
        self._check(site)
        now = f"{self.new.__name__}(heads={site.heads})" if self.by_heads else self.new.__name__
        return NormRow(site, now, self._lost(self.anatomy.modules[site.name]))

    def _lost(self, old: nn.Module) -> str:
        notes = []
        if isinstance(getattr(old, "bias", None), nn.Parameter) and not self.biased:
            notes.append("bias dropped")
        if isinstance(getattr(old, "running_mean", None), torch.Tensor):
            notes.append("running statistics dropped")
        return ", ".join([*notes, "frozen"] if is_frozen(old) else notes)

    def _kept(self, site: NormSite) -> str:
        """Why a norm stays as it is; empty if it is replaced."""
        old = self.anatomy.modules[site.name]
        if "2d" in site.kind or len(getattr(old, "normalized_shape", ())) > 1:
            return "not over the channels of tokens"
        kind = LayerNorm if isinstance(old, nn.LayerNorm) else RMSNorm if site.name in self.anatomy.rms else None
        if self.new is kind:
            return "is so already"
        if self.where is not None:
            return "" if _matches(self.where, site) else "not chosen by where"
        if isinstance(self.change, DynamicTokenNorm):
            return self._kept_by_paper(site, self.change)
        if site.role in ("attn", "mlp", "block") or (site.role == "final" and self.token_wise):
            return ""
        return _KEPT[site.role]

    def _kept_by_paper(self, site: NormSite, change: DynamicTokenNorm) -> str:
        if site.role not in ("attn", "mlp"):
            return _KEPT[site.role]
        if site.role == "mlp" and change.norms == "attn":
            return "norms='attn'"
        if change.blocks is None and site.stage == self.anatomy.class_token_stage:
            return "the class token's stage"
        blocks = change.blocks or self._published_blocks()
        assert site.block is not None
        return "" if site.block < blocks else f"after the first {blocks} blocks"

    def _published_blocks(self) -> int:
        blocks = self.anatomy.blocks
        return max(1, len(blocks) * 10 // 12) if self.anatomy.stages == 1 and blocks[0].stem else len(blocks)

    def _check(self, site: NormSite) -> None:
        if self.by_heads and site.heads is None:
            raise NotRecognized(
                f"{site.name} is not next to attention, which would have a number of heads: give heads=..."
            )
        if self.by_heads and site.heads is not None and (site.heads < 1 or site.dim % site.heads):
            raise UserError(
                f"{site.name} has {site.dim} channels, which {site.heads} heads do not divide: give heads=... that "
                "do, or leave it out with where=..."
            )
        if not self.token_wise:
            self._check_mixing(site)

    def _check_mixing(self, site: NormSite) -> None:
        """Raises UserError where a norm that mixes tokens would see later ones, parts of a sequence, or images."""
        if site.block is None:
            if self.where is not None:
                return
            raise NotCertified(
                f"{self.new.__name__} mixes tokens, and {site.name} is in no block whose attention is recognized, so "
                "that it may be causal: a token would see later ones. Use a norm of single tokens, or name the norms "
                "with where=... if all tokens may see each other."
            )
        block, modules = self.anatomy.blocks[site.block], self.anatomy.modules
        around = [m for n, m in modules.items() if n.startswith(block.name) and f"{site.name}.".startswith(f"{n}.")]
        near = [*around, modules[block.name], modules[block.attention]]
        what = f"{self.new.__name__} mixes tokens, and {block.name}"
        if any(getattr(m, name, False) is True for m in near for name in ("is_causal", "is_decoder")):
            raise NotCertified(f"{what} is causal: a token would see later ones. Use a norm of single tokens.")
        decoder = nn.TransformerDecoderLayer | nn.TransformerDecoder
        if self.where is None and any(isinstance(m, decoder) for m in near):
            raise NotCertified(
                f"{what} is a decoder's, which may be called with a causal mask: a token would see later ones. Use a "
                "norm of single tokens, or name the norms with where=... if it never is."
            )
        if site.role == "mlp" and any(getattr(m, "chunk_size_feed_forward", 0) for m in near):
            raise NotCertified(
                f"{what} cuts the sequence into chunks: set chunk_size_feed_forward=0 in the model's config."
            )
        if any(getattr(m, "batch_first", True) is False for m in near):
            raise NotCertified(f"{what} has tokens on the first axis: build the model with batch_first=True.")


def is_frozen(norm: nn.Module) -> bool:
    parameters = list(norm.parameters(recurse=False))
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _matches(where: Where, site: NormSite) -> bool:
    if isinstance(where, str):
        return where == site.role or fnmatchcase(site.name, where)
    if isinstance(where, re.Pattern):
        return where.search(site.name) is not None
    return bool(where(site))


def choose_norms(
    model: nn.Module, change: Change, where: Where | None = None, heads: Heads | None = None
) -> tuple[Anatomy, tuple[NormRow, ...]]:
    """A row for every norm of the model, as `vitmods.replace_norms` chooses them.

    Raises NoEffect when none becomes another, and UserError for what that function refuses without running the model.
    """
    _check_model(model, change)
    anatomy = Anatomy(model)
    if not anatomy.sites:
        raise NotRecognized(f"A {type(model).__name__} without LayerNorm or RMSNorm has nothing to replace.")
    plan = NormPlan(anatomy, _check_change(change, where), where)
    if heads is not None and not plan.by_heads:
        raise UserError(f"'{change}' does not have heads: leave heads=... out.")
    sites = anatomy.sites
    if heads is not None:
        sites = tuple(replace(site, heads=heads(site) if callable(heads) else heads) for site in sites)
    rows = tuple(plan.row(site) for site in sites)
    chosen = [row.site for row in rows if row.now]
    if not chosen:
        raise NoEffect(f"'{change}' finds no norm to replace. These were found:\n{table(rows)}")
    _check_shared(model, chosen)
    return anatomy, rows


def _check_model(model: nn.Module, change: Change) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"replace_norms takes an nn.Module, not {model!r}.")
    if isinstance(model, ViT):
        raise UserError(f"This is a vitmods ViT: use vm.apply(model, {change!r}), which knows its slots.")
    check_not_wrapped(model)


def _check_change(change: Change, where: Where | None) -> Norm | DynamicTokenNorm:
    if not isinstance(change, Norm | DynamicTokenNorm):
        raise UserError(f"replace_norms takes Norm(...) or DynamicTokenNorm(...), not {change!r}.")
    if where is not None and isinstance(change, DynamicTokenNorm) and (change.norms, change.blocks) != ("attn", None):
        raise UserError("dtn(norms=..., blocks=...) and where=... both choose the norms: give one of them.")
    if where is not None and not isinstance(where, str | re.Pattern) and not callable(where):
        raise UserError(f"where is a pattern, a compiled regular expression or a function, not {where!r}.")
    return change


def _check_shared(model: nn.Module, chosen: list[NormSite]) -> None:
    """Raise UserError if a norm, or its gain, is used at two places: each would need its own statistics or grid."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), []).append(name)
    for site in chosen:
        module = model.get_submodule(site.name)
        for part in (module, *module.parameters(recurse=False)):
            if len(set(places[id(part)])) > 1:
                raise UserError(
                    f"{' and '.join(sorted(set(places[id(part)])))} share one norm or its weights: give each a copy "
                    "(copy.deepcopy), or leave it out with where=..."
                )
