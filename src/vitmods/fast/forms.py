"""How a ViT runs its blocks in less time or memory, with the same results.

A form takes the place of a block's forward only where it knows all that the block does (known.py); a block that is
wrapped, hooked, changed or of another kind is called as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.fast.known import eager, exact, image_wise, random, reads_heads, token_wise
from vitmods.fast.memory import is_frozen, norm_frozen_mlp, norm_mlp, norm_then, product_type, supports, supports_mlp
from vitmods.layers import Block, DropPath, LayerScale, Mlp, ParallelBlock
from vitmods.model.vit import ViT
from vitmods.ops.attention import attend
from vitmods.ops.context import has_hooks


@dataclass(frozen=True)
class Forms:
    """Which forms a model may take: ``model.forms = Forms(...)``; None calls each block as it is written.

    Args:
        last_block: of the last block ``forward`` computes only what the head reads (the class token, or the mean before
            the last linear map).
        surviving: with stochastic depth, a branch runs for the images that keep it, on a CPU, where choosing them costs
            nothing.
        recompute: outputs of norms and GELUs are recomputed in backward instead of kept.
        recompute_frozen_mlps: of a frozen MLP its input alone is kept, and its first linear map runs again in backward,
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
            read_by_head(model) if for_head and self.last_block and isinstance(x, Tensor) else None,
            recomputes=self.recompute and not keeps_all,
            recomputes_frozen=self.recompute_frozen_mlps
            and not keeps_all
            and index < len(model.blocks) - self.keep_last,
        )

    def run_block(
        self, block: Any, x: Tensor, read: Read | None = None, recomputes: bool = False, recomputes_frozen: bool = False
    ) -> Tensor:
        out: Tensor
        chooses = type(x) is Tensor and x.device.type == "cpu" and x.shape[0] > 1  # reads which images survive
        surviving = self.surviving and block.training and chooses and eager(x)
        parts = _parts(block) if read or surviving or recomputes or recomputes_frozen else None
        if parts is None:
            out = block(x)
            return out
        if read and not _can_read(parts, read):
            read = None
        first = read.tokens if read and read.how == "first" else None
        attend = [_attn_form(b, first, recomputes) for b in parts.attns]
        x = parts.attns_after(_add(x if first is None else x[:, :first], x, parts.attns, attend, surviving))
        if read and read.how == "mean":
            x = x[:, read.tokens :]
            onto, means = parts.mlps_onto(x.mean(1, keepdim=True)), [partial(_mean_mlp, b) for b in parts.mlps]
            mean = _add(onto, x, parts.mlps, means, surviving)
            return mean.expand(-1, read.tokens + 1, -1)
        feed = [_mlp_form(b, recomputes, recomputes_frozen) for b in parts.mlps]
        out = parts.mlps_after(_add(parts.mlps_onto(x), x, parts.mlps, feed, surviving))
        return out


class Read(NamedTuple):
    """The part of a block's output that is read: the ``first`` tokens, or the ``mean`` over all but the first ones."""

    how: Literal["first", "mean"]
    tokens: int


def read_by_head(model: ViT) -> Read | None:
    """Return the part of the last block's output that reaches the head; None: all of it, or unknown."""
    kind, config = type(model), model.vit_config
    if (kind.forward, kind.forward_head, kind._pool) != _HEAD:
        return None
    if any(name in vars(model) for name in ("forward_head", "_pool")):
        return None
    if config.pool == "token" and token_wise(model.norm):
        return Read("first", 1)
    if config.pool == "avg" and exact(model.norm, nn.Identity):
        return Read("mean", config.num_prefix_tokens)
    return None


_HEAD = ViT.forward, ViT.forward_head, ViT._pool


class _Branch(NamedTuple):
    """``drop_path(scale(norm_branch(inner(norm(x)))))``"""

    norm: Any
    inner: Any
    norm_branch: Any
    scale: Any
    drop_path: Any

    def behind(self, h: Tensor) -> Tensor:
        """Apply what is between the branch and its drop path."""
        out: Tensor = self.scale(self.norm_branch(h))
        return out


class _Parts(NamedTuple):
    """``x = attns_after(x + sum of attns)``, ``x = mlps_after(mlps_onto(x) + sum of mlps)``"""

    attns: list[_Branch]
    attns_after: Any
    mlps: list[_Branch]
    mlps_onto: Any
    mlps_after: Any


def _parts(block: Any) -> _Parts | None:
    """Return the parts of a block; None for a block that may have been changed."""
    if exact(block, Block):
        attn = _Branch(block.norm1, block.attn, block.norm1_branch, block.ls1, block.drop_path1)
        mlp = _Branch(block.norm2, block.mlp, block.norm2_branch, block.ls2, block.drop_path2)
        return _Parts([attn], block.norm1_after, [mlp], block.residual_scale, block.norm2_after)
    if exact(block, ParallelBlock):
        none = nn.Identity()
        return _Parts([_Branch(*b) for b in block.attns], none, [_Branch(*b) for b in block.ffns], none, none)
    return None


