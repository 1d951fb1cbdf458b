"""The role of each parameter of a Vision Transformer, by the kind of its module, and which part of a model is trained:
roles, biases, the last blocks, or adapters beside frozen weights. Imports without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from vitmods.util.errors import UserError, nearest
from vitmods.util.shorthand import read_settings, split_form, split_outside

if TYPE_CHECKING:
    from torch import nn

ROLES = {
    "stem": "from pixels to patch tokens, without norms",
    "positions": "position embedding",
    "tokens": "class, register and mask tokens",
    "attention": "query, key, value and output projections, of every branch",
    "ffn": "the linear maps of the MLPs, of every branch",
    "norms": "all norms, wherever they sit",
    "layer_scale": "factors on the branches and on the stream",
    "head": "classifier, with the representation layer or attention pooling before it",
    "prompts": "learned tokens of the change `prompts`",
    "adapters": "low-rank maps beside the weights, of `lora` and `dora` or of peft",
    "other": "what has none of these roles",
}
ALL = "all"


class Way(NamedTuple):
    """A published way to adapt trained weights: what is trained, in a sentence, and where it was published."""

    title: str
    summary: str
    paper: str
    url: str


_HEAD = "The head is trained too; the other weights are frozen."
WAYS = {
    "roles": Way(
        "Trains only {}",
        "The head is trained too, and with more than the head the positions; the other weights are frozen.",
        "Touvron et al.: Three things everyone should know about Vision Transformers. ECCV 2022, section 4",
        "https://arxiv.org/abs/2203.09795",
    ),
    "biases": Way(
        "Trains only the biases (BitFit)",
        _HEAD,
        "Ben Zaken et al.: BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked "
        "Language-models. ACL 2022",
        "https://arxiv.org/abs/2106.10199",
    ),
    "last": Way(
        "Trains only the last {} blocks",
        f"The final norm is trained too. {_HEAD}",
        "Yosinski et al.: How transferable are features in deep neural networks? NeurIPS 2014",
        "https://arxiv.org/abs/1411.1792",
    ),
    "lora": Way(
        "Trains low-rank maps beside the weights (LoRA)",
        f"Each map W of {{}} becomes W + alpha / rank * B A; A and B are trained and merged into W at the end. {_HEAD}",
        "Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022",
        "https://arxiv.org/abs/2106.09685",
    ),
    "dora": Way(
        "Trains low-rank directions and magnitudes of the weights (DoRA)",
        f"Of each map of {{}} the norms of its outputs' weights are trained, and by low-rank maps their directions; "
        f"both are merged at the end. {_HEAD}",
        "Liu et al.: DoRA: Weight-Decomposed Low-Rank Adaptation. ICML 2024",
        "https://arxiv.org/abs/2402.09353",
    ),
}

# Class names of timm, transformers, torchvision, DeiT and vitmods; the first that matches counts.
_KINDS = (
    ("stem", r"PatchEmbed|Stem$"),
    ("norms", r"Norm|ScaleShift"),
    ("layer_scale", r"LayerScale|^Scale$"),
    ("head", r"Pool"),
    ("attention", r"Attention|Attn"),
    ("ffn", r"Mlp|MLP|FeedForward|SwiGLU|Intermediate|^ViTOutput$"),
)
# Names of modules and parameters without a class of their own, outside of the modules above.
_NAMES = (
    ("stem", r"conv_proj|conv_stem"),
    ("head", r"heads?|head_dist|classifier|pre_logits|fc"),
    ("positions", r"pos_embed|pos_embedding|position_embeddings?"),
    ("prompts", r"(vm_)?prompts\w*"),
    ("tokens", r"\w+_tokens?"),
    ("layer_scale", r"gamma_?\w*|lambda_?\w*|ls\d"),
)


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Return the role (a key of ROLES) of every parameter, by its name in ``model.named_parameters()``.

    A part of an attention or MLP has its role; a norm is a norm wherever it sits. A task's model (with ``backbone`` and
    ``roles``) defines the roles of its other modules, by default the head. For ViTs of vitmods, timm, Hugging Face and
    torchvision, parallel branches included, and most models that are built of such parts.
    """
    role_of: dict[str, str] = {}
    roles = getattr(model, "roles", None)
    if not isinstance(roles, Mapping) or not hasattr(model, "backbone"):
        _visit(model, "", None, role_of)
        return role_of
    for name, child in model.named_children():
        _visit(child, f"{name}.", None if name == "backbone" else roles.get(name, "head"), role_of)
    role_of |= {name: roles.get(name, "head") for name, _ in model.named_parameters(recurse=False)}
    return role_of


