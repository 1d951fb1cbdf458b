"""A moving average of weights and buffers without the usual bias towards the start."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """Exponential moving average of a model, weighted so that the initial weights do not count.

    After n updates with models w_1 ... w_n the average is sum_i d^(n-i) w_i / sum_i d^(n-i): the bias correction of
    Adam (arXiv:1412.6980, section 3) applied to weights. A short training is thus averaged as honestly as a long one,
    and the decay needs no warm-up. Integer buffers (counters) are copied. Frozen parameters, which are their own
    average, are the model's own: freeze before.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        self.model = copy.deepcopy(model, frozen).requires_grad_(False).eval()
        both = zip(_tensors(self.model), _tensors(model), strict=True)
        pairs = [(mean, source) for mean, source in both if mean.data_ptr() != source.data_ptr()]
        self._means = [mean for mean, _ in pairs if mean.is_floating_point()]
        self._sources = [source for _, source in pairs if source.is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Count the model as it is now."""
        self.updates += 1
        weight = (1 - self.decay) / (1 - self.decay**self.updates)
        torch._foreach_lerp_(self._means, self._sources, weight)
        for mean, source in self._copied:
            mean.copy_(source)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self.model.load_state_dict(state["model"])


def _tensors(model: nn.Module) -> list[Tensor]:
    return [p.data for p in model.parameters()] + list(model.buffers())
