"""Finds blocks, norms and the stem of a transformer in the structure of its modules, without importing its library."""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.layers.norms import NORMS

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "nhead", "n_head", "heads")
OTHER_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
JOINT = ("qkv", "query_key_value", "c_attn", "qkv_proj", "in_proj", "to_qkv", "Wqkv")
QUERY = ("q_proj", "query", "q", "to_q", "q_lin", "wq", "q_linear", "linear_q", "projection_query")
"""names of the projections of queries, with keys and values or alone"""


@dataclass(frozen=True)
class ForeignBlock:
    """A residual block with attention. ``stage`` numbers the lists that contain the blocks; ``stem`` is the convolution
    that makes its tokens from images, None for sequences."""

    name: str
    attention: str
    heads: int
    stage: int
    stem: str | None


@dataclass(frozen=True)
class NormSite:
    """A norm of a model.

    ``role``: ``attn`` or ``mlp`` (of the block's branches, before or after them), ``block`` (elsewhere in a block),
    ``inside`` (inside attention: of reduced tokens, of queries and keys), ``embed`` (of patches, words and what comes
    before the first block), ``merge`` (between stages), ``final`` (after the blocks of the model or of a stage).
    ``heads`` are those of the attention next to it. ``block`` and ``stage`` count from 0, None outside the blocks.
    """

    name: str
    role: str
    kind: str
    dim: int
    heads: int | None
    block: int | None
    stage: int | None


def norm_sites(model: nn.Module) -> tuple[NormSite, ...]:
    """The norms that ``replace_norms`` knows, in the order of the model's modules: every LayerNorm and RMSNorm, and in
    models without one (LeViT) the BatchNorm after each linear map of tokens."""
    return Anatomy(model).sites


