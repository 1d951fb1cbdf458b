"""Which norms of a transformer are replaced, and why not the others."""

import re
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from vitmods.adapters.anatomy import Anatomy, NormSite
from vitmods.changes.dynamic_token_norm import DynamicTokenNorm
from vitmods.changes.norm import Norm
from vitmods.layers.norms import LayerNorm, RMSNorm
from vitmods.model.slots import NormConfig
from vitmods.util.errors import UserError

Where = str | re.Pattern[str] | Callable[[NormSite], bool]

_KEPT = {
    "inside": "inside attention",
    "embed": "of the embedding",
    "merge": "between stages",
    "final": "after the blocks",
    "block": "not of a branch",
}


class NormRow(NamedTuple):
    """What became of one norm: ``now`` is what it is, empty where it stayed. ``why`` says why it stayed, or what of
    the old norm does not live on."""

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
            raise UserError(f"{site.name} has no attention beside it that tells the number of heads: give heads=...")
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
            raise UserError(
                f"{self.new.__name__} mixes tokens, and {site.name} is in no block whose attention is recognized, so "
                "that it may be causal: a token would see later ones. Use a norm of single tokens, or name the norms "
                "with where=... if all tokens may see each other."
            )
        block, modules = self.anatomy.blocks[site.block], self.anatomy.modules
        around = [m for n, m in modules.items() if n.startswith(block.name) and f"{site.name}.".startswith(f"{n}.")]
        near = [*around, modules[block.name], modules[block.attention]]
        what = f"{self.new.__name__} mixes tokens, and {block.name}"
        if any(getattr(m, name, False) is True for m in near for name in ("is_causal", "is_decoder")):
            raise UserError(f"{what} is causal: a token would see later ones. Use a norm of single tokens.")
        decoder = nn.TransformerDecoderLayer | nn.TransformerDecoder
        if self.where is None and any(isinstance(m, decoder) for m in near):
            raise UserError(
                f"{what} is a decoder's, which may be called with a causal mask: a token would see later ones. Use a "
                "norm of single tokens, or name the norms with where=... if it never is."
            )
        if site.role == "mlp" and any(getattr(m, "chunk_size_feed_forward", 0) for m in near):
            raise UserError(
                f"{what} cuts the sequence into chunks: set chunk_size_feed_forward=0 in the model's config."
            )
        if any(getattr(m, "batch_first", True) is False for m in near):
            raise UserError(f"{what} has tokens on the first axis: build the model with batch_first=True.")


def is_frozen(norm: nn.Module) -> bool:
    own = list(norm.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def _matches(where: Where, site: NormSite) -> bool:
    if isinstance(where, str):
        return where == site.role or fnmatchcase(site.name, where)
    if isinstance(where, re.Pattern):
        return where.search(site.name) is not None
    return bool(where(site))
