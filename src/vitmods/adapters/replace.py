"""Another normalizer in any transformer that is an ``nn.Module``: Swin, PVT, LeViT, BERT, Llama, T5, ..."""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from vitmods.adapters.anatomy import Anatomy, NormSite, eps_of
from vitmods.adapters.apply import WRAPPERS
from vitmods.adapters.grid import UNKNOWN, CallGrid, StemGrid
from vitmods.adapters.norm_plan import NormPlan, NormRow, Where, is_frozen, table
from vitmods.adapters.text_padding import ReadsMask
from vitmods.adapters.trial import try_out
from vitmods.changes import Change
from vitmods.changes.dynamic_token_norm import DynamicTokenNorm
from vitmods.changes.norm import Norm
from vitmods.model.build import norm_factory
from vitmods.model.slots import NormConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import NoEffect, UserError

Heads = int | Callable[[NormSite], int]


class Replaced(NamedTuple):
    """The new model, and a row for every norm that was found. Prints as a table."""

    model: nn.Module
    rows: tuple[NormRow, ...]

    def __str__(self) -> str:
        return table(self.rows)


def replace_norms(
    model: nn.Module,
    change: Norm | DynamicTokenNorm,
    where: Where | None = None,
    heads: Heads | None = None,
    example: Any = None,
) -> Replaced:
    """A copy of any transformer with other norms, and a table of what was replaced; the old model is untouched.

    ``change`` says what the norms become: ``Norm(kind)``, or ``DynamicTokenNorm`` with its ``norms`` and ``blocks``.
    Gains and biases are carried, frozen norms stay frozen, device and type are the old norm's.

    ``where`` chooses the norms: a pattern (fnmatch) of module names or a role (``NormSite`` lists them), a compiled
    regular expression searched in the names, or a function of a ``NormSite``. Without it, ``Norm`` takes the norms of
    all blocks, and if it works on each token by itself those after the blocks too. ``DynamicTokenNorm`` takes what its
    paper says: all blocks; of a model with stages not those of the class token's stage; of a ViT with one stage the
    first ten twelfths. Norms of embeddings, between stages and inside attention stay.

    ``heads``, a number or a function of a ``NormSite``, is for norms by heads instead of those of the attention beside.

    Rows and columns of images are read at each forward; text is a sequence. Norms that read other tokens leave out
    those that the ``attention_mask`` (B, T) of the call marks as padding; without a mask all count.

    At the end copies of both models run on a small input, in evaluation mode: images of the model's size, some words,
    some tokens. ``example`` is what the model is called with instead, a tensor, a tuple of arguments or a mapping of
    keywords; a model that takes none of these is not tried without it.

    Raises NoEffect when nothing matches or everything is that kind already, and UserError for models without
    LayerNorm or RMSNorm, heads that do not divide the channels, a norm that stands at two places, a new model that
    does not run, and norms that mix tokens where they must not: in causal attention, chunks of a sequence, with
    tokens on the first axis, and, unless ``where`` is given, in decoders and where no block with attention was
    recognized.
    """
    found, may_leak = put_norms(model, change, where, heads)
    try_out(_copy(model), _copy(found.model), [row.site for row in found.rows if row.now], example, may_leak)
    return found


def put_norms(
    model: nn.Module, change: Norm | DynamicTokenNorm, where: Where | None = None, heads: Heads | None = None
) -> tuple[Replaced, bool]:
    """The same without running a model, and whether tokens may now see later ones."""
    _check_model(model, change)
    anatomy = Anatomy(model)
    if not anatomy.sites:
        raise UserError(f"A {type(model).__name__} without LayerNorm or RMSNorm has nothing to replace.")
    _check_change(change, where)
    change = Norm("rms", exact=False) if change == Norm("rms") else change  # its conversion is of ViTs that can be read
    plan = NormPlan(anatomy, change, where)
    if heads is not None and not plan.by_heads:
        raise UserError(f"'{change}' has no heads: leave heads=... out.")
    rows = tuple(plan.row(site) for site in _with_heads(anatomy.sites, heads))
    chosen = [row.site for row in rows if row.now]
    if not chosen:
        raise NoEffect(f"'{change}' finds no norm to replace. These were found:\n{table(rows)}")
    _check_shared(model, chosen)
    new = _copy(model)
    norms: dict[str, nn.Module] = {}
    for site in chosen:
        grid = UNKNOWN if anatomy.stem_of(site) else None
        norms[site.name] = _make(new.get_submodule(site.name), site, change, grid, anatomy.rms.get(site.name, 0.0))
        _swap(new, site, norms[site.name])
    if isinstance(change, DynamicTokenNorm):
        _give_grids(new, anatomy, norms)
    _leave_fused_path(new)
    if not plan.token_wise:
        ReadsMask.put_on(new)
    return Replaced(new, rows), where is None and not plan.token_wise


def _with_heads(sites: tuple[NormSite, ...], heads: Heads | None) -> tuple[NormSite, ...]:
    if heads is None:
        return sites
    return tuple(replace(site, heads=heads(site) if callable(heads) else heads) for site in sites)


