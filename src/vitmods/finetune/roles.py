"""The role of each parameter of a Vision Transformer, by the kind of its module, and training of only some roles.
Imports without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitmods.util.errors import UserError, nearest

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
    "other": "what has none of these roles",
}
ALL = "all"

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
        child_role = kind if kind == "norms" else role or kind or by_name(name)
        _visit(child, f"{prefix}{name}.", child_role, role_of)


def chosen_roles(what: str) -> tuple[set[str], set[str]]:
    """Return the roles that a choice names, and those that are trained along with them.

    ``what`` is one of ROLES or several joined by +, or ``all``. The head is always trained along, and unless only the
    head is chosen the position embedding too, as released for attention-only fine-tuning (Touvron et al., 2022,
    section 4).
    Raises UserError on an unknown role, naming the nearest.
    """
    words = [word.strip() for word in what.split("+")]
    for word in words:
        if word not in (*ROLES, ALL):
            raise UserError(f"Unknown role '{word}'. {nearest(word, (*ROLES, ALL))}")
    if ALL in words:
        return set(ROLES), set()
    named = set(words)
    return named, {"head"} if named == {"head"} else {"head", "positions"}


@dataclass(frozen=True)
class Trained:
    """The trained parameters; prints as a table with a row for each role."""

    rows: tuple[tuple[str, int, int], ...]
    """(role, trained parameters, frozen parameters), for the roles that the model has"""
    names: tuple[str, ...]
    """the trained parameters"""

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(trained for _, trained, _ in self.rows)

    @property
    def frozen(self) -> int:
        """Number of frozen parameters."""
        return sum(frozen for _, _, frozen in self.rows)

    def __str__(self) -> str:
        total = max(1, self.trained + self.frozen)
        lines = [f"{'':<12}{'trained':>14}{'frozen':>14}"]
        lines += [f"{role:<12}{trained:>14,}{frozen:>14,}" for role, trained, frozen in self.rows]
        lines += [f"{'all':<12}{self.trained:>14,}{self.frozen:>14,}  ({100 * self.trained / total:.1f} % trained)"]
        return "\n".join(lines)


def train_only(model: nn.Module, what: str | Callable[[str], bool]) -> Trained:
    """Set ``requires_grad`` of every parameter by its role, in place: train the chosen roles, freeze all others.

    Args:
        model: a ViT of vitmods, timm, Hugging Face or torchvision. Make the optimizer afterwards.
        what: ``attention``, ``ffn``, ``norms``, ``head`` or another key of ``vitmods.finetune.ROLES``, several joined
            by + (``attention+norms``), or ``all``. The head goes along, and unless only the head is chosen the
            position embedding, as published (Touvron et al., 2022, "Three things everyone should know about Vision
            Transformers", section 4). Or a function of the role that says what is trained; nothing goes along then.

    Returns:
        What is trained; print it for a table.

    Raises:
        UserError: a role is unknown (the nearest is named) or this model has none of it, or nothing would be trained.
    """
    roles = parameter_roles(model)
    present = set(roles.values())
    if callable(what):
        chosen = {role for role in present if what(role)}
        if not chosen:
            raise UserError(f"Nothing would be trained: the function rejects all of {', '.join(sorted(present))}.")
    elif isinstance(what, str):
        named, along = chosen_roles(what)
        missing = sorted(named - present)
        if missing and named != set(ROLES):
            raise UserError(
                f"This model does not have parameters with the role {', '.join(missing)}; its roles are "
                f"{', '.join(sorted(present))}."
            )
        chosen = (named | along) & present
    else:
        raise UserError(f"Name the trained roles as in 'attention+norms', or give a function, not {what!r}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(roles[name] in chosen)
        if not parameter.requires_grad:
            parameter.grad = None
    return what_is_trained(model)


def what_is_trained(model: nn.Module) -> Trained:
    """Count the trained and frozen parameters of a model by role."""
    roles = parameter_roles(model)
    counts = {role: [0, 0] for role in ROLES}
    for name, parameter in model.named_parameters():
        counts[roles[name]][not parameter.requires_grad] += parameter.numel()
    rows = tuple((role, trained, frozen) for role, (trained, frozen) in counts.items() if trained + frozen)
    return Trained(rows, tuple(name for name, p in model.named_parameters() if p.requires_grad))