def _can_read(parts: _Parts, read: Read) -> bool:
    """Whether the form that leaves the rest out gives the same: with norms that mix tokens it does not, and dropout
    would be drawn for others."""
    branches = parts.attns + parts.mlps
    behind = [m for b in branches for m in (b.norm_branch, b.scale)]
    behind += [parts.attns_after, parts.mlps_onto, parts.mlps_after]
    if not token_wise(*behind) or any(map(random, (m for b in branches for m in b))):
        return False
    if not all(exact(b.drop_path, DropPath, nn.Identity) for b in branches):
        return False
    if not all(token_wise(b.norm, b.inner) for b in parts.mlps):
        return False
    if read.how == "first":
        return all(reads_heads(b.inner) and not has_hooks(b.norm.modules()) for b in parts.attns)
    plain = [m for b in parts.mlps for m in (b.norm_branch, parts.mlps_after)]
    linear = exact(parts.mlps_onto, nn.Identity, LayerScale)
    return linear and all(exact(m, nn.Identity) for m in plain) and all(exact(b.inner, Mlp) for b in parts.mlps)


def _attn_form(branch: _Branch, first: int | None, recomputes: bool) -> Callable[[Tensor], Tensor]:
    """``attn(norm(x))``, of the first tokens alone where that is asked for."""
    attn = branch.inner if first is None else partial(_attend_first, branch.inner, first)
    if recomputes and supports(branch.norm):
        return partial(norm_then, norm=branch.norm, branch=attn)
    return lambda x: attn(branch.norm(x))


def _mlp_form(branch: _Branch, recomputes: bool, recomputes_frozen: bool) -> Callable[[Tensor], Tensor]:
    """``mlp(norm(x))``"""
    norm, mlp = branch.norm, branch.inner
    if recomputes_frozen and is_frozen(mlp) and supports_mlp(norm, mlp):
        return partial(norm_frozen_mlp, norm=norm, mlp=mlp)
    if recomputes and supports_mlp(norm, mlp):
        return partial(norm_mlp, norm=norm, mlp=mlp)
    return lambda x: mlp(norm(x))


def _attend_first(attn: Any, first: int, x: Tensor) -> Tensor:
    """Attention's output for the first tokens, reading all: (B, N, C) -> (B, first, C)."""
    dim, heads = attn.num_heads * attn.head_dim, (attn.num_heads, attn.head_dim)
    weight, bias = attn.qkv.weight, attn.qkv.bias
    q = F.linear(x[:, :first], weight[:dim], None if bias is None else bias[:dim])
    kv = F.linear(x, weight[dim:], None if bias is None else bias[dim:])
    q, (k, v) = q.view(*q.shape[:2], *heads), kv.view(*kv.shape[:2], 2, *heads).unbind(2)
    q, k, v = attn.q_norm(q).transpose(1, 2), attn.k_norm(k).transpose(1, 2), v.transpose(1, 2)
    out: Tensor = attend(q, k, v, dropout=attn.attn_drop if attn.training else 0.0)
    if attn.positions is not None:
        out = attn.positions(out, v)
    if attn.head_scale is not None:
        out = out * attn.head_scale.view(-1, 1, 1)
    out = attn.proj_drop(attn.proj(attn.norm(out.transpose(1, 2).flatten(2))))
    return out


def _mean_mlp(branch: _Branch, x: Tensor) -> Tensor:
    """The mean over tokens of ``mlp(norm(x))``, taken before the last linear map: (B, T, C) -> (B, 1, C)."""
    mlp = branch.inner
    hidden = mlp.norm(mlp.drop1(mlp.act(mlp.fc1(branch.norm(x)))))
    out: Tensor = mlp.fc2(hidden.mean(1, keepdim=True))
    return out


def _add(
    onto: Tensor,
    x: Tensor,
    branches: Sequence[_Branch],
    forms: Sequence[Callable[[Tensor], Tensor]],
    surviving: bool,
) -> Tensor:
    """``onto`` plus what all branches make of x."""
    total: Tensor | None = None
    some: list[tuple[Tensor, Tensor]] = []
    for branch, form in zip(branches, forms, strict=True):
        if not (surviving and _can_choose(branch)):
            h = branch.drop_path(branch.behind(form(x)))
        else:
            keep = branch.drop_path.draw(x.new_empty(len(x), 1, 1, dtype=_type_behind(branch, x)))
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


def _can_choose(branch: _Branch) -> bool:
    """Whether the branch may run for some images alone: each is treated by itself, and nothing else is drawn."""
    drop, *parts = branch.drop_path, *branch[:-1]
    active = exact(drop, DropPath) and drop.training and drop.rate > 0
    return active and image_wise(*parts) and not any(map(random, parts))


def _type_behind(branch: _Branch, x: Tensor) -> torch.dtype:
    """The type of what the branch gives, in which its factors are drawn."""
    dtype, gamma = product_type(x), getattr(branch.scale, "gamma", None)
    return dtype if gamma is None else torch.promote_types(dtype, gamma.dtype)
