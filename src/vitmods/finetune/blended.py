"""New norms of a trained model that are blended in while it trains, so that it begins as the function that it was."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class BlendedNorms:
    """Norms N that `vm.apply` put into a trained model, computed as ``x + a (N(x) - x)`` for a from 0 to 1.

    With a = 0 the model computes what it did before the change. Modules, names and weights are those of the changed
    model at any time: hooks blend, and a = 1 takes them off. ::

        blended = BlendedNorms(model)
        for step in range(steps):
            blended.set(2 * step / steps)
            ...  # a step of training
    """

    def __init__(self, *models: nn.Module) -> None:
        """models: with changes, and copies of them, which share a. What `vm.apply` gave is blended once."""
        self._owners: list[Any] = [m for model in models for m in model.modules() if getattr(m, "new_norms", ())]
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
            for hook in self._hooks:
                hook.remove()
            for owner in self._owners:
                owner.new_norms = ()
            self.norms = []

    def fit(self, batches: Iterable[Tensor], how: str) -> None:
        pass