class Anatomy:
    """Blocks and norms of a model. No module is run, except copies of what may be an RMSNorm.

    ``attentions`` are the modules that hold one, if that is known, with the number of heads that they state (0: none);
    else they are found by their names. Those ``written`` into their blocks are the blocks. ``mlps`` are known MLPs.
    """

    def __init__(
        self,
        model: nn.Module,
        attentions: Mapping[str, int] | None = None,
        written: Collection[str] = (),
        mlps: Collection[str] = (),
    ) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))  # a shared norm has two places
        self._order = {name: index for index, name in enumerate(self.modules)}
        self.rms = {name: gain for name, m in self.modules.items() if (gain := rms_gain(m)) is not None}
        ours = tuple(kind.module for kind in NORMS.values())
        self.norms = {n for n, m in self.modules.items() if isinstance(m, (nn.LayerNorm, *ours))} | self.rms.keys()
        self.written, self.mlps, self.maps = written, mlps, maps_of(model)
        self.attentions = self._find_attentions() if attentions is None else dict(attentions)

    def _find_attentions(self) -> dict[str, int]:
        """The innermost modules that know their number of heads and have linear maps, with that number."""
        heads_of: dict[str, int] = {}
        for name, module in self.modules.items():
            heads = count_heads(module)
            maps = [self.modules[n] for n in self.maps if within(n, name)] if heads else []
            makes_biases = maps and widths(maps[-1])[1] == heads and not self._has_queries(name)
            if heads and maps and not makes_biases:
                heads_of[name] = heads
        # Parts of attention, as its relative positions, may know the heads too, and do not have queries.
        reading = [name for name in heads_of if self._has_queries(name)]
        heads_of = {
            n: h for n, h in heads_of.items() if n in reading or not any(is_below(n, other) for other in reading)
        }
        return {name: heads for name, heads in heads_of.items() if not any(is_below(other, name) for other in heads_of)}

    def _has_queries(self, name: str) -> bool:
        inside = ((n, m) for n, m in self.modules.items() if within(n, name))
        return any(isinstance(m, nn.MultiheadAttention) or n.rpartition(".")[2] in (*JOINT, *QUERY) for n, m in inside)

    @cached_property
    def blocks(self) -> tuple[ForeignBlock, ...]:
        owners: dict[str, str] = {}
        for attention in self.attentions:
            stride = getattr(self.modules[attention], "stride", 1)
            owner = self.block_of(attention) if stride in (1, (1, 1)) else None
            if owner is not None:
                owners.setdefault(owner, attention)
        owners = {name: at for name, at in owners.items() if not self._pools(name, at)} or owners
        lists = list(dict.fromkeys(parent(name) for name in owners))
        return tuple(
            ForeignBlock(name, at, self.attentions[at], lists.index(parent(name)), self._stem(name, owners))
            for name, at in owners.items()
        )

    def block_of(self, attention: str) -> str | None:
        """The nearest module around attention that has an MLP too: a known one, or two linear maps outside all
        attention. A list of both (T5's) is part of a block."""
        if attention in self.written:
            return attention
        for name in (n for n in ancestors(attention) if not isinstance(self.modules[n], nn.ModuleList | nn.ModuleDict)):
            maps = (n for n in self.maps if is_below(n, name))
            if any(is_below(n, name) for n in self.mlps) or sum(not self._in_attention(n) for n in maps) >= 2:
                return name
        return None

    def _pools(self, owner: str, attention: str) -> bool:
        """Whether attention pools tokens: its queries (1, n, C) are a parameter."""
        parameters = (p for name in (owner, attention) for p in self.modules[name].parameters(recurse=False))
        return any(p.ndim == 3 and len(p) == 1 and p.shape[2] > 1 for p in parameters)

    def _stem(self, block: str, blocks: dict[str, str]) -> str | None:
        """The last convolution outside the blocks, of the nearest part of the model that embeds images or words."""
        for part in ancestors(block):
            inside = [n for n in self.modules if is_below(n, part) and not any(within(n, b) for b in blocks)]
            stems = [n for n in inside if isinstance(self.modules[n], nn.Conv2d)]
            if stems:
                return max(stems, key=self._order.__getitem__)
            if any(isinstance(self.modules[n], nn.Embedding) for n in inside):
                return None
        return None

    @cached_property
    def class_token_stage(self) -> int | None:
        """The stage that a class token joins, in a model with stages: the one of its width."""
        widths = {
            parameter.shape[-1]
            for module in self.modules.values()
            for name, parameter in module.named_parameters(recurse=False)
            if name in ("cls_token", "class_token")
        }
        stages = {site.stage for site in self.sites if site.role == "attn" and site.dim in widths}
        return stages.pop() if len(stages) == 1 and self.stages > 1 else None

    def stem_of(self, site: NormSite) -> str | None:
        """The convolution that makes the tokens of a norm; None for sequences."""
        block = self.blocks[site.block] if site.block is not None else self._block_before(site.name)
        return block.stem if block else None

    @property
    def stages(self) -> int:
        return len({block.stage for block in self.blocks})

    @cached_property
    def sites(self) -> tuple[NormSite, ...]:
        layer = [name for name in self.modules if name in self.norms and ".vm_" not in f".{name}"]
        return tuple(self._site(name) for name in layer or self._batch_norms())

    def unknown_norms(self) -> list[str]:
        """Modules of blocks whose class is called a norm and is not one that is known."""
        known = (*OTHER_NORMS, nn.Identity)
        return [
            name
            for name, module in self.modules.items()
            if "norm" in type(module).__name__.lower()
            and any(within(name, block.name) for block in self.blocks)
            and not (isinstance(module, known) or ".vm_" in name)
            and not any(within(name, norm) or is_below(norm, name) for norm in self.norms)
        ]

    def _batch_norms(self) -> Iterator[str]:
        """Names of BatchNorms that follow a linear map in a module of the two."""
        for name, module in self.modules.items():
            children = list(module.named_children())
            if [type(child) for _, child in children] == [nn.Linear, nn.BatchNorm1d]:
                yield f"{name}.{children[1][0]}"

    def _site(self, name: str) -> NormSite:
        index = next((i for i, block in enumerate(self.blocks) if within(name, block.name)), None)
        block = self.blocks[index] if index is not None else None
        role = self._role_outside(name) if block is None else self._role_inside(name, block)
        beside = block or self._block_before(name)
        heads, stage = (beside.heads or None) if beside else None, block.stage if block else None
        norm = self.modules[name]
        return NormSite(name, role, type(norm).__name__, _dim(norm), heads, index, stage)

    def _block_before(self, name: str) -> ForeignBlock | None:
        """The block before a norm, or the first one."""
        before = [block for block in self.blocks if self._order[block.name] < self._order[name]]
        return before[-1] if before else next(iter(self.blocks), None)

    def _role_inside(self, name: str, block: ForeignBlock) -> str:
        norms = self._norms_of(block)
        if name not in norms:
            return "inside"
        if _dim(self.modules[name]) != _dim(self.modules[norms[0]]):
            return "block"
        if parent(name) != block.name:
            around = [n for n in ancestors(name) if is_below(n, block.name)]
            part = next((n for n in reversed(around) if not isinstance(self.modules[n], nn.ModuleList)), None)
            if part is None:
                return "block"
            return "attn" if any(within(a, part) for a in self.attentions) else "mlp"
        direct = [norm for norm in norms if parent(norm) == block.name]
        if len(direct) == 1 and self._order[name] > self._order[block.attention] and self._leaves_out_first(block):
            return "mlp"
        return ("attn", "mlp")[direct.index(name)] if len(direct) <= 2 else "block"

    def _leaves_out_first(self, block: ForeignBlock) -> bool:
        """Whether an Identity replaces the norm before attention (ModernBERT's first block)."""
        children = self.modules[block.name].named_children()
        return any(isinstance(child, nn.Identity) and "norm" in name for name, child in children)

    def _norms_of(self, block: ForeignBlock) -> list[str]:
        """Norms of the block that are not inside attention or MLP. A BatchNorm after a linear map is the last of its
        branch, for the one before belongs to what it maps to: queries, keys and values, or the hidden layer."""
        inside = [n for n in self.modules if within(n, block.name)]
        layer = [n for n in inside if n in self.norms and not self._in_attention(n)]
        if layer:
            return layer
        batch = [n for n in self._batch_norms() if within(n, block.name)]
        branches = [[n for n in batch if self._in_attention(n) == whether] for whether in (True, False)]
        return [names[-1] for names in branches if names]

    def _role_outside(self, name: str) -> str:
        blocks = [self._order[block.name] for block in self.blocks]
        if self._in_attention(name):
            return "inside"
        if not blocks or self._order[name] < blocks[0] or self._embeds(parent(name)):
            return "embed" if blocks else "block"
        around = [self._order[block.name] for block in self.blocks if is_below(block.name, parent(name))]
        return "merge" if not around and self._order[name] < blocks[-1] else "final"

    def _embeds(self, part: str) -> bool:
        """Whether a part of the model without blocks makes tokens of images or words."""
        if any(within(block.name, part) for block in self.blocks):
            return False
        return any(isinstance(m, nn.Conv2d | nn.Embedding) for n, m in self.modules.items() if within(n, part))

    def siblings(self, blocks: Collection[str], called: Collection[str]) -> list[str]:
        """Modules in the lists of the blocks that hold two linear maps too, and no attention that is recognized."""
        lists = {n for n in map(parent, blocks) if isinstance(self.modules[n], nn.ModuleList | nn.Sequential)}
        beside = [n for n in self.modules if parent(n) in lists and n in called and n not in blocks]
        return [
            name
            for name in beside
            if sum(isinstance(m, nn.Linear) for m in self.modules[name].modules()) >= 2
            and not any(within(a, name) for a in self.attentions)
        ]

    def reason(self, attention: str, called: Collection[str]) -> str:
        """Why an attention is in none of the blocks; what starts with "it" is no obstacle."""
        if any(self.modules[attention] is self.modules[other] for other in called if other != attention):
            return "is also at another place: give each place a copy (copy.deepcopy)"
        if attention not in called:
            return "is not run on this input: give example= that runs it"
        if getattr(self.modules[attention], "stride", 1) not in (1, (1, 1)):
            return "it changes the number of tokens"
        owner = self.block_of(attention)
        pools = owner is not None and self._pools(owner, attention)
        return "it pools tokens" if pools else "is not in a residual block with an MLP"

    def _in_attention(self, name: str) -> bool:
        return any(within(name, attention) for attention in self.attentions if attention not in self.written)