def _visit(module: nn.Module, prefix: str, role: str | None, role_of: dict[str, str]) -> None:
    from vitmods.layers import MLPS, NORMS

    def by_name(name: str) -> str | None:
        return next((role for role, pattern in _NAMES if re.fullmatch(pattern, name)), None)

    for name, _ in module.named_parameters(recurse=False):
        role_of[prefix + name] = role or by_name(name) or "other"
    for name, child in module.named_children():
        if any(type(child) is kind.module for kind in NORMS.values()):  # registered ones first, a user's too
            kind: str | None = "norms"
        elif type(child) in MLPS.values():
            kind = "ffn"
        else:
            kind = next((r for r, pattern in _KINDS if re.search(pattern, type(child).__name__)), None)
        if re.match("lora_|adapter", name):  # of peft, within any module
            kind = "adapters"
        child_role = kind if kind in ("norms", "adapters") else role or kind or by_name(name)
        _visit(child, f"{prefix}{name}.", child_role, role_of)


MATCH = 0  # instead of a rank


@dataclass(frozen=True)
class Adapters:
    """Low-rank maps B A of this rank beside the frozen weights W of the linear maps with the roles `on`, joined by +:
    the model computes with W + alpha / rank * B A. alpha: None is the rank. A rank MATCH trains as many parameters as
    `attention` does."""

    kind: str
    rank: int = 8
    alpha: float | None = None
    on: str = "attention"

    def __post_init__(self) -> None:
        if self.rank < MATCH or (self.alpha is not None and self.alpha <= 0):
            raise UserError(f"{self.kind}: rank is a whole number of at least 1 or match, and alpha is above 0.")
        for role in self.roles:
            if role not in ROLES or role in ("head", "norms", "adapters"):
                raise UserError(f"{self.kind}(on={self.on}): low-rank maps are for attention and ffn, joined by +.")

    @property
    def roles(self) -> list[str]:
        return [role.strip() for role in self.on.split("+")]

    def __str__(self) -> str:
        on = [] if self.on == "attention" else [f"on={'+'.join(self.roles)}"]
        rank = "match" if self.rank == MATCH else self.rank
        alpha = [] if self.alpha in (None, self.rank) else [f"alpha={self.alpha:g}"]
        return f"{self.kind}({','.join([f'rank={rank}', *alpha, *on])})"

    @classmethod
    def read(cls, kind: str, inside: str) -> Adapters:
        """Read `rank=8,on=attention` or `rank=match`; a number alone is the rank."""
        inside = re.sub(r"^\s*(?=\d)", "rank=", inside)
        values = read_settings(kind, "choice", inside, {"rank": str, "alpha": float, "on": str})
        rank = str(values.get("rank", cls.rank))
        if rank != "match" and not rank.isdecimal():
            raise UserError(f"{kind}: rank is a whole number of at least 1 or match, not {rank}.")
        return cls(kind, **{**values, "rank": MATCH if rank == "match" else int(rank) or -1})


THIRD = -1  # instead of a number of blocks


