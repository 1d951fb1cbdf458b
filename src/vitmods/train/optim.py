"""What is trained, in groups of one decay and one fraction of the learning rate; optimizer and moving average.

AdamW, and SGD with momentum, whose running mean of gradients is stored in bfloat16, by big_vision's arithmetic.

The stored mean is rounded, and so is the factor that it decays by: 0.9 is 0.8984375. A step uses the new mean before it
is rounded. All else is in the type of the parameters.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from vitmods.finetune import train_only
from vitmods.finetune.roles import ALL
from vitmods.recipes import Recipe
from vitmods.tasks.base import TaskModel
from vitmods.train.distributed import load_weights, local, whole
from vitmods.util.errors import UserError

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


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float | None = None, decay_all: bool = False
) -> list[dict[str, Any]]:
    """Trainable parameters in groups of the same `weight_decay` and `lr_scale`, their fraction of the learning rate.

    Scalars, vectors (biases, norms, layer scales) and what `model.no_weight_decay()` names (position embedding, tokens)
    do not decay, unless `decay_all`. `layer_decay`: see `layer_scales`; a task's modules beside the backbone have their
    own `lr_scales`.
    """
    backbone, prefix = (model.backbone, "backbone.") if isinstance(model, TaskModel) else (model, "")
    no_weight_decay: Any = getattr(backbone, "no_weight_decay", set)  # timm's contract; others spare by shape alone
    spared = {prefix + name for name in no_weight_decay()}
    scales = {} if layer_decay is None else layer_scales(backbone, layer_decay)
    scales = {prefix + name: scale for name, scale in scales.items()}
    if isinstance(model, TaskModel):
        found_scales = ((name, model.lr_scales.get(name.partition(".")[0])) for name, _ in model.named_parameters())
        scales |= {name: scale for name, scale in found_scales if scale is not None}
    found: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = not decay_all and (parameter.ndim <= 1 or name.endswith("bias") or name in spared)
            found.setdefault((scales.get(name, 1.0), is_spared), []).append(parameter)
    return [
        {
            "params": found[scale, is_spared],
            "weight_decay": 0.0 if is_spared else weight_decay,
            "lr_scale": scale,
            "name": "no_decay" if is_spared else "decay",
        }
        for scale, is_spared in sorted(found)
    ]


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """The fraction of the learning rate of every parameter: layer_decay ** (L + 1 - layer) in a model of L blocks.

    Layer 0 is the stem with positions and tokens, i + 1 block i, and L + 1 the final norm and the head, as in BEiT
    (arXiv:2106.08254). Which is which says the model's `group_matcher()` (timm's contract).

    Raises:
        UserError: the model has none.
    """
    from timm.models import group_parameters  # seconds

    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise UserError(
            f"layer_decay needs a model that says which block a parameter is in: {type(model).__name__} has no "
            "group_matcher(), as timm's models and vitmods.vit have. Set layer_decay to None."
        )
    layers = group_parameters(model, _without_joined(matcher()), reverse=True)
    last = max(layers.values())
    return {name: layer_decay ** (last - layer) for name, layer in layers.items()}


def _without_joined(matcher: Any) -> Any:
    """A group matcher that leaves out what timm joins to the last block: the final norm then goes with the head."""
    from timm.models._manipulate import MATCH_PREV_GROUP

    if not isinstance(matcher, dict):
        return matcher
    return {
        name: [part for part in parts if part[1] != MATCH_PREV_GROUP] if isinstance(parts, list | tuple) else parts
        for name, parts in matcher.items()
    }


def freeze(model: nn.Module, recipe: Recipe) -> None:
    """Freeze what the recipe does not train. With `train="all"` that is what was frozen before, and nothing else.

    Raises:
        UserError: the model has nothing of what is to be trained.
    """
    if recipe.train != ALL:
        train_only(model, recipe.train)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101), SGD or LAMB (arXiv:1904.00962) over every trainable parameter of `model`.

    SGD adds `weight_decay` times the weight to the gradient, which the momentum then carries on. LAMB is timm's, whose
    own clipping is off: `clip_gradients` clips for all three.

    Raises:
        ValueError: the model has nothing to train.
        UserError: the recipe has a layer_decay and the model does not say which layers it has.
    """
    own = recipe.optimizer
    groups = parameter_groups(model, own.weight_decay, own.layer_decay, own.decay_all)
    if not groups:
        raise ValueError("the model has no trainable parameter; set requires_grad on those that are to be trained.")
    lr = recipe.optimizer.lr * recipe.lr_scale
    adam: dict[str, Any] = {
        "lr": lr,
        "betas": (recipe.optimizer.beta1, recipe.optimizer.beta2),
        "eps": recipe.optimizer.adam_eps,
    }
    if recipe.optimizer.name == "lamb":
        from timm.optim.lamb import Lamb  # seconds

        return Lamb(groups, max_grad_norm=None, **adam)
    if recipe.optimizer.moment == "bfloat16":
        sgd = recipe.optimizer.name == "sgd"
        return BFloat16SGD(groups, lr, recipe.optimizer.momentum) if sgd else BFloat16AdamW(groups, **adam)
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(p.is_floating_point() and p.device.type in _FUSED and not _rehearsed(p) for p in parameters)
    how: dict[str, Any] = {"fused": fused, "foreach": None if fused else True}
    if recipe.optimizer.name == "sgd":
        return torch.optim.SGD(groups, lr, momentum=recipe.optimizer.momentum, **how)
    return torch.optim.AdamW(groups, **adam, **how)


