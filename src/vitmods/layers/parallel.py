"""Blocks with several branches side by side (Touvron et al., 2022, Three things everyone should know about ViTs)."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers import recompute as recompute
from vitmods.layers.attention import Attention
from vitmods.layers.block import Block, all_token_wise, attend, can_recompute, feed_forward
from vitmods.layers.joint import CachedMaps, JointMaps, Part, alike, fold
from vitmods.layers.mlp import Mlp

LARGEST_HIDDEN = 1 << 22
"""Values in the joint first map's output up to which the fused form is as fast on a CPU or faster: beyond, it only
leaves the caches. Measured by benchmarks/parallel.py."""
FEWEST_TOKENS = 1500
"""Tokens of a batch from which on larger products save more than folding the weights anew costs a step of training on a
CPU, from the same measurement."""


class Branches(nn.ModuleList):
    """k residual branches that read the same tokens x (B, N, C); forward gives what they add to the stream together.

    Two forms of one function. One by one, as published: ``sum_k drop_path(scale(norm_branch(F_k(norm_k(x)))))``.
    Fused: statistics, first maps, heads or hidden layers, and last maps of all branches computed together (joint.py).
    ``fuse`` None takes the faster one, True the fused one wherever it is defined, False never.

    The fused form is defined for LayerNorm and RMSNorm before plain attention or a plain MLP: without norms inside or
    behind them or of queries and keys, head scales, positions, masks, and dropout other than drop path. All else runs
    one by one, and so do branches to a part of which a hook listens. In evaluation, and where all branches are frozen,
    the folded weights are kept until a parameter changes. In training they are folded anew in every step, which pays
    for batches of some size on a CPU; for smaller ones, and in compiled graphs, which keep nothing, branches run one by
    one unless ``fuse`` is True.
    """

    leading = 1
    """Equal pieces in the rows of the first map."""

    def __init__(self, branches: Iterable[dict[str, nn.Module]]) -> None:
        super().__init__(nn.Sequential(OrderedDict(parts)) for parts in branches)
        self.fuse: bool | None = None
        self.recompute = False
        self._kept: CachedMaps | None = None

    @abstractmethod
    def part(self, branch: Any) -> Part | None:
        """What of a branch is folded; None where something stands in the way."""

    @property
    def parts(self) -> tuple[Part, ...] | None:
        """What is folded; None where the fused form is not defined."""
        found = tuple(p for p in (self.part(branch) for branch in self) if p is not None)
        return found if len(found) == len(self) and alike(found) else None

    @property
    def recomputes(self) -> bool:
        """Whether the branches are to keep less for backward than the fused form does."""
        return self.recompute

    def maps(self, x: Tensor) -> JointMaps | None:
        """The joint maps if the tokens x go through the fused form here and now."""
        if self.fuse is False or (torch.is_grad_enabled() and self.recomputes):
            return None
        if torch.compiler.is_compiling():
            parts = self.parts if self.fuse else None
            return fold(parts, self.leading, x) if parts else None
        kept = self._kept
        if kept is None or not kept.up_to_date():
            kept = self._kept = CachedMaps(self, self.parts, self.leading)
        if kept.parts is None or kept.hooked:
            return None
        # In training mode without gradients runs an average of weights (a teacher), often written through .data.
        changing = kept.trained if torch.is_grad_enabled() else self.training
        tokens, on_cpu = x.shape[0] * x.shape[1], x.device.type == "cpu"
        if changing:
            pays = on_cpu and tokens >= FEWEST_TOKENS and torch.is_grad_enabled()
            return fold(kept.parts, self.leading, x) if self.fuse or pays else None
        too_large = tokens * kept.rows > LARGEST_HIDDEN and on_cpu
        return kept.maps(x) if self.fuse or not too_large else None

    def add_up(self, outputs: Iterable[Tensor]) -> Tensor:
        """The branches' outputs F_k(norm_k(x)), each (B, N, C), through what stands behind them, in a sum. They are
        computed while they are added, so that random numbers are drawn branch by branch."""
        behind: Iterable[tuple[Any, Tensor]] = zip(self, outputs, strict=True)
        added = [branch.drop_path(branch.ls(branch.norm_branch(h))) for branch, h in behind]
        return sum(added[1:], start=added[0])

    def train(self, mode: bool = True) -> "Branches":
        self._kept = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}


class AttentionBranches(Branches):
    """Branches ``norm, attn, norm_branch, ls, drop_path``, named as in timm's ParallelThingsBlock."""

    leading = 3

    def part(self, branch: Any) -> Part | None:
        attn = branch.attn
        slots = (attn.norm, attn.q_norm, attn.k_norm, branch.norm_branch) if type(attn) is Attention else (attn,)
        if not all(isinstance(slot, nn.Identity) for slot in slots):
            return None
        if attn.head_scale is not None or attn.positions is not None:
            return None
        if attn.training and (attn.attn_drop or attn.proj_drop.p):
            return None
        return Part(branch.norm, attn.qkv, attn.proj, branch.ls, branch.drop_path, attn.head_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, queries: int | None = None) -> Tensor:
        """(B, N, C) -> (B, N, C), or (B, queries, C): for the first ``queries`` tokens, reading all."""
        maps = self.maps(x) if attn_mask is None else None
        if maps is not None:
            return maps.write(_mix(x, maps, queries))
        branches: list[Any] = list(self)
        if queries is not None:
            return self.add_up(b.attn(b.norm(x), queries=queries) for b in branches)
        return self.add_up(attend(x, b.norm, b.attn, attn_mask, self.recompute) for b in branches)


