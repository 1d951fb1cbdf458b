"""How a ViT runs its blocks in less time or memory, with the same results.

A form takes the place of a block's forward only where it knows all that the block does (known.py); a block that is
wrapped, hooked, changed or of another kind is called as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.fast.known import eager, exact, image_wise, random, reads_heads, token_wise
from vitmods.fast.memory import is_frozen, norm_frozen_mlp, norm_mlp, norm_then, product_type, supports, supports_mlp
from vitmods.layers import Block, DropPath, ParallelBlock
from vitmods.model.vit import ViT
from vitmods.ops.attention import attend
from vitmods.ops.context import has_hooks


@dataclass(frozen=True)
class Forms:
    """Which forms a model may take: ``model.forms = Forms(...)``; None calls each block as it is written.

    Args:
        last_block: of the last block ``forward`` computes only the class token, if that is all that the head reads.
        surviving: with stochastic depth, a branch runs for the images that keep it, on a CPU, where choosing them costs
            nothing.
        recompute: outputs of norms and GELUs are recomputed in backward instead of kept.
        recompute_frozen_mlps: only the input of a frozen MLP is kept, and its first linear map runs again in backward,
            except in the last ``keep_last`` blocks.
    """

    last_block: bool = True
    surviving: bool = True
    recompute: bool = False
    recompute_frozen_mlps: bool = False
    keep_last: int = 0

    def run(self, model: ViT, index: int, x: Tensor, for_head: bool) -> Tensor:
        """The block of that index, (B, N, C) in and out; where only the head reads it, what it does not read may be
        left out."""
        keeps_all = model.grad_checkpointing or not (torch.is_grad_enabled() and eager(x))
        return self.run_block(
            model.blocks[index],
            x,
            for_head and self.last_block and isinstance(x, Tensor) and _head_reads_first(model),
            recomputes=self.recompute and not keeps_all,
            recomputes_frozen=self.recompute_frozen_mlps
            and not keeps_all
            and index < len(model.blocks) - self.keep_last,
        )

    def run_block(
        self, block: Any, x: Tensor, first: bool = False, recomputes: bool = False, recomputes_frozen: bool = False
    ) -> Tensor:
        """``block(x)``, or where only the ``first`` token is read perhaps only that."""
        out: Tensor
        chooses = type(x) is Tensor and x.device.type == "cpu" and x.shape[0] > 1  # reads which images survive
        surviving = self.surviving and block.training and chooses and eager(x)
        parts = _parts(block) if first or surviving or recomputes or recomputes_frozen else None
        if parts is None:
            out = block(x)
            return out
        first = first and _can_read_first(parts)
        attend: list[Form] = []
        for branch in parts.attns:
            attn = partial(_attend_first, branch.inner) if first else branch.inner
            if recomputes and supports(branch.norm):
                attend.append(partial(norm_then, norm=branch.norm, branch=attn))
            else:
                attend.append(partial(_norm_then, branch.norm, attn))
        x = parts.attns_after(_add(x[:, :1] if first else x, x, parts.attns, attend, surviving))
        feed: list[Form] = []
        for branch in parts.mlps:
            norm, mlp = branch.norm, branch.inner
            if recomputes_frozen and is_frozen(mlp) and supports_mlp(norm, mlp):
                feed.append(partial(norm_frozen_mlp, norm=norm, mlp=mlp))
            elif recomputes and supports_mlp(norm, mlp):
                feed.append(partial(norm_mlp, norm=norm, mlp=mlp))
            else:
                feed.append(partial(_norm_then, norm, mlp))
        out = parts.mlps_after(_add(parts.mlps_onto(x), x, parts.mlps, feed, surviving))
        return out


Form = Callable[[Tensor], Tensor]
"""A branch with its norm: (B, N, C) in and out."""
_HEAD = ViT.forward, ViT.forward_head, ViT._pool


def _norm_then(norm: Any, branch: Form, x: Tensor) -> Tensor:
    return branch(norm(x))


def _head_reads_first(model: ViT) -> bool:
    """Whether the class token of the last block is all that reaches the head."""
    kind = type(model)
    if (kind.forward, kind.forward_head, kind._pool) != _HEAD or vars(model).keys() & {"forward_head", "_pool"}:
        return False
    return model.vit_config.pool == "token" and token_wise(model.norm)


class _Branch(NamedTuple):
    """``drop_path(scale(norm_branch(inner(norm(x)))))``"""

    norm: Any
    inner: Any
    norm_branch: Any
    scale: Any
    drop_path: Any

    def behind(self, h: Tensor) -> Tensor:
        """Apply what is between the branch and its drop path."""
        return self.scale(self.norm_branch(h))


class _Parts(NamedTuple):
    """``x = attns_after(x + sum of attns)``, ``x = mlps_after(mlps_onto(x) + sum of mlps)``"""

    attns: list[_Branch]
    attns_after: Any
    mlps: list[_Branch]
    mlps_onto: Any
    mlps_after: Any


def _parts(block: Any) -> _Parts | None:
    """Return the parts of a block; None for a block that may have been changed."""
    if exact(block, Block) and exact(block.norm_scale, nn.Identity):
        attn = _Branch(block.norm1, block.attn, block.norm1_branch, block.ls1, block.drop_path1)
        mlp = _Branch(block.norm2, block.mlp, block.norm2_branch, block.ls2, block.drop_path2)
        return _Parts([attn], block.norm1_after, [mlp], block.residual_scale, block.norm2_after)
    if exact(block, ParallelBlock):
        none = nn.Identity()
        return _Parts([_Branch(*b) for b in block.attns], none, [_Branch(*b) for b in block.ffns], none, none)
    return None


def _can_read_first(parts: _Parts) -> bool:
    """Whether the form that leaves the other tokens out gives the same: with norms that mix tokens it does not, and
    dropout would be drawn for others."""
    branches = parts.attns + parts.mlps
    behind = [m for b in branches for m in (b.norm_branch, b.scale)]
    behind += [parts.attns_after, parts.mlps_onto, parts.mlps_after]
    return (
        token_wise(*behind)
        and not any(map(random, (m for b in branches for m in b)))
        and all(exact(b.drop_path, DropPath, nn.Identity) for b in branches)
        and all(token_wise(b.norm, b.inner) for b in parts.mlps)
        and all(reads_heads(b.inner) and not has_hooks(b.norm.modules()) for b in parts.attns)
    )


def _attend_first(attn: Any, x: Tensor) -> Tensor:
    """Attention's output for the first token, reading all: (B, N, C) -> (B, 1, C)."""
    heads = attn.num_heads, attn.head_dim
    parts = [attn.num_heads * attn.head_dim * count for count in (1, 2)]
    of_q, of_kv = attn.qkv.weight.split(parts)  # its derivative is one operation, that of two slices is three
    bias_q, bias_kv = (None, None) if attn.qkv.bias is None else attn.qkv.bias.split(parts)
    q, kv = F.linear(x[:, :1], of_q, bias_q), F.linear(x, of_kv, bias_kv)
    q, (k, v) = q.view(*q.shape[:2], *heads), kv.view(*kv.shape[:2], 2, *heads).unbind(2)
    q, k, v = attn.q_norm(q).transpose(1, 2), attn.k_norm(k).transpose(1, 2), v.transpose(1, 2)
    out: Tensor = attend(q, k, v, None, attn.attn_drop if attn.training else 0.0)
    if attn.positions is not None:
        out = attn.positions(out, v)
    if attn.head_scale is not None:
        out = out * attn.head_scale.view(-1, 1, 1)
    out = attn.proj_drop(attn.proj(attn.gated(attn.norm(out.transpose(1, 2).flatten(2)), x[:, :1])))
    return out


