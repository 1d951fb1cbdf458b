"""The role of each parameter of a Vision Transformer, by the kind of its module, and training of some roles alone.
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
    ("layer_scale", r"LayerScale"),
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
    ("layer_scale", r"gamma_\w+|lambda_\w+"),
)


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """The role (a key of ROLES) of every parameter, by its name in ``model.named_parameters()``.

    A part of an attention or MLP has its role; a norm is a norm wherever it sits. A model that has a ``backbone`` and
    ``roles`` (a task's) says itself what its other modules are, the head where it does not. For ViTs of vitmods, timm,
    Hugging Face and torchvision, parallel branches included; most models that are built of such parts can be read too.
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
    for name, _ in module.named_parameters(recurse=False):
        role_of[prefix + name] = role or _by_name(name) or "other"
    for name, child in module.named_children():
        _visit(child, f"{prefix}{name}.", _role_of(child, name, role), role_of)


def _role_of(module: nn.Module, name: str, inherited: str | None) -> str | None:
    kind = _registered(module) or next((r for r, pattern in _KINDS if re.search(pattern, type(module).__name__)), None)
    if kind == "norms":
        return kind
    return inherited or kind or _by_name(name)


def _registered(module: nn.Module) -> str | None:
    """The role of our own kinds of parts, and of those that a user has added."""
    from vitmods.layers import MLPS, NORMS

    if any(type(module) is kind.module for kind in NORMS.values()):
        return "norms"
    return "ffn" if type(module) in MLPS.values() else None


def _by_name(name: str) -> str | None:
    return next((role for role, pattern in _NAMES if re.fullmatch(pattern, name)), None)


def chosen_roles(what: str) -> tuple[set[str], set[str]]:
    """The roles that a choice names, and those that are trained along with them.

    ``what`` is one of ROLES or several joined by +, or ``all``. The head is always trained along, and with anything but
    the head alone the position embedding, as attention-only fine-tuning was released (Touvron et al., 2022, section 4).
    Raises UserError on an unknown role, naming the nearest.
    """
    words = [word.strip() for word in what.split("+")]
    for word in words:
        if word not in (*ROLES, ALL):
            raise UserError(f"There is no role '{word}' to train. {nearest(word, (*ROLES, ALL))}")
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
    """Set ``requires_grad`` of every parameter by its role, in place: what is chosen is trained, all else is frozen.

    Args:
        model: a ViT of vitmods, timm, Hugging Face or torchvision. Make the optimizer afterwards.
        what: ``attention``, ``ffn``, ``norms``, ``head`` or another key of ``vitmods.finetune.ROLES``, several joined
            by + (``attention+norms``), or ``all``. The head goes along, and with anything but the head alone the
            position embedding, as published (Touvron et al., 2022, "Three things everyone should know about Vision
            Transformers", section 4). Or a function of the role that says what is trained; nothing goes along then.

    Returns:
        What is trained; print it for a table.

    Raises:
        UserError: a role is unknown (the nearest is named) or this model has none of it, or nothing would be trained.
    """
    roles = parameter_roles(model)
    parameters = dict(model.named_parameters())
    there = {roles[name] for name in parameters}
    chosen = _chosen(what, there)
    for name, parameter in parameters.items():
        parameter.requires_grad_(roles[name] in chosen)
        if not parameter.requires_grad:
            parameter.grad = None
    return what_is_trained(model)


def what_is_trained(model: nn.Module) -> Trained:
    """The table of a model as it is, however its parameters were frozen."""
    roles = parameter_roles(model)
    counts = {role: [0, 0] for role in ROLES}
    for name, parameter in model.named_parameters():
        counts[roles[name]][not parameter.requires_grad] += parameter.numel()
    rows = tuple((role, trained, frozen) for role, (trained, frozen) in counts.items() if trained + frozen)
    return Trained(rows, tuple(name for name, p in model.named_parameters() if p.requires_grad))


def _chosen(what: str | Callable[[str], bool], there: set[str]) -> set[str]:
    """The roles to train of those that the model has."""
    if callable(what):
        chosen = {role for role in there if what(role)}
        if not chosen:
            raise UserError(f"Nothing would be trained: the function says no to all of {', '.join(sorted(there))}.")
        return chosen
    if not isinstance(what, str):
        raise UserError(
            f"What is trained is named by roles, as 'attention+norms', or chosen by a function, not {what!r}."
        )
    named, along = chosen_roles(what)
    missing = sorted(named - there)
    if missing and named != set(ROLES):
        raise UserError(
            f"This model has no parameters with the role {', '.join(missing)}; it has {', '.join(sorted(there))}."
        )
    return (named | along) & there
