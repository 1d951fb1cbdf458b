"""What is trained, and AdamW or SGD with two groups of parameters: those that decay and those that do not."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vitmods.finetune import train_only
from vitmods.finetune.roles import ALL
from vitmods.recipes import Recipe


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups, `decay` and `no_decay`.

    Scalars, vectors (biases, norms, layer scales) and what `model.no_weight_decay()` names (position embedding, tokens)
    do not decay.
    """
    no_weight_decay: Any = getattr(model, "no_weight_decay", set)  # timm's contract; other models spare by shape alone
    spared = set(no_weight_decay())
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_spared = parameter.ndim <= 1 or name.endswith("bias") or name in spared
        (no_decay if is_spared else decay).append(parameter)
    return [
        {"params": decay, "weight_decay": weight_decay, "name": "decay"},
        {"params": no_decay, "weight_decay": 0.0, "name": "no_decay"},
    ]


def freeze(model: nn.Module, recipe: Recipe) -> None:
    """Freeze what the recipe does not train. With `train="all"` that is what was frozen before, and nothing else.

    Raises:
        UserError: the model has nothing of what is to be trained.
    """
    if recipe.train != ALL:
        train_only(model, recipe.train)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) or SGD over every trainable parameter of `model`, by the fused kernel if there is one.

    SGD adds `weight_decay` times the weight to the gradient, which the momentum then carries on.

    Raises:
        ValueError: the model has nothing to train.
    """
    groups = [group for group in parameter_groups(model, recipe.weight_decay) if group["params"]]
    if not groups:
        raise ValueError("the model has no trainable parameter; set requires_grad on those that are to be trained.")
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(parameter.is_floating_point() and parameter.device.type in _FUSED for parameter in parameters)
    how: dict[str, Any] = {"lr": recipe.lr, "fused": fused, "foreach": None if fused else True}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=recipe.momentum, **how)
    return torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2), eps=recipe.adam_eps, **how)


_FUSED = ("cpu", "cuda", "mps")


def check_every_parameter_is_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless the optimiser's groups hold each trainable parameter of `model` exactly once.

    A parameter that is replaced after the optimiser was made (a new head, a cast) would otherwise silently keep its
    initial value.
    """
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in set(held)]
    if missing:
        raise ValueError(f"the optimiser does not hold {_some(missing)}; make it after the last change of the model.")
    if len(held) != len(set(held)):
        raise ValueError("a parameter is in two of the optimiser's groups.")


def without_gradient(model: nn.Module) -> list[str]:
    """Names of trainable parameters that the last backward pass gave no gradient."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def _some(names: Iterable[str], shown: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
