"""Branches that read the same tokens as two joint linear maps, with everything around them folded into the weights.

Branch k adds ``s_k * (P_k f(W_k (g_k * n(x) + b_k) + c_k) + p_k)`` to the stream: n the norm's statistics, g and b its
gain and bias, s LayerScale, f attention by heads or the activation, both of which work on parts. So the sum of all is

    Q f(V n(x) + d) + q,   V = rows W_k diag(g_k),  d = c_k + W_k b_k,   Q = columns diag(s_k) P_k,  q = sum s_k * p_k

Folding is in float32 at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.drop import DropPath, LayerScale
from vitmods.layers.norms import LayerNorm, RMSNorm
from vitmods.layers.recompute import compute_dtype
from vitmods.ops.context import upcast, without_autocast
from vitmods.ops.rms import rms_norm


@dataclass(frozen=True)
class JointMaps:
    """The folded maps of k branches in the type that products are computed in; biases may be missing."""

    eps: float
    ones: Tensor
    zeros: Tensor | None
    """LayerNorm's gain and bias where it has none: its kernels are slower without them. RMSNorm has no zeros."""
    first: Tensor
    """(rows, C); rows are ordered by what leads (query, key, value), then branch, then channel."""
    first_bias: Tensor | None
    last: Tensor
    """(C, k M); columns ordered by branch."""
    last_bias: Tensor | None
    """(k, C)"""
    total_bias: Tensor | None
    """(C,), the sum over branches."""
    inner: Any
    """What is between the maps: the heads' width, the kind of GELU."""
    drops: tuple[DropPath, ...]
    """The branches' drop paths, if they have any."""

    def normalize(self, x: Tensor) -> Tensor:
        """n(x), (B, N, C) in and out."""
        if self.zeros is None:
            return rms_norm(x, None, self.eps)
        y = F.layer_norm(x, self.ones.shape, self.ones, self.zeros, self.eps)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def write(self, h: Tensor) -> Tensor:
        """(B, N, k M) -> (B, N, C), what all branches together add. Drop path commutes with a branch's map."""
        if not self.drops or not any(drop.active for drop in self.drops):
            return F.linear(h, self.last, self.total_bias)
        keep = torch.stack([drop.draw(h) for drop in self.drops], 2)  # (B, 1, k, 1)
        h = F.linear((h.unflatten(-1, (keep.shape[2], -1)) * keep).flatten(2), self.last)
        if self.last_bias is None:
            return h
        return h + (keep.flatten(1).to(h.dtype) @ self.last_bias.to(h.dtype))[:, None]