def _mix(x: Tensor, maps: JointMaps, queries: int | None) -> Tensor:
    """One attention over the heads of all branches: (B, N, C) -> (B, N or queries, k C)."""
    h, weight, bias = maps.normalize(x), maps.first, maps.first_bias
    if queries is None:
        q, k, v = F.linear(h, weight, bias).unflatten(-1, (3, -1, maps.inner)).unbind(2)
    else:
        width = weight.shape[0] // 3
        q = F.linear(h[:, :queries], weight[:width], None if bias is None else bias[:width])
        q = q.unflatten(-1, (-1, maps.inner))
        kv = F.linear(h, weight[width:], None if bias is None else bias[width:])
        k, v = kv.unflatten(-1, (2, -1, maps.inner)).unbind(2)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(2)


class MlpBranches(Branches):
    """Branches ``norm, mlp, norm_branch, ls, drop_path``, named as in timm's ParallelThingsBlock."""

    def part(self, branch: Any) -> Part | None:
        mlp = branch.mlp
        if type(mlp) is not Mlp or not isinstance(mlp.act, nn.GELU):
            return None
        if not isinstance(mlp.norm, nn.Identity) or not isinstance(branch.norm_branch, nn.Identity):
            return None
        if mlp.training and (mlp.drop1.p or mlp.drop2.p):
            return None
        return Part(branch.norm, mlp.fc1, mlp.fc2, branch.ls, branch.drop_path, mlp.act.approximate)

    @property
    def recomputes(self) -> bool:
        branches: list[Any] = list(self)
        return self.recompute or any(isinstance(b.mlp, Mlp) and recompute.is_recomputed(b.mlp) for b in branches)

    def forward(self, x: Tensor, mean: bool = False) -> Tensor:
        """(B, N, C) -> (B, N, C), or with ``mean`` the mean over tokens (B, 1, C), taken before the last maps."""
        maps = self.maps(x)
        if maps is not None:
            h = F.gelu(F.linear(maps.normalize(x), maps.first, maps.first_bias), approximate=maps.inner)
            return maps.write(h.mean(1, keepdim=True) if mean else h)
        branches: list[Any] = list(self)
        if mean:
            return self.add_up(b.mlp.fc2(b.mlp.hidden(b.norm(x)).mean(1, keepdim=True)) for b in branches)
        return self.add_up(feed_forward(x, b.norm, b.mlp, self.recompute) for b in branches)


class ParallelBlock(nn.Module):
    """``x = x + sum_k A_k(x)``, then ``x = x + sum_k M_k(x)``: the attention branches of all ``blocks`` on the same
    tokens, then their MLP branches. (B, N, C) in and out, as ``Block``.

    Each branch keeps its norm, LayerScale and drop path. Raises ValueError where a block has norms after the residual
    sum, which belongs to no branch alone.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        if any(not isinstance(slot, nn.Identity) for b in blocks for slot in (b.norm1_after, b.norm2_after)):
            raise ValueError("Parallel branches share one residual sum: a norm after it has no counterpart here.")
        self.attns = AttentionBranches(
            {"norm": b.norm1, "attn": b.attn, "norm_branch": b.norm1_branch, "ls": b.ls1, "drop_path": b.drop_path1}
            for b in blocks
        )
        self.ffns = MlpBranches(
            {"norm": b.norm2, "mlp": b.mlp, "norm_branch": b.norm2_branch, "ls": b.ls2, "drop_path": b.drop_path2}
            for b in blocks
        )

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        first: int | None = None,
        mean_from: int | None = None,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C), or only what the reader of the last block needs, as ``Block.forward``."""
        if is_causal:
            raise ValueError("This block has no causal attention: give the mask as attn_mask.")
        if first is not None:
            x = x[:, :first] + self.attns(x, queries=first)
            return x + self.ffns(x)
        x = x + self.attns(x, attn_mask)
        if mean_from is None:
            return x + self.ffns(x)
        x = x[:, mean_from:]
        return x.mean(1, keepdim=True) + self.ffns(x, mean=True)

    @property
    def recompute(self) -> bool:
        """Whether fewer tensors are kept for backward; branches that are trained then run one by one."""
        return self.attns.recompute

    @recompute.setter
    def recompute(self, enable: bool) -> None:
        self.attns.recompute = self.ffns.recompute = enable

    @property
    def fuse(self) -> bool | None:
        """None for the faster of the two forms, True for the fused one wherever it is defined, False for neither."""
        return self.attns.fuse

    @fuse.setter
    def fuse(self, choice: bool | None) -> None:
        self.attns.fuse = self.ffns.fuse = choice

    @property
    def tokenwise(self) -> bool:
        """Whether what follows attention treats each token by itself."""
        attns: list[Any] = list(self.attns)
        ffns: list[Any] = list(self.ffns)
        norms = [norm for b in attns for norm in (b.attn.norm, b.norm_branch)]
        return all_token_wise(norms + [norm for b in ffns for norm in (b.norm, b.mlp.norm, b.norm_branch)])

    @property
    def can_recompute(self) -> bool:
        """Whether a part of this block has a recompute form."""
        attns: list[Any] = list(self.attns)
        return any(recompute.supports(b.norm) for b in attns) or self.can_recompute_mlp

    @property
    def can_recompute_mlp(self) -> bool:
        """Whether the MLP of a branch can be run again in backward."""
        ffns: list[Any] = list(self.ffns)
        return any(can_recompute(b.norm, b.mlp) for b in ffns)

    @property
    def mean_commutes(self) -> bool:
        """Whether nothing but linear maps follows the MLPs' last layers. Dropout there acts on tokens one by one."""
        ffns: list[Any] = list(self.ffns)
        plain = all(isinstance(b.norm_branch, nn.Identity) for b in ffns)
        return plain and self.tokenwise and not any(b.mlp.training and b.mlp.drop2.p > 0 for b in ffns)