def _rehearsed(parameter: torch.Tensor) -> bool:
    """Whether it stands for one whose memory is counted: fused CPU kernels have no fake form."""
    return type(parameter) is FakeTensor and parameter.device.type == "cpu"


_FUSED = ("cpu", "cuda", "mps")


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> Tensor:
    """Scale all gradients by largest / norm if their global norm is more than that; the norm before, 0-d.

    Exact, as optax's: torch.nn.utils.clip_grad_norm_ divides by the norm plus 1e-6.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    torch._foreach_mul_([local(gradient) for gradient in gradients], (largest / norm).clamp(max=1.0))
    return norm


def check_every_parameter_is_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless the optimizer's groups hold each trainable parameter of `model` exactly once.

    A parameter that is replaced after the optimizer was made (a new head, a cast) would otherwise silently keep its
    initial value.
    """
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in set(held)]
    if missing:
        raise ValueError(f"the optimizer does not hold {_some(missing)}; make it after the last change of the model.")
    if len(held) != len(set(held)):
        raise ValueError("a parameter is in two of the optimizer's groups.")


def without_gradient(model: nn.Module) -> list[str]:
    """Names of trainable parameters that the last backward pass gave no gradient."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def _some(names: Iterable[str], shown: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


class Ema:
    """Exponential moving average of a model, weighted so that the initial weights do not count.

    After n updates with models w_1 ... w_n the average is sum_i d^(n-i) w_i / sum_i d^(n-i): the bias correction of
    Adam (arXiv:1412.6980, section 3) applied to weights. A short training is thus averaged as honestly as a long one,
    and the decay needs no warm-up. Integer buffers (counters) are copied. Frozen parameters, which are their own
    average, are the model's own: freeze before.
    """

    def __init__(self, model: nn.Module, decay: float, divide: Callable[[nn.Module], None] | None = None) -> None:
        """divide: divides the average among processes, as the model is divided then (before `follow`)."""
        self.decay = decay
        self.updates = 0
        shared = {} if divide else {id(p): p for p in model.parameters() if not p.requires_grad}
        self.model = copy.deepcopy(model, shared).requires_grad_(False).eval()
        if divide is not None:
            divide(self.model)
        else:
            self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Average this model, the one that was given or what has become of it."""
        both = zip(_tensors(self.model), _tensors(model), strict=True)
        pairs = [(local(mean.data), local(source.data)) for mean, source in both if mean is not source]
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
        load_weights(self.model, state["model"])


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