class Part(NamedTuple):
    """What of one branch can be folded: the norm before it, its first and last linear maps, its LayerScale."""

    norm: Any
    first: Any
    last: Any
    scale: nn.Module
    drop: nn.Module
    inner: Any
    """What is between the maps, as far as branches could differ in it: the heads' width, the kind of GELU."""

    @property
    def can_be_folded(self) -> bool:
        """Whether these are plain linear maps behind a norm that treats each token by itself."""
        plain_maps = type(self.first) is type(self.last) is nn.Linear
        return plain_maps and type(self.norm) in (LayerNorm, RMSNorm) and type(self.scale) in (LayerScale, nn.Identity)

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be the same in all branches."""
        maps = [(m.weight.shape, m.bias is None) for m in (self.first, self.last)]
        return (
            type(self.norm),
            self.norm.eps,
            self.norm.weight is None,
            type(self.scale),
            type(self.drop),
            self.inner,
            *maps,
        )


def alike(parts: Sequence[Part]) -> bool:
    """Whether these branches can be folded into one."""
    return all(part.can_be_folded for part in parts) and len({part.form for part in parts}) == 1


def fold(parts: Sequence[Part], leading: int, x: Tensor) -> JointMaps:
    """The joint maps for tokens x; ``leading`` is how many equal pieces the first map's rows have (3: q, k and v)."""
    dtype, norm = compute_dtype(x), parts[0].norm
    with without_autocast(x):
        first = torch.stack([upcast(p.first.weight).unflatten(0, (leading, -1)) for p in parts], 1)
        if norm.weight is not None:
            first = first * torch.stack([upcast(p.norm.weight) for p in parts])[:, None]
        last = torch.stack([upcast(p.last.weight) for p in parts], 1)
        biases = None if parts[0].last.bias is None else torch.stack([upcast(p.last.bias) for p in parts])
        if isinstance(parts[0].scale, LayerScale):
            scale = torch.stack([upcast(p.scale.gamma) for p in parts])  # type: ignore[arg-type]
            last = last * scale.T[..., None]
            biases = None if biases is None else biases * scale
        shifts = [s.unflatten(0, (leading, -1)) for s in map(_shift, parts) if s is not None]
        return JointMaps(
            eps=norm.eps,
            ones=x.new_ones(x.shape[-1]),
            zeros=x.new_zeros(x.shape[-1]) if isinstance(norm, LayerNorm) else None,
            first=first.flatten(0, 2).to(dtype),
            first_bias=torch.stack(shifts, 1).flatten().to(dtype) if shifts else None,
            last=last.flatten(1).to(dtype),
            last_bias=None if biases is None else biases.to(dtype),
            total_bias=None if biases is None else biases.sum(0).to(dtype),
            inner=parts[0].inner,
            drops=tuple(p.drop for p in parts if isinstance(p.drop, DropPath)),
        )


def _shift(part: Part) -> Tensor | None:
    """The bias of the first map with the norm's put into it."""
    beta, bias = getattr(part.norm, "bias", None), part.first.bias
    if beta is None:
        return None if bias is None else upcast(bias)
    shift = upcast(part.first.weight) @ upcast(beta)
    return shift if bias is None else upcast(bias) + shift


class CachedMaps:
    """The joint maps of branches in a module, folded once and again when a parameter has changed.

    A parameter counts as unchanged while it is the same object in the same memory with the same version, which every
    operation in place raises; only writing into ``parameter.data`` does not.
    """

    def __init__(self, root: nn.Module, parts: Sequence[Part] | None, leading: int) -> None:
        self.parts, self._leading = parts, leading
        self.rows = sum(part.first.out_features for part in parts or ())
        modules = list(root.modules())
        self._children = [(m._modules, dict(m._modules)) for m in modules if m._modules]
        self._modes = [(m, m.training) for m in modules if getattr(m, "p", 0) or getattr(m, "attn_drop", 0)]
        self._hooks = [
            hooks
            for m in modules[1:]
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self._places = [(m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        self._counted = [p for _, _, p in self._places if not p.is_inference()]
        self._versions: list[int] = []
        self._types: Any = None
        self._maps: JointMaps | None = None

    def up_to_date(self) -> bool:
        """Whether modules, the modes of dropouts and parameters are still those of the start; ``maps`` looks at
        values."""
        for now, then in self._children:
            if now != then:
                return False
        for module, training in self._modes:
            if module.training != training:
                return False
        return all(parameters.get(name) is p for parameters, name, p in self._places)

    @property
    def hooked(self) -> bool:
        """Whether someone listens to a part, which then has to run by itself."""
        return any(self._hooks)

    @property
    def trained(self) -> bool:
        return any(p.requires_grad for _, _, p in self._places)

    def maps(self, x: Tensor) -> JointMaps | None:
        """The joint maps for tokens x, without gradients; None for parameters that do not count their versions, as
        those made in inference mode."""
        if len(self._counted) < len(self._places):
            return None
        versions = [p._version for p in self._counted] + [p.data_ptr() for p in self._counted]
        types = x.dtype, compute_dtype(x)
        if versions != self._versions or types != self._types or self._maps is None:
            assert self.parts is not None
            self._versions, self._types = versions, types
            with torch.inference_mode(False), torch.no_grad():  # maps of frozen branches may be saved for backward
                self._maps = fold(self.parts, self._leading, x)
        return self._maps