@dataclass(frozen=True)
class TrainedPart:
    """What of a model is trained: parameters with these roles, every bias, the last blocks, and adapters; the head goes
    along with each."""

    text: str
    roles: frozenset[str] = frozenset()
    biases: bool = False
    last: int = 0
    adapters: Adapters | None = None

    @classmethod
    def of(cls, text: str) -> TrainedPart:
        """Read a role, several joined by +, `all`, `biases`, `last(4)`, `lora(rank=8,on=attention)` or `dora(...)`.
        Raises UserError on an unknown word, naming the nearest."""
        roles, biases, last, adapters = set[str](), False, 0, list[Adapters]()
        words = split_outside(text, "+")
        for i, word in enumerate(words):
            name, inside = split_form(word) or (word, "")
            if name in ("lora", "dora"):
                adapters.append(Adapters.read(name, inside))
                words[i] = str(adapters[-1])  # "lora" and "lora(rank=8)" are one choice
            elif name == "last":
                last = THIRD if word == "last" else int(inside) if inside.strip().isdecimal() else 0
                if not last:
                    raise UserError(f"Say how many blocks are trained, as in last(4), or last for a third; not {word}.")
            elif word == "biases":
                biases = True
            elif word in (*ROLES, ALL):
                roles |= set(ROLES) if word == ALL else {word}
            else:
                known = sorted({*ROLES, ALL, *WAYS} - {"roles"})
                raise UserError(f"Unknown role '{word}'. {nearest(name, known)}")
        if len(adapters) > 1:
            raise UserError(
                f"'{text}' has two kinds of adapters: leave one out, or join the roles in on=attention+ffn."
            )
        return cls("+".join(words), frozenset(roles), biases, last, adapters[0] if adapters else None)

    def with_rank(self, rank: int) -> TrainedPart:
        """The same with adapters of another rank, if it has any."""
        if self.adapters is None:
            return self
        adapters = replace(self.adapters, rank=rank)
        return replace(self, text=self.text.replace(str(self.adapters), str(adapters)), adapters=adapters)

    @property
    def is_all(self) -> bool:
        return self.roles == set(ROLES)

    @property
    def names(self) -> frozenset[str]:
        """The roles and ways that it names, each with a learning rate of its own."""
        kinds = {"biases": self.biases, "last": self.last, self.adapters.kind if self.adapters else "": self.adapters}
        return self.roles | {name for name, is_named in kinds.items() if is_named}

    @property
    def along(self) -> frozenset[str]:
        """The roles that are trained along: the head, and with roles of the backbone the position embedding, as
        released for attention-only fine-tuning (Touvron et al., 2022, section 4)."""
        return frozenset({"head"} if self.roles <= {"head", "prompts", "adapters"} else {"head", "positions"})

    @property
    def way(self) -> Way:
        """What is trained, for people."""
        what, kinds = " and ".join(split_outside(self.text, "+")), self.names - self.roles
        if kinds and len(kinds) + bool(self.roles) > 1:
            return WAYS[min(kinds)]._replace(title=f"Trains only {what}", summary=_HEAD)
        way = WAYS[min(kinds, default="roles")]
        if self.adapters is not None:
            what = " and ".join(self.adapters.roles)
        elif self.last:
            what = "third of the" if self.last == THIRD else str(self.last)
        return way._replace(title=way.title.format(what), summary=way.summary.format(what))


def layer_of_parameters(model: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter: 0 for the stem with positions and tokens, i + 1 for block i, and one more for
    the final norm and the head, as in BEiT (arXiv:2106.08254).

    The layers are those of the model's `group_matcher()` (timm's contract); without one, blocks are the smallest
    modules with an attention and an MLP. Raises UserError if the model does not have either.
    """
    matcher = getattr(model, "group_matcher", None)
    if matcher is None:
        return _layers_by_blocks(model)
    from timm.models import group_parameters  # seconds
    from timm.models._manipulate import MATCH_PREV_GROUP

    patterns = matcher()
    if isinstance(patterns, dict):  # timm joins the final norm to the last block; here it goes with the head
        patterns = {
            name: [p for p in parts if p[1] != MATCH_PREV_GROUP] if isinstance(parts, list | tuple) else parts
            for name, parts in patterns.items()
        }
    layers: dict[str, int] = group_parameters(model, patterns, reverse=True)
    return layers


def _layers_by_blocks(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter: outside of blocks that of the block before it, as modules are registered."""
    role_of, inside = parameter_roles(model), dict[str, set[str]]()
    for name, role in role_of.items():
        for end in (index for index, letter in enumerate(name) if letter == "."):
            inside.setdefault(name[:end], set()).add(role)
    whole = [module for module, roles in inside.items() if {"attention", "ffn"} <= roles]
    blocks = [module for module in whole if not any(other.startswith(f"{module}.") for other in whole)]
    if not blocks:
        raise UserError(
            f"layer_decay and last(...) need a model with blocks of an attention and an MLP, or with group_matcher() "
            f"as timm's models: {type(model).__name__} does not say which block a parameter is in."
        )
    layers, before = dict[str, int](), 0
    for name, role in role_of.items():
        block = next((number for number, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), 0)
        before = block or before
        layers[name] = block or before + (before == len(blocks))
        if not block and role in ("stem", "positions", "tokens", "head"):
            layers[name] = len(blocks) + 1 if role == "head" else 0
    return layers
