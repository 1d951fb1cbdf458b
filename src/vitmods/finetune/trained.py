"""Training a part of a model: its parameters are frozen or not, in place, and counted by role."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from vitmods.finetune.adapters import add_adapters
from vitmods.finetune.roles import ROLES, THIRD, TrainedPart, layer_of_parameters, parameter_roles
from vitmods.util.errors import UserError
from vitmods.util.text import Printed


@dataclass(frozen=True)
class Trained(Printed):
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
    """Set ``requires_grad`` of every parameter, in place: train a part of the model, freeze the rest.

    Args:
        model: a ViT of vitmods, timm, Hugging Face or torchvision. Make the optimizer afterwards.
        what: ``attention``, ``ffn``, ``norms``, ``head`` or another key of ``vitmods.finetune.ROLES``; ``biases``
            (BitFit, arXiv:2106.10199); ``last(4)``, the last four blocks and the final norm, or ``last``, a third of
            them; ``lora(rank=8,on=attention)`` or ``dora(...)``, which puts low-rank maps into the model (peft;
            `merge_adapters` merges them); several joined by + (``attention+norms``), or ``all``. The head goes along,
            and with roles of the backbone the position embedding, as published (Touvron et al., 2022, "Three things
            everyone should know about Vision Transformers", section 4). Or a function of the role that says what is
            trained; nothing goes along then.

    Returns:
        What is trained; print it for a table.

    Raises:
        UserError: a word is unknown (the nearest is named) or this model has none of it, or nothing would be trained.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"The model is an nn.Module, not a {type(model).__name__}: build it first.")
    part = TrainedPart.of(what) if isinstance(what, str) else None
    if part is not None and part.adapters is not None:
        add_adapters(model, part.adapters)
    roles = parameter_roles(model)
    present = set(roles.values())
    if part is not None:
        chosen = _names_of(model, part, roles)
    elif callable(what):
        chosen = {name for name, role in roles.items() if what(role)}
        if not chosen:
            raise UserError(f"Nothing would be trained: the function rejects all of {', '.join(sorted(present))}.")
    else:
        raise UserError(f"Name the trained roles as in 'attention+norms', or give a function, not {what!r}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
        if not parameter.requires_grad:
            parameter.grad = None
    return what_is_trained(model)


def _names_of(model: nn.Module, part: TrainedPart, roles: Mapping[str, str]) -> set[str]:
    """The parameters of a part. Raises UserError if the model has none of what it names."""
    present = set(roles.values())
    if (missing := sorted(part.roles - present)) and not part.is_all:
        raise UserError(
            f"This model does not have parameters with the role {', '.join(missing)}; its roles are "
            f"{', '.join(sorted(present))}."
        )
    named = part.roles | part.along | ({"adapters"} if part.adapters else set())
    chosen = {name for name, role in roles.items() if role in named}
    if part.biases:
        biases = {name for name in roles if name.endswith("bias")}
        if not biases:
            raise UserError("This model does not have biases: train norms or another role.")
        chosen |= biases
    if part.last:
        backbone, prefix = (model.backbone, "backbone.") if hasattr(model, "backbone") else (model, "")
        layers = layer_of_parameters(backbone)  # type: ignore[arg-type]
        depth = max((layers[name] for name in layers if roles[prefix + name] in ("attention", "ffn")), default=0)
        count = max(1, depth // 3) if part.last == THIRD else part.last
        if count >= depth:
            raise UserError(f"last({count}) is every block of this model, which has {depth}: give fewer, or train all.")
        chosen |= {prefix + name for name, layer in layers.items() if layer > depth - count}
    return chosen


def what_is_trained(model: nn.Module) -> Trained:
    """Count the trained and frozen parameters of a model by role."""
    roles = parameter_roles(model)
    counts = {role: [0, 0] for role in ROLES}
    for name, parameter in model.named_parameters():
        counts[roles[name]][not parameter.requires_grad] += parameter.numel()
    rows = tuple((role, trained, frozen) for role, (trained, frozen) in counts.items() if trained + frozen)
    return Trained(rows, tuple(name for name, p in model.named_parameters() if p.requires_grad))
