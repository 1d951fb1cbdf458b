"""Train some parts of a model and freeze the others, by what they are for."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from vitmods.finetune.roles import ROLES, chosen_roles, parameter_roles
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class Trained:
    """What is trained; prints as a table with a row a role."""

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
