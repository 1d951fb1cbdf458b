"""AdamW, and SGD with momentum, whose running mean of gradients is stored in bfloat16, by big_vision's arithmetic.

The stored mean is rounded, and so is the factor that it decays by: 0.9 is 0.8984375. A step uses the new mean before it
is rounded. All else is in the type of the parameters.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitmods.train.distributed import local

_MEAN = "mean"


class _BFloat16Mean(Optimizer):
    """Parameters with gradients, group by group, and the stored means."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer, which casts what it loads to the type of the parameters: the means are cast back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state[_MEAN] = state[_MEAN].bfloat16()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step; there is no closure to call."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            group["step"] = group.get("step", 0) + 1
            for some in _together(parameters):
                self._step(group, some, [parameter.grad for parameter in some if parameter.grad is not None])

    def _step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def _stored(self, name: str, parameters: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """A tensor of each parameter's state, which begins with zeros."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter, dtype=dtype)
        return [self.state[parameter][name] for parameter in parameters]

    def _new_means(
        self, parameters: list[Tensor], gradients: list[Tensor], decay: float, fraction: float
    ) -> list[Tensor]:
        """decay * mean + share * gradient, of which the rounded form is stored."""
        stored = self._stored(_MEAN, parameters, torch.bfloat16)
        carried = torch._foreach_mul(stored, torch.tensor(decay, dtype=torch.bfloat16).item())
        means = [old.to(gradient.dtype) for old, gradient in zip(carried, gradients, strict=True)]
        torch._foreach_add_(means, gradients, alpha=fraction)
        torch._foreach_copy_([*map(local, stored)], [*map(local, means)])  # it does not know divided tensors
        return means


def _together(parameters: list[Tensor]) -> list[list[Tensor]]:
    """A GPU takes all at once; on a CPU the intermediate tensors of one parameter stay in its cache."""
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return [[parameter] for parameter in parameters]
    return [parameters]


class BFloat16AdamW(_BFloat16Mean):
    """`torch.optim.AdamW` but for the mean of gradients; the mean of squares is not rounded."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        means = self._new_means(parameters, gradients, beta1, 1 - beta1)
        squares = self._stored("square", parameters)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, means, roots, -lr / (1 - beta1 ** group["step"]))


class BFloat16SGD(_BFloat16Mean):
    """`torch.optim.SGD` with momentum but for its buffer, a sum of gradients here as there."""

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        sums = self._new_means(parameters, gradients, group["momentum"], 1.0)
        torch._foreach_add_(parameters, sums, alpha=-group["lr"])
