"""Another normalizer in any transformer that is an ``nn.Module``: Swin, PVT, LeViT, BERT, Llama, T5, ..."""

import copy
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from vitmods.adapters.anatomy import Anatomy, NormSite, eps_of
from vitmods.adapters.grid import UNKNOWN, CallGrid, ReadsMask, StemGrid
from vitmods.adapters.running import Inputs, check_not_wrapped, find_inputs, run, tensors_of
from vitmods.changes import Change
from vitmods.changes.dynamic_token_norm import DynamicTokenNorm
from vitmods.changes.norm import Norm
from vitmods.layers.norms import LayerNorm, RMSNorm
from vitmods.model.build import norm_factory
from vitmods.model.slots import NormConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import NoEffect, UserError

Where = str | re.Pattern[str] | Callable[[NormSite], bool]

_KEPT = {
    "inside": "inside attention",
    "embed": "of the embedding",
    "merge": "between stages",
    "final": "after the blocks",
    "block": "not of a branch",
}


class NormRow(NamedTuple):
    """The result for one norm: ``now`` is its new class, empty where it stayed. ``why`` is the reason to stay, or
    what is lost of the old norm."""

    site: NormSite
    now: str
    why: str

    def cells(self) -> tuple[str, str, str, str]:
        pattern = ".".join("*" if part.isdigit() else part for part in self.site.name.split("."))
        now = ", ".join(filter(None, (self.now, self.why))) if self.now else f"stays: {self.why}"
        return pattern, self.site.role, f"{self.site.kind}({self.site.dim})", now


def table(rows: tuple[NormRow, ...]) -> str:
    """The same norm in every block becomes one line."""
    lines = Counter(row.cells() for row in rows)
    cells = [("norm", "role", "was", "now"), *lines]
    counts = ["", *(f"  ({n}x)" if n > 1 else "" for n in lines.values())]
    widths = [*(max(len(line[i]) for line in cells) for i in range(3)), 0]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + count
        for line, count in zip(cells, counts, strict=True)
    )


