"""Groups of parameters with one decay and one fraction of the learning rate; optimizer and moving average."""

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitmods.finetune import parameter_roles, train_only
from vitmods.finetune.roles import ALL, layer_of_parameters
from vitmods.recipes import Recipe
from vitmods.recipes.schedule import half_cosine
from vitmods.tasks.base import TaskModel
from vitmods.train.distributed import load_weights, local, whole
from vitmods.util.text import first_of

_FUSED = ("cpu", "cuda", "mps")


class BFloat16Moment(Optimizer):
    """AdamW (groups with `betas`), or SGD (with `momentum`), that stores the running mean of gradients in bfloat16.

    By big_vision's arithmetic: the stored mean is rounded, and so is the factor that it decays by (0.9 is 0.8984375). A
    step uses the new mean before it is rounded. All else is in the type of the parameters, as Adam's mean of squares.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; optimizers cast it to the type of the parameters, so the means are cast back."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["mean"] = state["mean"].bfloat16()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            if not parameters:
                continue
            if "momentum" in group:
                if group["weight_decay"]:
                    gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
                sums = self._new_means(parameters, gradients, group["momentum"], 1.0)
                torch._foreach_add_(parameters, sums, alpha=-group["lr"])
                continue
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

    def _stored(self, name: str, parameters: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return a tensor of each parameter's state, at first zeros."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter, dtype=dtype)
        return [self.state[parameter][name] for parameter in parameters]

    def _new_means(
        self, parameters: list[Tensor], gradients: list[Tensor], decay: float, fraction: float
    ) -> list[Tensor]:
        """Return decay * mean + fraction * gradient, and store its rounded form."""
        stored = self._stored("mean", parameters, torch.bfloat16)
        decayed = torch._foreach_mul(stored, torch.tensor(decay, dtype=torch.bfloat16).item())
        means = [old.to(gradient.dtype) for old, gradient in zip(decayed, gradients, strict=True)]
        torch._foreach_add_(means, gradients, alpha=fraction)
        torch._foreach_copy_([*map(local, stored)], [*map(local, means)])  # it does not support sharded tensors
        return means


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float | None = None, decay_all: bool = False
) -> list[dict[str, Any]]:
    """Group the trainable parameters by `weight_decay` and `lr_scale`, their fraction of the learning rate.

    Scalars, vectors (biases, norms, layer scales) and what `model.no_weight_decay()` names (position embedding, tokens)
    do not decay, unless `decay_all`. `layer_decay`: see `layer_scales`; a task's own modules have `lr_scales`.
    """
    backbone, prefix = (model.backbone, "backbone.") if isinstance(model, TaskModel) else (model, "")
    no_weight_decay: Any = getattr(backbone, "no_weight_decay", set)  # timm's contract; others spare by shape
    spared = {prefix + name for name in no_weight_decay()}
    spared |= {name for name, role in parameter_roles(model).items() if role == "prompts"}  # in place too
    scales = {} if layer_decay is None else layer_scales(backbone, layer_decay)
    scales = {prefix + name: scale for name, scale in scales.items()}
    if isinstance(model, TaskModel):
        spared |= model.no_weight_decay()
        task_scales = ((name, model.lr_scales.get(name.partition(".")[0])) for name, _ in model.named_parameters())
        scales |= {name: scale for name, scale in task_scales if scale is not None}
    parameters: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = not decay_all and (parameter.ndim <= 1 or name.endswith("bias") or name in spared)
            parameters.setdefault((scales.get(name, 1.0), is_spared), []).append(parameter)
    return [
        {
            "params": parameters[scale, is_spared],
            "weight_decay": 0.0 if is_spared else weight_decay,
            "lr_scale": scale,
            "name": "no_decay" if is_spared else "decay",
        }
        for scale, is_spared in sorted(parameters)
    ]


def layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Return the fraction of the learning rate of each parameter: layer_decay ** (L + 1 - layer) for L blocks, as in
    BEiT (arXiv:2106.08254). Raises UserError as `layer_of_parameters`, which says which layer it is in."""
    layers = layer_of_parameters(model)
    last = max(layers.values())
    return {name: layer_decay ** (last - layer) for name, layer in layers.items()}