def _check_model(model: nn.Module, change: Change) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"replace_norms takes an nn.Module, not {model!r}.")
    if isinstance(model, ViT):
        raise UserError(f"This is a vitmods ViT: use vm.apply(model, {change!r}), which knows its slots.")
    if type(model).__name__ in WRAPPERS:
        inside = WRAPPERS[type(model).__name__]
        raise UserError(f"A {type(model).__name__} wraps the model: give the model inside, model.{inside}.")


def _check_change(change: Change, where: Where | None) -> None:
    if not isinstance(change, Norm | DynamicTokenNorm):
        raise UserError(f"replace_norms takes Norm(...) or DynamicTokenNorm(...), not {change!r}.")
    if where is not None and isinstance(change, DynamicTokenNorm) and (change.norms, change.blocks) != ("attn", None):
        raise UserError("dtn(norms=..., blocks=...) and where=... both choose the norms: give one of them.")
    if where is not None and not isinstance(where, str | re.Pattern) and not callable(where):
        raise UserError(f"where is a pattern, a compiled regular expression or a function, not {where!r}.")


def _check_shared(model: nn.Module, chosen: list[NormSite]) -> None:
    """Raises UserError if a norm, or its gain, stands at two places: each would want its own statistics or grid."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
        for own in module.parameters(recurse=False):
            places.setdefault(id(own), []).append(name)
    for site in chosen:
        module = model.get_submodule(site.name)
        for part in (module, *module.parameters(recurse=False)):
            if len(set(places[id(part)])) > 1:
                raise UserError(
                    f"{' and '.join(sorted(set(places[id(part)])))} share one norm or its weights: give each a copy "
                    "(copy.deepcopy), or leave it out with where=..."
                )


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy. What a forward has left behind with a gradient history (LeViT's attention biases) loses that."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            for kept in value.values() if isinstance(value, dict) else [value]:
                if isinstance(kept, torch.Tensor) and not kept.is_leaf:
                    memo[id(kept)] = kept.detach().clone()
    return copy.deepcopy(model, memo)


def _swap(model: nn.Module, site: NormSite, new: nn.Module) -> None:
    old, (path, _, _) = model.get_submodule(site.name), site.name.rpartition(".")
    parent = model.get_submodule(path)
    model.set_submodule(site.name, new.train(old.training))
    if isinstance(old, nn.BatchNorm1d):
        # The parent hands the tokens of all images to BatchNorm as one list; a row of the two modules does not.
        model.set_submodule(path, nn.Sequential(OrderedDict(parent.named_children())).train(parent.training))


def _make(
    old: nn.Module, site: NormSite, change: Norm | DynamicTokenNorm, grid: tuple[int, int] | None, offset: float
) -> nn.Module:
    """The new norm with the old one's gain (weight plus ``offset``) and bias, device, type and frozen parameters."""
    own = dict(old.named_parameters(recurse=False))
    slot = NormConfig("layer", eps=eps_of(old), affine=bool(own))
    config = change.edit_norm(slot, site.stage) if isinstance(change, DynamicTokenNorm) else change.edit_norm(slot)
    assert config is not None
    new: nn.Module = norm_factory(config, num_heads=site.heads, grid_size=grid)(site.dim)
    if own:
        like = next(iter(own.values()))
        new = new.to(device=like.device, dtype=like.dtype)
    with torch.no_grad():
        for name, target in new.named_parameters(recurse=False):
            target.requires_grad_(own[name].requires_grad if name in own else not is_frozen(old))
            if name in own:
                target.copy_(_in_unit(own[name] + offset, config, len(target)) if name == "weight" else own[name])
    return new


def _in_unit(gain: torch.Tensor, norm: NormConfig, length: int) -> torch.Tensor:
    """LayerNorm's gain in the unit of a norm, as one or for each channel."""
    return (gain if length == len(gain) else gain.mean(0, keepdim=True)) * norm.facts.unit(len(gain))


def _give_grids(model: nn.Module, anatomy: Anatomy, norms: Mapping[str, nn.Module]) -> None:
    """Norms of images learn their grid before each call of their block, or outside the blocks of themselves."""
    stems: dict[str, StemGrid] = {}
    hosts: dict[str, list[NormSite]] = {}
    for site in anatomy.sites:
        if site.name in norms and anatomy.stem_of(site):
            host = site.name if site.block is None else anatomy.blocks[site.block].name
            hosts.setdefault(host, []).append(site)
    for host, sites in hosts.items():
        block = None if sites[0].block is None else anatomy.blocks[sites[0].block]
        fixed = getattr(model.get_submodule(block.attention), "resolution", None) if block else None
        stem = stems.setdefault(anatomy.stem_of(sites[0]) or "", StemGrid())
        hook = CallGrid(host, {site.name: norms[site.name] for site in sites}, sites[0].dim, fixed, stem)
        model.get_submodule(host).register_forward_pre_hook(hook, with_kwargs=True)
    for name, stem in stems.items():
        model.get_submodule(name).register_forward_hook(stem)


def _leave_fused_path(model: nn.Module) -> None:
    """In evaluation PyTorch's own encoder computes LayerNorm from the norms' weights without calling the norms."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
