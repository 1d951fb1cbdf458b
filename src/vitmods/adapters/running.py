"""Runs a model of any library on a small input that is made for it."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitmods.adapters.transfer import evaluating
from vitmods.util.errors import UserError

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments and keywords of a call."""
WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}


def check_not_wrapped(model: nn.Module) -> None:
    """Raise UserError for a wrapper, with the name of the model inside."""
    name = type(model).__name__
    if name in WRAPPERS:
        raise UserError(f"A {name} wraps the model: give the model inside, model.{WRAPPERS[name]}.")


def runs(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model takes these inputs."""
    try:
        run(model, inputs)
    except Exception:  # the model does not take this input
        return False
    return True


def run(model: nn.Module, inputs: Inputs, gradients: bool = False, training: bool = False) -> list[Tensor]:
    """The tensors that the model puts out, in evaluation mode or in training mode without dropout."""
    arguments, keywords = inputs
    with steady(model, training), torch.set_grad_enabled(gradients):
        return list(tensors_of(model(*arguments, **keywords)))


@contextmanager
def steady(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Evaluation mode, or training mode without dropout (modules without parts and weights, whatever they are called),
    and the same random numbers whenever a model draws some (masks); modes, buffers and the caller's random numbers are
    left as they were."""
    with torch.random.fork_rng(devices=[]), evaluating(model):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed accelerators too, and leave them so
        kept = [(b, b.detach().clone()) for b in model.buffers()] if training else []  # BatchNorm's
        for module in model.modules() if training else ():
            has_more = bool([*module.children(), *module.parameters(), *module.buffers()])
            module.training = has_more and "drop" not in type(module).__name__.lower()
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:  # writing would spoil a graph that has the buffer
                    if not buffer.equal(value):
                        buffer.copy_(value)


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that are removed afterwards."""
    hooks = list(hooks)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest difference of outputs, relative to the largest of each."""
    if [out.shape for out in before] != [out.shape for out in after]:
        return float("nan")
    pairs = zip(before, after, strict=True)
    return max((float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs), default=float("nan"))


def reads_last(model: nn.Module, inputs: Inputs) -> bool | None:
    """Whether what is put out for the other tokens depends on the last one; None where that cannot be seen."""
    arguments, keywords = inputs
    tokens = next(tensors_of([*arguments, *keywords.values()]))
    if tokens.is_meta or tokens.ndim == 4:
        return None
    other = tokens.clone()
    other[:, -1] = other[:, 0]
    outputs = []
    for changed in (tokens, other):
        swapped = {name: changed if value is tokens else value for name, value in keywords.items()}
        outputs.append(run(model, (tuple(changed if value is tokens else value for value in arguments), swapped)))
    for a, b in zip(*outputs, strict=True):
        if a.is_floating_point() and a.ndim > 2 and a.shape[:2] == tokens.shape[:2]:
            return float((a - b)[:, :-1].abs().max()) > 1e-5 * float(a.abs().max())
    return None


def fresh(value: Any) -> Any:
    """A copy of what a module is called with; modules among it stay."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(fresh, value))
    if type(value) is dict:
        return {key: fresh(item) for key, item in value.items()}
    return value if isinstance(value, nn.Module) else copy.deepcopy(value)


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy. What a forward has left behind with a gradient history (LeViT's attention biases) loses that."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            for kept in value.values() if isinstance(value, dict) else [value]:
                if isinstance(kept, torch.Tensor) and not kept.is_leaf:
                    memo[id(kept)] = kept.detach().clone()
    return copy.deepcopy(model, memo)