def freeze(model: nn.Module, recipe: Recipe) -> None:
    """Freeze what the recipe does not train, and add the adapters that it trains; with `train="all"` nothing more than
    was frozen before.

    Raises:
        UserError: the model does not have the parameters to train.
    """
    if recipe.train != ALL:
        train_only(model, recipe.train)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW (arXiv:1711.05101), SGD or LAMB (arXiv:1904.00962) over every trainable parameter of `model`.

    SGD adds `weight_decay` times the weight to the gradient, before the momentum. LAMB is timm's without its own
    clipping: `clip_gradients` clips for all three.

    Raises:
        ValueError: the model does not have trainable parameters.
        UserError: the recipe has a layer_decay and the model does not define its layers.
    """
    settings = recipe.optimizer
    groups = parameter_groups(model, settings.weight_decay, settings.layer_decay, settings.decay_all)
    if not groups:
        raise ValueError("the model does not have trainable parameters; set requires_grad of those to train.")
    lr = settings.lr * recipe.lr_scale
    momentum: dict[str, Any] = {"lr": lr, "momentum": settings.momentum}
    adam: dict[str, Any] = {"lr": lr, "betas": (settings.beta1, settings.beta2), "eps": settings.adam_eps}
    if settings.name == "lamb":
        from timm.optim.lamb import Lamb  # seconds

        return Lamb(groups, max_grad_norm=None, **adam)
    if settings.moment == "bfloat16":
        return BFloat16Moment(groups, momentum if settings.name == "sgd" else adam)
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(p.is_floating_point() and p.device.type in _FUSED for p in parameters)
    kernels: dict[str, Any] = {"fused": fused, "foreach": None if fused else True}
    if settings.name == "sgd":  # the fused form fails where a task trains a parameter only from some step on
        return torch.optim.SGD(groups, **momentum, foreach=True)
    return torch.optim.AdamW(groups, **adam, **kernels)


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float, each: bool = False) -> Tensor:
    """Scale all gradients by largest / norm if their global norm is larger; `each`: every one by its own norm. Returns
    the global norm before, 0-d.

    Exact, as optax's: torch.nn.utils.clip_grad_norm_ divides by the norm plus 1e-6.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    parts = [local(gradient) for gradient in gradients]
    if each:
        scales = [(largest / whole(gradient.norm())).clamp(max=1.0) for gradient in gradients]
        torch._foreach_mul_(parts, scales)
    else:
        torch._foreach_mul_(parts, (largest / norm).clamp(max=1.0))
    return norm


def set_weight_decay(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int, steps: int) -> None:
    """Set the weight decay of the parameters that decay at `step`, the first being 0, of `steps`."""
    settings = recipe.optimizer
    if settings.weight_decay_end is None:
        return
    decay = half_cosine(settings.weight_decay, settings.weight_decay_end, step, steps)
    for group in optimizer.param_groups:
        if group["name"] == "decay":
            group["weight_decay"] = decay


def check_every_parameter_is_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless the optimizer's groups hold each trainable parameter of `model` exactly once.

    A parameter that is replaced after the optimizer was made (a new head, a cast) would otherwise silently keep its
    initial value.
    """
    ids = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in ids]
    if missing:
        raise ValueError(
            f"the optimizer does not hold {first_of(missing)}; make it after the last change of the model."
        )
    if len(ids) != len(set(ids)):
        raise ValueError("a parameter is in two of the optimizer's groups.")


def without_gradient(model: nn.Module) -> list[str]:
    """Name the trainable parameters without a gradient after the last backward pass."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


class Ema:
    """Exponential moving average of a model, weighted so that the initial weights do not count.

    After n updates with models w_1 ... w_n the average is sum_i d^(n-i) w_i / sum_i d^(n-i): the bias correction of
    Adam (arXiv:1412.6980, section 3) applied to weights, so that the decay does not need a warm-up. Integer buffers
    (counters) are copied. Frozen parameters are shared with the model: freeze before.
    """

    def __init__(self, model: nn.Module, decay: float, divide: Callable[[nn.Module], None] | None = None) -> None:
        """divide: shards the average, as the model is sharded before `follow`."""
        self.decay = decay
        self.updates = 0
        shared = {} if divide else {id(p): p for p in model.parameters() if not p.requires_grad}
        self.model = copy.deepcopy(model, shared).requires_grad_(False).eval()
        if divide is not None:
            divide(self.model)
        else:
            self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Average this model from now on."""
        means, sources = (chain(m.parameters(), m.buffers()) for m in (self.model, model))
        both = zip(means, sources, strict=True)
        pairs = [(local(mean.data), local(source.data)) for mean, source in both if mean is not source]
        self._means = [mean for mean, _ in pairs if mean.is_floating_point()]
        self._sources = [source for _, source in pairs if source.is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights to the average."""
        self.updates += 1
        weight = (1 - self.decay) / (1 - self.decay**self.updates)
        torch._foreach_lerp_(self._means, self._sources, weight)
        if self._copied:
            means, sources = zip(*self._copied, strict=True)
            torch._foreach_copy_(list(means), list(sources))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        load_weights(self.model, state["model"])