def _add(onto: Tensor, x: Tensor, branches: Sequence[_Branch], forms: Sequence[Form], surviving: bool) -> Tensor:
    """``onto`` plus what all branches make of x."""
    total: Tensor | None = None
    some: list[tuple[Tensor, Tensor]] = []
    for branch, form in zip(branches, forms, strict=True):
        drop, *parts = branch.drop_path, *branch[:-1]
        drops = exact(drop, DropPath) and drop.training and drop.rate > 0
        # A branch may run for only some images if it treats each by itself, and nothing else is drawn.
        if not (surviving and drops and image_wise(*parts) and not any(map(random, parts))):
            h = drop(branch.behind(form(x)))
        else:
            dtype, gamma = (
                product_type(x),
                getattr(branch.scale, "gamma", None),
            )  # factors are drawn in the output's type
            dtype = dtype if gamma is None else torch.promote_types(dtype, gamma.dtype)
            keep = drop.draw(x.new_empty(len(x), 1, 1, dtype=dtype))
            kept = keep.flatten().nonzero().flatten()
            if 0 < len(kept) < len(x):  # where none survives, parameters get gradients of zero, as ever
                some.append((kept, branch.behind(form(x[kept])) * keep[kept]))
                continue
            h = branch.behind(form(x)) * keep
        total = h if total is None else total + h
    out = onto if total is None else onto + total
    for kept, h in some:
        dtype = torch.promote_types(out.dtype, h.dtype)
        out = out.to(dtype).index_add(0, kept, h.to(dtype))
    return out
