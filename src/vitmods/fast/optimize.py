"""Optimize a ViT for inference: the same outputs in less time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vitmods.adapters.apply import as_vit, verify
from vitmods.adapters.inputs import find_inputs
from vitmods.adapters.inserts import Insert, Scale
from vitmods.adapters.replay import tolerance_of
from vitmods.adapters.running import copy_model, difference
from vitmods.adapters.surgery import outputs_of, parts_of, record_of_changes, width_of
from vitmods.fast.fold import fold, merge_branches, plain, scale
from vitmods.fast.packed import PackedLinear
from vitmods.layers import LayerNorm, Mlp
from vitmods.model.branch_names import parallel_name, sequential_name
from vitmods.model.vit import ViT

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def optimize_for_inference(model: nn.Module, dtype: torch.dtype | None = None, join_branches: bool = True) -> ViT:
    """A new model in evaluation mode with the same outputs and fewer, faster operations; the old one is untouched.

    Gains, biases and LayerScale are folded into the linear maps next to them, BatchNorm altogether. Linear maps have
    their weights laid out for the CPU's product and their GELU fused with it (twice the memory of those weights).
    Parallel branches become one block with the heads and hidden layers of all, where no norm inside or behind them, of
    queries and keys, or of another kind is between. Of the last block only what the head reads is
    computed, as in every vitmods ViT. Works under torch.compile and on a GPU, where the fused products are not used.
    No parameter of it takes gradients.

    Args:
        model: a vitmods ViT, or one of timm, Hugging Face or torchvision (imported exactly).
        dtype: cast to this type after folding, as torch.bfloat16; None keeps the model's.
        join_branches: False leaves parallel branches one after another, to compare the two (Three Things, Table 4).

    Raises UserError for a model that cannot be read, AssertionError if the outputs on random images differ by more
    than 1e-5 of the largest (a bug).
    """
    old = as_vit(model)
    new = _rebuilt(old, fold, join_branches)
    new.requires_grad_(False)
    if next(old.parameters()).device.type == "cpu":
        _pack(new)
    return new if dtype is None else new.to(dtype)


def as_plain(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode in the form that other libraries know, with the same outputs: LayerScale, factors of
    heads and of norms are folded into the maps, and what only training uses is left out.

    Of a model of another library, a LayerScale that was put into it in place is folded; other insertions stay.
    Raises AssertionError if outputs on random images differ (a bug).
    """
    if isinstance(model, ViT):
        return _rebuilt(model, plain, False)
    new, inputs = copy_model(model).eval(), find_inputs(model, None, width_of(model))
    branches = {b.module: b for values in record_of_changes(new) for b in parts_of(values).branches}
    inserts = {name: module for name, module in new.named_modules() if isinstance(module, Insert)}
    weights = new.state_dict()
    for name, module in inserts.items():
        holder, (child, *_) = name.rpartition(".")[0], module.places
        beside = [m for n, m in inserts.items() if n.rpartition(".")[0] == holder and child in m.places]
        branch = branches.get(f"{holder}.{child}".strip("."))
        if isinstance(module, Scale) and branch is not None and len(beside) == 1:
            scale(weights, branch.projection, module.weight)
            module.withdraw(new.get_submodule(holder))
    new.load_state_dict({name: weights[name] for name in new.state_dict()})
    assert not inputs or difference(outputs_of(model, inputs), outputs_of(new, inputs)) <= tolerance_of(model)
    return new


def _rebuilt(old: ViT, fold: Callable[..., Any], join_branches: bool) -> ViT:
    """The folded model, verified."""
    branches = old.vit_config.parallel
    named = {sequential_name(name, branches): value for name, value in old.state_dict().items()}
    folded, weights = fold(old.vit_config.unrolled, named)
    merged = merge_branches(folded, weights, branches) if branches > 1 and join_branches else None
    config, weights = merged or (folded.rolled(branches), weights)
    reference = next(old.parameters())
    new = ViT(config).to(device=reference.device, dtype=reference.dtype)
    new.load_state_dict({parallel_name(name, config.parallel): value for name, value in weights.items()})
    new.forms = old.forms
    new.changes, new.pretrained_cfg, new.default_cfg = old.changes, old.pretrained_cfg, old.default_cfg
    new.eval()
    moved = verify(old, new)
    assert moved <= TOLERANCE.get(reference.dtype, 5e-2), f"folding moved the outputs by {moved:.1e}"
    return new


def _pack(model: ViT) -> None:
    """Give linear maps and norms the forms that are fastest on a CPU."""
    modules, like = list(model.modules()), next(model.parameters())
    for module in modules:
        if isinstance(module, Mlp) and isinstance(module.act, nn.GELU):
            module.fc1 = PackedLinear.of(module.fc1, gelu=module.act.approximate)
            module.act = nn.Identity()
        elif type(module) is LayerNorm and module.weight is None:
            # PyTorch's is slower without gain and bias than with ones and zeros, which no file holds.
            del module.weight, module.bias
            module.register_buffer("weight", like.new_ones(module.normalized_shape), persistent=False)
            module.register_buffer("bias", like.new_zeros(module.normalized_shape), persistent=False)
    for module in modules:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear.of(child))
