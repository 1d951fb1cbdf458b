"""New norms of a trained model that are blended in while it trains, so that it begins as the function that it was."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.layers.gentle import fit_norms

QUERIES_AND_KEYS = ("q_norm", "k_norm")


def owners_of_new_norms(*models: nn.Module) -> list[Any]:
    """The modules whose `new_norms` are those that `vm.apply` added and no training has blended in."""
    return [module for model in models for module in model.modules() if getattr(module, "new_norms", ())]


def fit_new_norms(model: nn.Module, batches: Iterable[Tensor]) -> bool:
    """Give new norms the gains and biases with which they come closest to what they read (least squares), but those of
    queries and keys, which train worse then. Images (B, channels, height, width) of training are read where there are
    such norms; returns whether there are."""
    fitted = False
    for owner in owners_of_new_norms(model):
        names = (name for name, module in owner.named_modules() if module in owner.new_norms)
        norms = [owner.get_submodule(name) for name in names if not name.endswith(QUERIES_AND_KEYS)]
        if learned := [norm for norm in norms if isinstance(getattr(norm, "weight", None), nn.Parameter)]:
            fit_norms(owner, learned, batches, together=True)
            fitted = True
    return fitted


class BlendedNorms:
    """Norms N that `vm.apply` put into a trained model, computed as ``x + a (N(x) - x)`` for a from 0 to 1.

    With a = 0 the model computes what it did before the change. Modules, names and weights are those of the changed
    model at any time: hooks blend, and a = 1 takes them off. ::

        fit_new_norms(model, [images])
        blended = BlendedNorms(model)
        for step in range(steps):
            blended.set(2 * step / steps)
            ...  # a step of training
    """

    def __init__(self, *models: nn.Module) -> None:
        """models: with changes, and copies of them, which share a. What `vm.apply` gave is blended once."""
        self._owners = owners_of_new_norms(*models)
        self.norms: list[nn.Module] = [norm for owner in self._owners for norm in owner.new_norms]
        device = next((parameter.device for model in models for parameter in model.parameters()), None)
        fraction = self._fraction = torch.zeros((), device=device)

        def blend(norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return torch.lerp(args[0].to(output.dtype), output, fraction.to(output.dtype))

        self._hooks = [norm.register_forward_hook(blend) for norm in self.norms]

    def set(self, fraction: float) -> None:
        """Set a, without waiting for the device. From 1 on the norms are plain ones, which are not new any more."""
        self._fraction.fill_(min(fraction, 1.0))
        if fraction >= 1:
            self.remove()
            for owner in self._owners:
                owner.new_norms = ()
            self.norms = []

    def remove(self) -> None:
        """Take the hooks off, whatever a is."""
        for hook in self._hooks:
            hook.remove()
