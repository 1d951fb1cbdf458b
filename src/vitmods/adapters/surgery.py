"""Changes put into a model of any library: its class and the names of its weights stay, and what the model computes
certifies each insertion."""

import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitmods.adapters.anatomy import (
    JOINT,
    QUERY,
    Anatomy,
    NormSite,
    count_heads,
    eps_of,
    find_parts,
    is_map,
    norm_sites,
    order_of_calls,
    widths,
)
from vitmods.adapters.exact_rms import center_stream, rms_swaps
from vitmods.adapters.grid import UNKNOWN, ReadsMask, give_grids
from vitmods.adapters.inserts import Gates, HeadNorms, Insert, InsertedNorm, PatchNorms, Scale, StemOfImages
from vitmods.adapters.norm_choice import choose_norms, is_frozen
from vitmods.adapters.running import Inputs, check_not_wrapped, copy_model, find_inputs, reads_last, run, tensors_of
from vitmods.changes import Change, parse_changes
from vitmods.changes.compose import check_conflicts
from vitmods.changes.dynamic_token_norm import DynamicTokenNorm
from vitmods.changes.insertions import (
    After,
    AroundPatches,
    Before,
    Branch,
    ExactRMS,
    Factor,
    Gate,
    GatedMLP,
    Heads,
    Insertion,
    NewStem,
    OnBranch,
    Parts,
    Without,
)
from vitmods.changes.norm import Norm
from vitmods.layers.mlp import SwiGLU
from vitmods.model.build import make_norm, make_stem, norm_factory
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig, Slot, StemConfig
from vitmods.util.errors import NoEffect, NotCertified, NotRecognized, UnfitStem, UserError, explaining

PREFIX = "vm_"
"""of the names of inserted modules"""
TOLERANCE = 2e-5
MOST_CHANGES = 100  # that a folder may list; each looks at all modules
INEXACT = "Write norm(kind=rms,exact=false), which keeps the weights and alters the outputs."


LAYOUTS = ("slot", "separate", "thd", "htd", "sdpa")
KEY = ("k_proj", "key", "k", "to_k", "k_lin", "wk", "k_linear", "linear_k", "projection_key")
PAIR = ("kv", "to_kv")