class NormPlan:
    """``change`` and ``where`` of ``replace_norms``, asked about one norm after the other."""

    def __init__(self, anatomy: Anatomy, change: Norm | DynamicTokenNorm, where: Where | None) -> None:
        self.anatomy, self.change, self.where = anatomy, change, where
        if isinstance(change, DynamicTokenNorm) and len(change.pools) not in (1, anatomy.stages):
            raise UserError(
                f"dtn(pool=...) has {len(change.pools)} sides, and the model {anatomy.stages} stages: give one for "
                "each, or one number for all."
            )
        edited = change.edit_norm(NormConfig())
        assert edited is not None
        facts = edited.facts
        self.new, self.token_wise, self.by_heads = facts.module, facts.token_wise, "num_heads" in facts.takes
        self.biased = facts.biased

    def row(self, site: NormSite) -> NormRow:
        """Raises UserError for a norm that is chosen and cannot be replaced."""
        why = self._kept(site)
        if why:
            return NormRow(site, "", why)
        self._check(site)
        now = f"{self.new.__name__}(heads={site.heads})" if self.by_heads else self.new.__name__
        return NormRow(site, now, self._lost(self.anatomy.modules[site.name]))

    def _lost(self, old: nn.Module) -> str:
        notes = []
        if isinstance(getattr(old, "bias", None), nn.Parameter) and not self.biased:
            notes.append("bias dropped")
        if isinstance(getattr(old, "running_mean", None), torch.Tensor):
            notes.append("running statistics dropped")
        return ", ".join([*notes, "frozen"] if is_frozen(old) else notes)

    def _kept(self, site: NormSite) -> str:
        """Why a norm stays as it is; empty if it is replaced."""
        old = self.anatomy.modules[site.name]
        if "2d" in site.kind or len(getattr(old, "normalized_shape", ())) > 1:
            return "not over the channels of tokens"
        kind = LayerNorm if isinstance(old, nn.LayerNorm) else RMSNorm if site.name in self.anatomy.rms else None
        if self.new is kind:
            return "is so already"
        if self.where is not None:
            return "" if _matches(self.where, site) else "not chosen by where"
        if isinstance(self.change, DynamicTokenNorm):
            return self._kept_by_paper(site, self.change)
        if site.role in ("attn", "mlp", "block") or (site.role == "final" and self.token_wise):
            return ""
        return _KEPT[site.role]

    def _kept_by_paper(self, site: NormSite, change: DynamicTokenNorm) -> str:
        if site.role not in ("attn", "mlp"):
            return _KEPT[site.role]
        if site.role == "mlp" and change.norms == "attn":
            return "norms='attn'"
        if change.blocks is None and site.stage == self.anatomy.class_token_stage:
            return "the class token's stage"
        blocks = change.blocks or self._published_blocks()
        assert site.block is not None
        return "" if site.block < blocks else f"after the first {blocks} blocks"

    def _published_blocks(self) -> int:
        blocks = self.anatomy.blocks
        return max(1, len(blocks) * 10 // 12) if self.anatomy.stages == 1 and blocks[0].stem else len(blocks)

    def _check(self, site: NormSite) -> None:
        if self.by_heads and site.heads is None:
            raise UserError(f"{site.name} is not next to attention, which would have a number of heads: give heads=...")
        if self.by_heads and site.heads is not None and (site.heads < 1 or site.dim % site.heads):
            raise UserError(
                f"{site.name} has {site.dim} channels, which {site.heads} heads do not divide: give heads=... that "
                "do, or leave it out with where=..."
            )
        if not self.token_wise:
            self._check_mixing(site)

    def _check_mixing(self, site: NormSite) -> None:
        """Raises UserError where a norm that mixes tokens would see later ones, parts of a sequence, or images."""
        if site.block is None:
            if self.where is not None:
                return
            raise UserError(
                f"{self.new.__name__} mixes tokens, and {site.name} is in no block whose attention is recognized, so "
                "that it may be causal: a token would see later ones. Use a norm of single tokens, or name the norms "
                "with where=... if all tokens may see each other."
            )
        block, modules = self.anatomy.blocks[site.block], self.anatomy.modules
        around = [m for n, m in modules.items() if n.startswith(block.name) and f"{site.name}.".startswith(f"{n}.")]
        near = [*around, modules[block.name], modules[block.attention]]
        what = f"{self.new.__name__} mixes tokens, and {block.name}"
        if any(getattr(m, name, False) is True for m in near for name in ("is_causal", "is_decoder")):
            raise UserError(f"{what} is causal: a token would see later ones. Use a norm of single tokens.")
        decoder = nn.TransformerDecoderLayer | nn.TransformerDecoder
        if self.where is None and any(isinstance(m, decoder) for m in near):
            raise UserError(
                f"{what} is a decoder's, which may be called with a causal mask: a token would see later ones. Use a "
                "norm of single tokens, or name the norms with where=... if it never is."
            )
        if site.role == "mlp" and any(getattr(m, "chunk_size_feed_forward", 0) for m in near):
            raise UserError(
                f"{what} cuts the sequence into chunks: set chunk_size_feed_forward=0 in the model's config."
            )
        if any(getattr(m, "batch_first", True) is False for m in near):
            raise UserError(f"{what} has tokens on the first axis: build the model with batch_first=True.")


def is_frozen(norm: nn.Module) -> bool:
    parameters = list(norm.parameters(recurse=False))
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _matches(where: Where, site: NormSite) -> bool:
    if isinstance(where, str):
        return where == site.role or fnmatchcase(site.name, where)
    if isinstance(where, re.Pattern):
        return where.search(site.name) is not None
    return bool(where(site))


def try_out(old: nn.Module, new: nn.Module, norms: Sequence[NormSite], example: Any, may_leak: bool) -> None:
    """Runs copies of both models, which may change as they run, in evaluation mode and without gradients.

    ``example`` is what the model is called with: a tensor, a tuple of arguments or a mapping of keywords; None for one
    that is made. Where none can be made that the old model takes, nothing is tried. ``may_leak`` looks for causality
    as well: outputs of earlier tokens that did not read the last one, and now do.

    Raises UserError naming the norm at which the new model failed, or saying that it leaks.
    """
    inputs = find_inputs(old, example, norms[0].dim)
    if inputs is None:
        return
    entered = [""]
    for name in (site.name for site in norms):
        new.get_submodule(name).register_forward_pre_hook(lambda m, a, name=name: entered.__setitem__(0, name))
    try:
        run(new, inputs)
    except UserError:
        raise
    except Exception as error:  # whatever a norm or the model around it raises for tokens that do not fit
        where = f", at {entered[0]}" if entered[0] else ""
        raise UserError(
            f"The model does not run with these norms{where}: {str(error).rstrip('.')}. Leave that norm out with "
            "where=..., or use a kind that treats each token by itself."
        ) from error
    if may_leak and _reads_last(old, inputs) is False and _reads_last(new, inputs):
        raise UserError(
            "This model is causal, and with these norms earlier tokens see later ones: use a kind that treats each "
            "token by itself, or choose norms of a part that is not causal with where=..."
        )


def _reads_last(model: nn.Module, inputs: Inputs) -> bool | None:
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
    LayerNorm or RMSNorm, heads that do not divide the channels, a norm that is used at two places, a new model that
    does not run, and norms that mix tokens where they must not: in causal attention, chunks of a sequence, with
    tokens on the first axis, and, unless ``where`` is given, in decoders and where no block with attention was
    recognized.
    """
    replaced, may_leak = put_norms(model, change, where, heads)
    try_out(
        copy_model(model), copy_model(replaced.model), [row.site for row in replaced.rows if row.now], example, may_leak
    )
    return replaced


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
        raise UserError(f"'{change}' does not have heads: leave heads=... out.")
    rows = tuple(plan.row(site) for site in _with_heads(anatomy.sites, heads))
    chosen = [row.site for row in rows if row.now]
    if not chosen:
        raise NoEffect(f"'{change}' finds no norm to replace. These were found:\n{table(rows)}")
    _check_shared(model, chosen)
    new = copy_model(model)
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
    check_not_wrapped(model)


def _check_change(change: Change, where: Where | None) -> None:
    if not isinstance(change, Norm | DynamicTokenNorm):
        raise UserError(f"replace_norms takes Norm(...) or DynamicTokenNorm(...), not {change!r}.")
    if where is not None and isinstance(change, DynamicTokenNorm) and (change.norms, change.blocks) != ("attn", None):
        raise UserError("dtn(norms=..., blocks=...) and where=... both choose the norms: give one of them.")
    if where is not None and not isinstance(where, str | re.Pattern) and not callable(where):
        raise UserError(f"where is a pattern, a compiled regular expression or a function, not {where!r}.")


def _check_shared(model: nn.Module, chosen: list[NormSite]) -> None:
    """Raise UserError if a norm, or its gain, is used at two places: each would need its own statistics or grid."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), []).append(name)
    for site in chosen:
        module = model.get_submodule(site.name)
        for part in (module, *module.parameters(recurse=False)):
            if len(set(places[id(part)])) > 1:
                raise UserError(
                    f"{' and '.join(sorted(set(places[id(part)])))} share one norm or its weights: give each a copy "
                    "(copy.deepcopy), or leave it out with where=..."
                )


def copy_model(model: nn.Module) -> nn.Module:
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
    parameters = dict(old.named_parameters(recurse=False))
    slot = NormConfig("layer", eps=eps_of(old), affine=bool(parameters))
    config = change.edit_norm(slot, site.stage) if isinstance(change, DynamicTokenNorm) else change.edit_norm(slot)
    assert config is not None
    new: nn.Module = norm_factory(config, num_heads=site.heads, grid_size=grid)(site.dim)
    if parameters:
        like = next(iter(parameters.values()))
        new = new.to(device=like.device, dtype=like.dtype)
    with torch.no_grad():
        for name, target in new.named_parameters(recurse=False):
            target.requires_grad_(parameters[name].requires_grad if name in parameters else not is_frozen(old))
            if name in parameters:
                target.copy_(
                    _in_unit(parameters[name] + offset, config, len(target)) if name == "weight" else parameters[name]
                )
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
