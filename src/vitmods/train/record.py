"""What a training may record of the inside of its model: gradient norms by layer, and the lambdas of its norms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.finetune.roles import parameter_roles
from vitmods.layers import DynamicTokenNorm

GRADIENT, LAMBDA = "gradient/", "lambda"
STEM, HEAD = "stem", "head"
_BLOCK = re.compile(r"(?:[A-Za-z_]\w*\.)+?\d+(?:\.blocks\.\d+)?(?=\.)")


def layers_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trained parameters of each layer: `stem`, the blocks by their names in order, `head`.

    The stem is what the patches are projected with, without its norms, so that models with and without norms there are
    compared by the same parameters. A block is all that it trains. The head is the classifier with a representation
    layer or pooling before it. Positions, tokens and norms outside of blocks belong to no layer.
    """
    roles, found = parameter_roles(model), dict[str, list[nn.Parameter]]()
    for name, parameter in model.named_parameters():
        role, name = roles[name], name.removeprefix("backbone.")
        block = _BLOCK.match(name) if role not in (STEM, HEAD) else None
        layer = block[0] if block else role if role in (STEM, HEAD) else None
        if parameter.requires_grad and layer is not None and not (role == "norms" and name.startswith("patch_embed.")):
            found.setdefault(layer, []).append(parameter)
    order = {STEM: 0, HEAD: 2}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], 1)))


class Recorder:
    """Called by the training loop; leaves the training itself alone, bit for bit.

    Args:
        model: that is trained, with its task's modules.
        record: "gradients", "lambdas", both or none.
        processes: how many train together: statistics are parts of a sum over them.
    """

    def __init__(self, model: nn.Module, record: Sequence[str], processes: int = 1) -> None:
        self._layers = layers_of(model) if "gradients" in record else {}
        self._lambdas, self._processes = "lambdas" in record, processes

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Statistics of the step: the norm of the gradient of each layer's parameters as backward left it, before
        clipping; 0-d, on the device."""
        found = {}
        for layer, parameters in self._layers.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                found[GRADIENT + layer] = nn.utils.get_total_norm(gradients) / self._processes
        return found

    def lambdas(self, model: nn.Module) -> dict[str, Any]:
        """What a row of the log has after an evaluation of `model`; empty where none are recorded or there are none."""
        found = lambdas_of(model) if self._lambdas else {}
        return {LAMBDA: found} if found else {}


@torch.no_grad()
def lambdas_of(model: nn.Module) -> dict[str, list[float]]:
    """`mean` and `variance` with the name of each dynamic token norm -> its learned lambda of each head."""
    found: dict[str, list[float]] = {}
    for name, module in model.named_modules():
        if isinstance(module, DynamicTokenNorm):
            for what, values in zip(("mean", "variance"), module.lambdas(), strict=True):
                if isinstance(values, Tensor):
                    found[f"{what} {name.removeprefix('backbone.')}"] = [round(v, 6) for v in values.tolist()]
    return found