class _HeadPlace(NamedTuple):
    """Where norms of queries and keys are set: attributes ``q_norm`` and ``k_norm`` of ``owner``. ``axis`` is that of
    the heads in what they get."""

    owner: nn.Module
    reference: nn.Module
    heads: tuple[int, int]
    dim: int
    axis: int
    undo: Callable[[], None]

    def set_factors(self, queries: Tensor, keys: Tensor) -> None:
        """Factors of the heads of keys, and of those of the queries that read them, instead of norms."""
        shape = (-1,) + (1,) * (-1 - self.axis)
        p = next(self.reference.parameters())
        queries = queries.repeat_interleave(self.heads[0] // self.heads[1])
        self.owner.q_norm = _Factors(queries.view(shape).to(p))
        self.owner.k_norm = _Factors(keys.view(shape).to(p))


class _Factors(nn.Module):
    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


def _head_dim(attention: nn.Module, heads: int) -> int | None:
    """Channels of a head, from what attention modules call them."""
    for name in ("head_dim", "attention_head_size"):
        if isinstance(size := getattr(attention, name, None), int):
            return size
    joint = next((m for n, m in attention.named_modules() if n in JOINT and is_map(m)), None)
    if joint is not None:
        return widths(joint)[1] // (3 * heads)
    width = getattr(attention, "embed_dim", None)
    return width // heads if isinstance(width, int) else None


def operate(model: nn.Module, *changes: Change, example: Any = None) -> nn.Module:
    """A copy of a model of any library with the changes put in, in order: its class, the names of its weights and the
    weights stay. The old model is untouched.

    Every insertion is certified by runs on a small input (``example``, or one that is made: images of the model's size,
    words, tokens): in a neutral form it leaves all outputs as they are, every new parameter gets a gradient, and the
    old weights are still there under their names.

    Raises UserError if a change needs a model that can be read, a part that the change refers to is not recognized, or
    a certificate fails; SlotConflict when two changes claim one slot; NoEffect for a change that alters nothing.
    """
    check_conflicts(changes)
    check_not_wrapped(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("The model is on the meta device and has no weights: load them first.")
    new = copy_model(model)
    inputs = find_inputs(new, example, width_of(new))
    if inputs is None:
        raise NotRecognized(
            f"No input that a {type(model).__name__} runs on could be made: give example=, what it is called with."
        )
    if not all(out.isfinite().all() for out in outputs_of(new, inputs)):
        raise UserError("The model's outputs are not finite on a random input; its weights are broken.")
    is_causal = reads_last(new, inputs) is False
    record = list(getattr(model, "vm_record", ()))
    for change in changes:
        change.check_start(new)
        before = new.state_dict()
        operation = _Operation(new, change, find_parts(new, inputs), {}, inputs)
        new = operation.run()
        _check_kept(change, before, new.state_dict(), operation.removed)
        _check_gradients(change, new, inputs, before.keys())
        if is_causal and reads_last(new, inputs):
            raise NotCertified(
                f"'{change}' cannot be put into this model: it is causal, and tokens would see later ones."
            )
        parts = json.loads(json.dumps(asdict(operation.parts)))
        record.append({"change": str(change), "parts": parts, "heads": operation.layouts})
    new.vm_changes = (*getattr(model, "vm_changes", ()), *changes)  # type: ignore[assignment]
    new.vm_record = tuple(record)  # type: ignore[assignment]
    config: Any = getattr(new, "config", None)
    if hasattr(config, "save_pretrained"):  # Hugging Face's, which is saved with the model
        config.vitmods_changes = record
    return new


def repeat(model: nn.Module, record: Sequence[Mapping[str, Any]]) -> nn.Module:
    """The model with the insertions of a changed one of its class, as that one's ``vm_record`` lists them. It may be on
    the meta device: nothing is run or certified.

    Raises UserError for a record that does not fit the model.
    """
    changes: list[Change] = []
    unfit = f"The changes do not fit a {type(model).__name__}, or their record is damaged"
    kinds = (AttributeError, TypeError, ValueError, RuntimeError, LookupError)
    with explaining(lambda error: f"{unfit}: {error}", *kinds):
        if len(record) > MOST_CHANGES:
            raise ValueError(f"it lists more than {MOST_CHANGES}")
        for values in record:
            (change,) = parse_changes(values["change"])
            parts = dict(values["parts"])
            parts["branches"] = tuple(Branch(**branch) for branch in parts["branches"])
            parts["norm"] = NormConfig(**parts["norm"])
            model = _Operation(model, change, Parts(**parts), dict(values["heads"])).run()
            changes.append(change)
    model.vm_changes = (*getattr(model, "vm_changes", ()), *changes)  # type: ignore[assignment]
    model.vm_record = (*getattr(model, "vm_record", ()), *record)  # type: ignore[assignment]
    return model


def record_of_changes(model: nn.Module) -> list[Mapping[str, Any]]:
    """The record for `repeat` of a changed model, or of one with a changed part."""
    return [values for module in model.modules() for values in getattr(module, "vm_record", ())]


class _Operation:
    """One change put into one model, in place: certified on inputs, or without them as it was before.

    ``layouts`` is where each attention has its queries and keys, as far as it is known. ``removed`` are the names of
    weights that were taken out.
    """

    def __init__(
        self, model: nn.Module, change: Change, parts: Parts, layouts: dict[str, str], inputs: Inputs | None = None
    ) -> None:
        self.model, self.change, self.parts, self.layouts, self.inputs = model, change, parts, layouts, inputs
        self.before = [] if inputs is None else outputs_of(model, inputs)
        self.called = {} if inputs is None else order_of_calls(model, inputs)
        self.removed: list[str] = []

    def run(self) -> nn.Module:
        """The model with the change."""
        if not self.parts.blocks and Slot.NORM_KIND not in self.change.fills:
            raise NotRecognized(f"In a {type(self.model).__name__} no block with attention is recognized.")
        # All insertions are made in their neutral form, certified together, and then get their modules.
        insertions = list(self.change.insertions(self.parts))
        if not insertions or any(isinstance(insertion, OnBranch) for insertion in insertions):
            self._check_branches()
        ready = [self._insert(insertion) for insertion in insertions]
        if self.inputs is not None:
            self._check_neutral(self.inputs)
        for finish in ready:
            finish()
        return self.model

    def _check_branches(self) -> None:
        """Raise UserError if a block lacks a branch, which the change would leave out."""
        branches = {(branch.block, branch.kind) for branch in self.parts.branches}
        for block in self.parts.blocks:
            for kind, name in (("attn", "attention"), ("mlp", "MLP")):
                if (block, kind) not in branches:
                    raise NotRecognized(
                        f"'{self.change}': the {name} of {block} is not recognized as a residual branch."
                    )

    def _insert(self, insertion: Insertion) -> Callable[[], None]:
        """Insert the neutral form; returns what makes it the change's."""
        match insertion:
            case After(branch, Factor(init)):
                return self._scale(branch, init)
            case After(branch, NormConfig() as norm):
                return self._norm(branch, norm, "after")
            case Before(branch, norm):
                return self._norm(branch, norm, "before")
            case AroundPatches(stem, before, after):
                return self._around_patches(stem, before, after)
            case Heads(attentions, norm):
                return self._heads(attentions, norm)
            case Gate(branch, per):
                return self._gate(branch, per)
            case Without(branch):
                return partial(self._without, branch)
            case GatedMLP(branch, hidden):
                return self._gated_mlp(branch, hidden)
            case NewStem(stem, config):
                return self._new_stem(stem, config)
            case ExactRMS():
                return self._to_rms()
            case _:
                return self._swap()

    def _holder(self, name: str) -> tuple[nn.Module, str, str]:
        """Where an insertion for a module is registered, the child that it serves there, and a name for it: a linear
        map may be wrapped later, so its insertions are held by the module around it that is called."""
        if not is_map(self.model.get_submodule(name)):
            return self.model.get_submodule(name), "", ""
        holder = name.rpartition(".")[0]
        while isinstance(self.model.get_submodule(holder), nn.Sequential | nn.ModuleList | nn.ModuleDict):
            holder = holder.rpartition(".")[0]
        child = name.removeprefix(f"{holder}.") if holder else name
        return self.model.get_submodule(holder), child, f"{child.replace('.', '_')}_"

    def _scale(self, branch: Branch, init: float) -> Callable[[], None]:
        block, slot = self.model.get_submodule(branch.block), {"attn": "ls1", "mlp": "ls2"}[branch.kind]
        layer_scale = getattr(sys.modules[type(block).__module__], "LayerScale", None)
        if layer_scale is not None and isinstance(getattr(block, slot, None), nn.Identity):  # timm's
            setattr(block, slot, self._like(layer_scale(branch.dim, init_values=1.0), block))
            gamma = getattr(block, slot).gamma
            return lambda: cast(None, nn.init.constant_(gamma, init))
        holder, child, label = self._holder(branch.module)
        scale = Scale(branch.dim, 1.0, {child: ("after",)})
        scale.serve(holder, f"{PREFIX}{label}scale")
        return lambda: cast(None, nn.init.constant_(scale.weight, init))

    def _norm(self, branch: Branch, config: NormConfig, when: str) -> Callable[[], None]:
        name, dim = (branch.module, branch.dim) if when == "after" else (branch.projection, branch.hidden)
        if when == "before" and not is_map(self.model.get_submodule(name)):
            raise NotRecognized(
                f"'{self.change}' needs the output projection of {name}, which is not called as a module."
            )
        holder, child, label = self._holder(name)
        inserted = InsertedNorm(nn.Identity(), {child: (when,)})
        inserted.serve(holder, f"{PREFIX}{label}norm_{when}")

        def finish() -> None:
            inserted.norm = self._like(make_norm(config, dim), holder)

        return finish

    def _gate(self, branch: Branch, per: str) -> Callable[[], None]:
        holder = self.model.get_submodule(branch.module)
        names = [n for n, m in holder.named_modules() if is_map(m) and n.rpartition(".")[2] in (*JOINT, *QUERY)]
        is_called = not self.called or all(f"{branch.module}.{n}" in self.called for n in names[:1])
        projection = branch.projection.removeprefix(f"{branch.module}.")
        if projection == branch.projection:
            raise NotRecognized(f"'{self.change}': the output projection of {branch.module} is not inside it.")
        if not names or not is_called:
            raise NotRecognized(f"'{self.change}': the projections of {branch.module} are not called as modules.")
        gates = Gates({names[0]: ("before_query",), projection: ("before_projection",)})
        gates.serve(holder, f"{PREFIX}gate")

        def finish() -> None:
            count = count_heads(holder) if per == "head" else branch.hidden
            gate = nn.Linear(widths(holder.get_submodule(names[0]))[0], count)
            nn.init.trunc_normal_(gate.weight, std=0.02)
            nn.init.zeros_(gate.bias)
            gates.gate = self._like(gate, holder)

        return finish

    def _projection(self, stem: str) -> Any:
        """The projection of patches. Raises UnfitStem if they overlap."""
        projection: Any = self.model.get_submodule(stem)
        kernel = getattr(projection, "kernel_size", None)
        if kernel is not None and (kernel != projection.stride or (set(projection.padding) - {0, *"valid"})):
            raise UnfitStem(f"'{self.change}' needs patches that do not overlap, and those of {stem} do.")
        return projection

    def _new_stem(self, name: str, config: StemConfig) -> Callable[[], None]:
        self._check_free(name)
        projection = self._projection(name)
        if not isinstance(projection, nn.Conv2d):
            raise UnfitStem(
                f"'{self.change}' needs a convolution of images, and {name} is a {type(projection).__name__}."
            )
        sides = cast(tuple[int, int], projection.kernel_size)
        try:
            stem = make_stem(
                ViTConfig(sides, sides, projection.in_channels, 0, projection.out_channels, num_heads=1, stem=config)
            )
        except UserError as error:
            raise UnfitStem(f"'{self.change}' does not fit {name}: {error}") from None
        return partial(self._replace, name, StemOfImages(stem))

    def _gated_mlp(self, branch: Branch, hidden: int) -> Callable[[], None]:
        """In place of the outermost module that maps what the branch reads to what it puts out."""
        name, modules = branch.module, dict(self.model.named_modules())
        inside = {n: m for n, m in modules.items() if f"{n}.".startswith(f"{name}.")}
        maps = [m for m in inside.values() if is_map(m)]
        self._check_free(name)
        has_norm = branch.norm is not None and branch.norm.startswith(f"{name}.")
        if has_norm or len(maps) < 2:
            raise NotRecognized(f"'{self.change}' replaces MLPs, and that of {branch.block} is not one module.")
        norms = {site.name for site in norm_sites(self.model)}
        lost = [n for n, m in inside.items() if m not in maps and (n in norms or [*m.parameters(False)])]
        if lost:
            raise NotRecognized(f"'{self.change}' replaces the MLP {name} and would lose {lost[0]} inside it.")
        if any(not isinstance(m, nn.Linear) for m in maps) or widths(maps[0])[0] != branch.dim:
            raise NotRecognized(f"'{self.change}': the linear maps of {name} are not recognized.")
        if len(maps) > 2 or widths(maps[0])[1] != branch.hidden:
            raise NoEffect(f"'{self.change}' alters nothing: {name} is gated already.")
        dropouts = (m.p for m in inside.values() if isinstance(m, nn.Dropout))
        mlp = SwiGLU(branch.dim, hidden, bias=cast(Any, maps[-1]).bias is not None, drop=max(dropouts, default=0.0))
        return partial(self._replace, name, mlp)

    def _check_free(self, name: str) -> None:
        """Raise UserError if an earlier change has put something into a module that is to be replaced."""
        for own_name, module in self.model.named_modules():
            for child in module.places if isinstance(module, Insert) else ():
                served = f"{own_name.rpartition('.')[0]}.{child}".rstrip(".")
                if f"{served}.".startswith(f"{name}."):
                    raise UserError(f"'{self.change}' would take {own_name} of an earlier change out: give it first.")

    def _replace(self, name: str, new: nn.Module) -> None:
        old = self.model.get_submodule(name)
        self.removed += [f"{name}.{key}" for key in old.state_dict()]
        self.model.set_submodule(name, self._like(new, old))

    def _around_patches(self, stem: str, before: NormConfig | None, after: NormConfig | None) -> Callable[[], None]:
        projection = self._projection(stem)
        holder, child, label = self._holder(stem)
        sides = tuple(side for side, norm in (("before", before), ("after", after)) if norm is not None)
        norms = PatchNorms(nn.Identity(), nn.Identity(), {child: sides})
        norms.serve(holder, f"{PREFIX}{label}norms_{'_'.join(sides)}")
        values, channels = widths(projection)

        def finish() -> None:
            norms.norm_before = self._like(make_norm(before, values), projection)
            norms.norm_after = self._like(make_norm(after, channels), projection)

        return finish

    def _heads(self, attentions: tuple[str, ...], config: NormConfig) -> Callable[[], None]:
        """Try the places of queries and keys in turn. Attentions of one kind have them at the same place."""
        kinds: dict[Any, list[str]] = {}
        for name in attentions:
            module = self.model.get_submodule(name)
            present = [
                n for n, m in module.named_children() if re.fullmatch(f"(q|query)_?(layer)?_?norm|{PREFIX}heads", n)
            ]
            if any(not isinstance(module.get_submodule(n), nn.Identity) for n in present):
                raise NoEffect(f"'{self.change}' alters nothing: {name} normalizes its queries and keys already.")
            shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters() if p.ndim > 1)
            kinds.setdefault((type(module), count_heads(module), shapes), []).append(name)
        norm_places = []
        for names in kinds.values():
            if self.inputs is None:
                norm_places += [place for name in names if (place := self._place_heads(name, self.layouts[name]))]
                continue
            inputs = self.inputs
            places = next(filter(None, (self._try_heads(names, layout, inputs) for layout in LAYOUTS)), None)
            if places is None and isinstance(self.model.get_submodule(names[0]), nn.MultiheadAttention):
                raise NotRecognized(
                    f"'{self.change}' normalizes queries and keys, and the nn.MultiheadAttention {names[0]} computes "
                    "them inside one function."
                )
            if places is None:
                raise NotCertified(
                    f"'{self.change}': the queries and keys of {names[0]} are not recognized, or something else reads "
                    "them (positions, cosine attention): scaled inversely, they change what attention puts out."
                )
            norm_places += places

        def set_norms() -> None:
            for place in norm_places:
                for slot in ("q_norm", "k_norm"):
                    setattr(place.owner, slot, self._like(make_norm(config, place.dim), place.reference))

        return set_norms

    def _try_heads(self, names: list[str], layout: str, inputs: Inputs) -> list["_HeadPlace"] | None:
        """Where norms of queries and keys can be set in these attentions, if this layout is theirs: scaling the queries
        of each head by a number and its keys by the inverse leaves what each attention puts out, and scaling queries
        alone does not."""
        places = [place for name in names if (place := self._place_heads(name, layout)) is not None]
        if len(places) == len(names):
            generator = torch.Generator().manual_seed(0)
            scales = [torch.rand(place.heads[1], generator=generator) + 0.5 for place in places]
            outputs = []
            try:
                for queries, keys in ((0, 0), (1, 1), (1, 0)):
                    for place, scale in zip(places, scales, strict=True):
                        place.set_factors(scale**queries, scale**-keys)
                    outputs.append(_outputs_inside(self.model, inputs, names))
            except Exception:  # shapes that do not fit this layout
                outputs = []
            if outputs and self._is_product(*outputs):
                self.layouts.update(dict.fromkeys(names, layout))
                for place in places:
                    place.owner.q_norm, place.owner.k_norm = nn.Identity(), nn.Identity()
                return places
        for place in places:
            place.undo()
        return None

    def _is_product(self, plain: list[Tensor], both: list[Tensor], alone: list[Tensor]) -> bool:
        exact = difference(plain, both)
        moved = min(difference([a], [b]) for a, b in zip(plain, alone, strict=True))
        return exact < _tolerance(self.model) and moved > max(1e-7, 10 * exact)

    def _place_heads(self, name: str, layout: str) -> "_HeadPlace | None":
        module = self.model.get_submodule(name)
        heads, maps = count_heads(module), {n: m for n, m in module.named_modules() if is_map(m)}
        if layout == "slot":
            if not all(isinstance(getattr(module, slot, None), nn.Identity) for slot in ("q_norm", "k_norm")):
                return None
            if (dim := _head_dim(module, heads)) is None:
                return None

            def empty_slots() -> None:
                module.q_norm, module.k_norm = nn.Identity(), nn.Identity()

            return _HeadPlace(module, module, (heads, heads), dim, -3, empty_slots)
        if layout == "sdpa":
            # Where the projections are called, something may stand between them and the product, as norms or positions.
            is_called = any(f"{name}.{n}" in self.called and n.rpartition(".")[2] in (*JOINT, *QUERY) for n in maps)
            if is_called or (dim := _head_dim(module, heads)) is None:
                return None
            children = {"": ("before_attention", "after_attention")}
            return self._insert_heads(module, "sdpa", (heads, heads), dim, children, -3)
        joint = next((n for n in maps if n.rpartition(".")[2] in JOINT), None)
        query, key, pair = (
            next((n for n in maps if n.rpartition(".")[2] in kind), None) for kind in (QUERY, KEY, PAIR)
        )
        if layout == "separate":
            second = key or pair
            if query is None or second is None or widths(maps[query])[1] % heads:
                return None
            dim = widths(maps[query])[1] // heads
            width = widths(maps[second])[1] // (1 if key else 2)
            if width % dim:
                return None
            hooks = {query: ("after_query",), second: ("after_key" if key else "after_key_value",)}
            return self._insert_heads(module, "", (heads, width // dim), dim, hooks, -2)
        if joint is None or widths(maps[joint])[1] % (3 * heads):
            return None
        dim = widths(maps[joint])[1] // (3 * heads)
        return self._insert_heads(module, layout, (heads, heads), dim, {joint: ("after_joint",)}, -2)

    def _insert_heads(
        self, module: nn.Module, layout: str, heads: tuple[int, int], dim: int, children: Any, axis: int
    ) -> "_HeadPlace":
        norms = HeadNorms((nn.Identity(), nn.Identity()), heads, layout, children)
        norms.serve(module, f"{PREFIX}heads")
        return _HeadPlace(norms, module, heads, dim, axis, lambda: norms.withdraw(module))

    def _without(self, branch: Branch) -> None:
        if branch.norm is None:
            raise NotRecognized(f"'{self.change}': a norm before {branch.module} is not recognized.")
        norm = self.model.get_submodule(branch.norm)
        self.removed += [f"{branch.norm}.{name}" for name in norm.state_dict()]
        self.model.set_submodule(branch.norm, nn.Identity())

    def _swap(self) -> Callable[[], None]:
        """First the same norms again, which shows that they are called and how they compute."""
        change = cast(Norm | DynamicTokenNorm, self.change)
        anatomy, rows = choose_norms(self.model, change)
        sites = [row.site for row in rows if row.now]
        for site in sites:
            old = self.model.get_submodule(site.name)
            self.removed += [f"{site.name}.{name}" for name in old.state_dict()]
            if isinstance(old, nn.LayerNorm) or site.name in anatomy.rms:
                affine = bool(list(old.parameters(recurse=False)))
                same = NormConfig("rms" if site.name in anatomy.rms else "layer", eps_of(old), affine)
                new = norm_like(old, make_norm(same, site.dim), anatomy.rms.get(site.name, 0.0))
                self.model.set_submodule(site.name, new)

        def finish() -> None:
            swap_norms(self.model, Anatomy(self.model), change, sites)

        return finish

    def _to_rms(self) -> Callable[[], None]:
        """Exactly, which the certificate shows."""
        anatomy = Anatomy(self.model)
        try:
            swaps = rms_swaps(anatomy, self.parts)
            if self.inputs is not None:
                self.removed += center_stream(anatomy, self.parts, self.called)
        except NotRecognized as error:
            raise NotRecognized(f"'{self.change}' cannot be exact here: {error}. {INEXACT}") from None
        except NoEffect as error:
            raise NoEffect(f"'{self.change}' alters nothing: {error}.") from None
        for name, new in swaps.items():
            self.model.set_submodule(name, norm_like(anatomy.modules[name], new, 0.0))
        return lambda: None

    def _like(self, module: nn.Module, holder: nn.Module) -> nn.Module:
        reference = next((p for p in holder.parameters() if p.is_floating_point()), None)
        if reference is None:
            raise UserError(f"'{self.change}' cannot be put next to weights that are quantized.")
        return module.to(device=reference.device, dtype=reference.dtype).train(holder.training)

    def _check_neutral(self, inputs: Inputs) -> None:
        try:
            moved = difference(self.before, outputs_of(self.model, inputs))
        except Exception as error:  # whatever the model raises for a shape that the insertion does not fit
            raise NotCertified(f"'{self.change}' cannot be put into this model: {error}") from error
        if not moved <= _tolerance(self.model):
            raise NotCertified(
                f"'{self.change}' cannot be put into this model: in its neutral form it changes the outputs by "
                f"{moved:.0e} of the largest." + (f" {INEXACT}" if self.change == Norm("rms") else "")
            )


def swap_norms(model: nn.Module, anatomy: Anatomy, change: Norm | DynamicTokenNorm, sites: Sequence[NormSite]) -> bool:
    """Put what the change makes of them in these norms' places; returns whether tokens may now see later ones."""
    norms: dict[str, nn.Module] = {}
    for site in sites:
        old, (path, _, _) = model.get_submodule(site.name), site.name.rpartition(".")
        parent = model.get_submodule(path)
        slot = NormConfig("layer", eps=eps_of(old), affine=bool(list(old.parameters(recurse=False))))
        config = change.edit_norm(slot, site.stage) if isinstance(change, DynamicTokenNorm) else change.edit_norm(slot)
        assert config is not None
        grid = UNKNOWN if anatomy.stem_of(site) else None
        new: nn.Module = norm_factory(config, num_heads=site.heads, grid_size=grid)(site.dim)
        unit = config.facts.unit(site.dim)
        norms[site.name] = norm_like(old, new, anatomy.rms.get(site.name, 0.0), unit)
        model.set_submodule(site.name, norms[site.name])
        if isinstance(old, nn.BatchNorm1d):
            # The parent hands the tokens of all images to BatchNorm as one list; a row of the two modules does not.
            model.set_submodule(path, nn.Sequential(OrderedDict(parent.named_children())).train(parent.training))
    if isinstance(change, DynamicTokenNorm):
        give_grids(model, anatomy, norms)
    for module in model.modules():  # in evaluation PyTorch's encoder computes LayerNorm without calling the norms
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
    edited = change.edit_norm(NormConfig())
    assert edited is not None
    if not edited.facts.token_wise:
        ReadsMask.put_on(model)
    return not edited.facts.token_wise


@torch.no_grad()
def norm_like(old: nn.Module, new: nn.Module, offset: float, unit: float = 1.0) -> nn.Module:
    """The new norm with the old one's gain (weight plus ``offset``, as one or for each channel) in its unit, bias,
    device, type, mode and frozen parameters."""
    parameters = dict(old.named_parameters(recurse=False))
    if parameters:
        like = next(iter(parameters.values()))
        new = new.to(device=like.device, dtype=like.dtype)
    for name, target in new.named_parameters(recurse=False):
        target.requires_grad_(parameters[name].requires_grad if name in parameters else not is_frozen(old))
        if name == "weight" and name in parameters:
            gain = parameters[name] + offset
            target.copy_((gain if len(target) == len(gain) else gain.mean(0, keepdim=True)) * unit)
        elif name in parameters:
            target.copy_(parameters[name])
    return new.train(old.training)


def width_of(model: nn.Module) -> int:
    """The width of made tokens, for a model that takes neither images nor words: that of its first norm."""
    sites = norm_sites(model)
    return sites[0].dim if sites else 8


def outputs_of(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The numbers that a model puts out."""
    return [out for out in run(model, inputs) if out.is_floating_point()]


def _outputs_inside(model: nn.Module, inputs: Inputs, names: Sequence[str]) -> list[Tensor]:
    """The first tensor that each of these modules puts out, at its last call."""
    outputs: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Any, name: str) -> None:
        outputs[name] = next(tensors_of(output))

    hooks = [model.get_submodule(name).register_forward_hook(partial(keep, name=name)) for name in names]
    try:
        run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [outputs[name] for name in names]


def _tolerance(model: nn.Module) -> float:
    return TOLERANCE if next(model.parameters()).dtype in (torch.float32, torch.float64) else 5e-2


def difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest difference of outputs, relative to the largest of each."""
    if [out.shape for out in before] != [out.shape for out in after]:
        return float("nan")
    pairs = zip(before, after, strict=True)
    return max((float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)) for a, b in pairs), default=float("nan"))


def _check_kept(
    change: Change, before: Mapping[str, Tensor], after: Mapping[str, Tensor], removed: Sequence[str]
) -> None:
    """Raise UserError if a weight of the old model is not in the new one under its name."""
    lost = [
        name
        for name, value in before.items()
        if name not in removed and not (name in after and torch.equal(value, after[name]))
    ]
    if lost:
        raise NotCertified(f"'{change}' cannot be put into this model: it would lose {lost[0]}.")


@torch.enable_grad()
def _check_gradients(change: Change, model: nn.Module, inputs: Inputs, old: Iterable[str]) -> None:
    """Raise UserError if a new parameter does not get a gradient, or one that is not finite."""
    new = [(name, p) for name, p in model.named_parameters() if name not in set(old)]
    if not new:
        return
    try:
        outputs = [out for out in run(model, inputs, gradients=True) if out.requires_grad]
    except Exception as error:
        raise NotCertified(f"'{change}' cannot be put into this model: {error}") from error
    if not outputs:
        raise NotCertified(f"'{change}' cannot be put into this model: its outputs do not have gradients.")
    weights = [torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape) for out in outputs]
    loss = torch.stack([(out.float() * w).square().mean() + out.float().mean() for out, w in zip(outputs, weights)])
    gradients = torch.autograd.grad(loss.sum(), [p for _, p in new], allow_unused=True)
    for (name, _), gradient in zip(new, gradients, strict=True):
        if gradient is None or not gradient.isfinite().all():
            raise NotCertified(f"'{change}' cannot be put into this model: {name} does not get a finite gradient.")