def count_heads(module: nn.Module) -> int:
    """The number of heads that an attention module states, itself or in its config; 0 for other modules."""
    values: list[Any] = [getattr(module, name, None) for name in _HEADS]
    if isinstance(getattr(module, "head_dim", None), int):  # the heads themselves are in the config (Llama, ModernBERT)
        values.append(getattr(getattr(module, "config", None), "num_attention_heads", None))
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)


def _dim(norm: nn.Module) -> int:
    shape = getattr(norm, "normalized_shape", None) or (getattr(norm, "num_features", None),)
    return int(shape[-1] or len(norm.weight))  # type: ignore[arg-type]


def eps_of(norm: nn.Module) -> float:
    """The eps of a norm. PyTorch's RMSNorm has by default that of the number type."""
    values = (getattr(norm, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return float(next((v for v in values if v is not None), torch.finfo(torch.float32).eps))


@torch.no_grad()
def rms_gain(norm: nn.Module) -> float | None:
    """Return what an RMSNorm adds to its weight for the gain: 0, or 1 (Gemma); None for another module.

    The name of the class ends in RMSNorm or LayerNorm, which also T5's has, and a copy with random weights computes
    x / sqrt(mean(x^2) + eps) * gain.
    """
    parameters = list(norm.named_parameters())
    named = type(norm).__name__.lower().endswith(("rmsnorm", "layernorm")) and not isinstance(norm, nn.LayerNorm)
    if not named or [name for name, _ in parameters] not in (["weight"], []) or list(norm.children()):
        return None
    try:
        dim, trial = _dim(norm), copy.deepcopy(norm).to_empty(device="cpu").float()
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randn(3, dim, generator=draw) * torch.tensor([[1.0], [1e-2], [1e-3]])  # eps shows in the last
        weight = torch.randn(dim, generator=draw) if parameters else torch.zeros(dim)
        for parameter in trial.parameters():
            parameter.copy_(weight)
        result = trial.forward(tokens)  # without hooks
    except Exception:  # a module of that name which takes something else
        return None
    plain = tokens * (tokens.square().mean(-1, keepdim=True) + eps_of(norm)).rsqrt()
    fits = isinstance(result, Tensor) and result.shape == plain.shape
    offsets = (0.0, 1.0) if parameters else (1.0,)
    return next((a for a in offsets if fits and torch.allclose(result, plain * (weight + a), 1e-4, 1e-5)), None)


def within(name: str, part: str) -> bool:
    return name == part or is_below(name, part)


def is_below(name: str, part: str) -> bool:
    return name != part and (part == "" or name.startswith(f"{part}."))


def parent(name: str) -> str:
    return name.rpartition(".")[0]


def ancestors(name: str) -> Iterator[str]:
    while name:
        name = parent(name)
        yield name


def is_map(module: nn.Module) -> bool:
    """Whether a module is a linear map: with Hugging Face's `Conv1D` (GPT-2), whose weight is (in, out), and with an
    adapter around one (LoRA)."""
    module = getattr(module, "base_layer", module)
    return isinstance(module, _MAPS) or type(module).__name__ == "Conv1D"


def maps_of(model: nn.Module) -> list[str]:
    """Names of the linear maps; those inside an adapter are part of it."""
    maps: dict[str, None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_map(module) and not any(n in maps for n in ancestors(name)):
            maps[name] = None
    return list(maps)


def widths(linear: nn.Module) -> tuple[int, int]:
    """Channels that a linear map reads and puts out."""
    linear = getattr(linear, "base_layer", linear)
    weight: Any = linear.weight
    if type(linear).__name__ == "Conv1D":
        return len(weight), weight.shape[1]
    return weight[0].numel(), len(weight)
