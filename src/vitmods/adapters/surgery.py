"""Changes put into a model of any library: its class and the names of its weights stay, and what the model computes
certifies each insertion."""

import json
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitmods.adapters.anatomy import (
    OTHER_NORMS,
    Anatomy,
    NormSite,
    count_heads,
    eps_of,
    is_below,
    is_map,
    maps_of,
    norm_sites,
    widths,
)
from vitmods.adapters.exact_rms import center_stream, rms_swaps
from vitmods.adapters.grid import UNKNOWN, ReadsMask, give_grids
from vitmods.adapters.heads import PREFIX, HeadPlace, HeadSearch
from vitmods.adapters.inputs import find_inputs
from vitmods.adapters.inserts import (
    Factors,
    Gates,
    Insert,
    InsertedNorm,
    InsertedPrompts,
    PatchNorms,
    Scale,
    StemOfImages,
)
from vitmods.adapters.new_norms import mark_new_norms
from vitmods.adapters.norm_choice import choose_norms, is_frozen
from vitmods.adapters.opened import open_attentions
from vitmods.adapters.parts import Timeline, check_hints, find_parts, norms_that_run
from vitmods.adapters.replay import Edit, Replay, record, same, scaling, scrambled, tolerance_of
from vitmods.adapters.running import (
    WRAPPERS,
    Inputs,
    check_not_wrapped,
    copy_model,
    difference,
    hooked,
    reads_last,
    run,
    tensors_of,
)
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
    PromptTokens,
    Without,
)
from vitmods.changes.norm import Norm
from vitmods.layers.mlp import SwiGLU
from vitmods.model.build import make_norm, make_stem, norm_factory
from vitmods.model.config import ViTConfig
from vitmods.model.slots import NormConfig, Slot, StemConfig
from vitmods.util.errors import NoEffect, NotCertified, NotRecognized, UnfitStem, UserError, explaining

MOST_CHANGES = 100  # that a folder may list; each looks at all modules
INEXACT = "Write norm(kind=rms,exact=false), which keeps the weights and alters the outputs."


class _Place(NamedTuple):
    """An insertion in its neutral form: ``finish`` makes it the change's, ``scale`` scales its ``branch`` where it is,
    by factors of channels."""

    finish: Callable[[], None]
    branch: Branch | None = None
    scale: Callable[[Tensor], Mapping[str, Edit]] | None = None


def operate(
    model: nn.Module, *changes: Change, example: Any = None, parts: Mapping[str, Any] | None = None
) -> nn.Module:
    """A copy of a model of any library with the changes put in, in order: its class, the names of its weights and the
    weights stay. The old model is untouched.

    Every insertion is certified on a small input (``example``, or one that is made: images of the model's size, words,
    tokens), on the model as it is and on a copy with random weights, in evaluation and in training without dropout:
    where it is, it computes what the change defines (docs/in-place.md), in a neutral form it leaves all outputs and
    those of the last block as they are, every new parameter gets a gradient, and the old weights are still there.
    ``parts`` says which modules are ``attention`` and ``mlp`` (patterns of names), and how many ``heads`` there are.

    Raises UserError if a change needs a model that can be read, a part that the change refers to is not recognized, or
    a certificate fails; SlotConflict when two changes claim one slot; NoEffect for a change that alters nothing.
    """
    check_conflicts(changes)
    check_not_wrapped(model)
    _check_plain(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("The model is on the meta device and has no weights: load them first.")
    hints = dict(parts or {})
    check_hints(hints)
    new = copy_model(model)
    make_plain(new)
    open_attentions(new)
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
        with torch.random.fork_rng(devices=[]):
            trial, given = scrambled(new, inputs)
            operation = _Operation(trial, change, find_parts(trial, given, hints), {}, given, True, hints.get("heads"))
            operation.certified()
        operation = _Operation(new, change, operation.parts, operation.layouts, inputs)
        new = operation.certified()
        if is_causal and reads_last(new, inputs):
            raise NotCertified(
                f"'{change}' cannot be put into this model: it is causal, and tokens would see later ones."
            )
        values = {"change": str(change), "parts": asdict(operation.parts), "heads": operation.layouts}
        record.append(json.loads(json.dumps(values)))
    new.vm_changes = (*getattr(model, "vm_changes", ()), *changes)  # type: ignore[assignment]
    new.vm_record = tuple(record)  # type: ignore[assignment]
    mark_new_norms(model, new, changes)
    kept = example if example is not None else getattr(model, "vm_example", None)
    new.vm_example = kept  # type: ignore[assignment]
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
        make_plain(model)
        open_attentions(model)
        for values in record:
            (change,) = parse_changes(values["change"])
            model = _Operation(model, change, parts_of(values), dict(values["heads"])).run()
            changes.append(change)
    model.vm_changes = (*getattr(model, "vm_changes", ()), *changes)  # type: ignore[assignment]
    model.vm_record = (*getattr(model, "vm_record", ()), *record)  # type: ignore[assignment]
    return model


def _alike(path: str) -> str:
    """A path without its numbers, which the blocks of a model share."""
    return re.sub(r"\d+", "*", path)


def parts_of(values: Mapping[str, Any]) -> Parts:
    """The parts that a change of a ``vm_record`` refers to."""
    parts = dict(values["parts"])
    parts["branches"] = tuple(Branch(**branch) for branch in parts["branches"])
    parts["norm"] = NormConfig(**parts["norm"])
    return Parts(**parts)


def record_of_changes(model: nn.Module) -> list[Mapping[str, Any]]:
    """The record for `repeat` of a changed model, or of one with a changed part."""
    return [values for module in model.modules() for values in getattr(module, "vm_record", ())]


@dataclass(eq=False)
class _Operation:
    """One change put into one model, in place: certified on inputs, or without them as it was before.

    ``layouts`` is where each attention has its queries and keys, as far as it is known. ``removed`` are the names of
    weights that were taken out. ``strict`` is for weights at which each part has an effect. ``heads`` is their number,
    if the user says it.
    """

    model: nn.Module
    change: Change
    parts: Parts
    layouts: dict[str, Any]
    inputs: Inputs | None = None
    strict: bool = False
    heads: int | None = None

    def __post_init__(self) -> None:
        timeline = Timeline(self.model, self.inputs) if self.inputs is not None else None
        self.called = timeline.ends if timeline else {}
        self.search = HeadSearch(self.model, self.parts, self.layouts, self.inputs, timeline, self.strict, self.heads)
        self.before = [] if self.inputs is None else self._outputs(self.inputs)
        self.removed: list[str] = []

    def certified(self) -> nn.Module:
        """The model with the change, whose old weights are kept and whose new ones get gradients."""
        assert self.inputs is not None
        before = {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}
        self.run()
        after = self.model.state_dict()
        lost = [name for name, old in before.items() if not (name in after and torch.equal(old, after[name]))]
        if lost := [name for name in lost if name not in self.removed]:
            raise NotCertified(f"'{self.change}' cannot be put into this model: it would lose {lost[0]}.")
        _check_gradients(self.change, self.model, self.inputs, before)
        return self.model

    def run(self) -> nn.Module:
        """The model with the change."""
        if not self.parts.blocks and Slot.NORM_KIND not in self.change.fills:
            raise NotRecognized(f"In a {type(self.model).__name__} no block with attention is recognized.")
        # All insertions are made in their neutral form, certified together, and then get their modules.
        insertions = list(self.change.insertions(self.parts))
        if not insertions:
            self._check_branches()
            raise NoEffect(f"'{self.change}' alters nothing in this model.")
        if any(isinstance(insertion, OnBranch | Heads | ExactRMS) for insertion in insertions):
            self._check_attentions()
        if any(isinstance(insertion, OnBranch | PromptTokens) for insertion in insertions):
            self._check_branches()
        there = set(self.model.modules())
        places = [self._insert(insertion) for insertion in insertions]
        inserted = [m for m in self.model.modules() if isinstance(m, Insert) and m not in there]
        served = [(m.hung[child][0], way) for m in inserted for child, ways in m.places.items() for way in ways]
        if len(set(served)) < len(served):
            raise NotCertified(f"'{self.change}': blocks share a module that it changes: give each a copy (deepcopy).")
        if self.inputs is not None:
            for training in (False, True):
                self._check_definition([place for place in places if place.scale], self.inputs, training)
            self._check_neutral(self.inputs)
        for place in places:
            place.finish()
        return self.model

    def _outputs(self, inputs: Inputs) -> list[Tensor]:
        """What the model puts out and its last block does, in evaluation and in training: a new head may be zero."""
        last: list[Tensor] = []
        blocks = [self.model.get_submodule(name) for name in self.parts.blocks[-1:]]
        with hooked(b.register_forward_hook(lambda m, args, out: last.extend(tensors_of(out))) for b in blocks):
            outputs = [out for training in (False, True) for out in run(self.model, inputs, training=training)]
        if isinstance(self.change, Norm) and self.change == Norm("rms"):  # whose stream is centered
            last = [out - out.mean(-1, keepdim=True) for out in last if out.is_floating_point()]
        return [out.clone() for out in (*outputs, *last) if out.is_floating_point()]

    def _check_attentions(self) -> None:
        """Raise UserError for an attention that the change would leave out without a reason of the model's."""
        left = [f"{name} {why}" for name, why in self.parts.others if not why.startswith("it ")]
        if left:
            count = len(self.parts.attentions)
            raise NotRecognized(
                f"'{self.change}' would change {count} of {count + len(self.parts.others)} attentions: {left[0]}."
            )

    def _check_definition(self, places: Sequence[_Place], inputs: Inputs, training: bool) -> None:
        """Raise UserError if a branch, where an insertion scales it, is not what is added to the stream, scaled."""
        blocks = list(dict.fromkeys(place.branch.block for place in places if place.branch))
        ours = [f"{name}.norm" for name, m in self.model.named_modules() if isinstance(m, InsertedNorm)]
        norms = norms_that_run(self.model, blocks, self.called)
        for block, names in norms.items():
            names += [name for name in ours if name in self.called and is_below(name, block) and name not in names]
        for call in record(self.model, inputs, norms, training) if norms else ():
            modules = [branch.module for branch in self.parts.branches if branch.block == call.block]
            for _, branch, scale in places:
                if branch is None or scale is None or branch.block != call.block:
                    continue
                others: dict[str, Edit] = {n: torch.zeros_like for n in modules if n != branch.module}
                like = next(self.model.get_submodule(branch.projection).parameters()).new_ones(branch.dim)
                behind = not f"{branch.projection}.".startswith(f"{branch.module}.") or any(
                    n in ours for n in call.norms
                )
                if call.adds(scale, others, like, self.strict, behind) is None:
                    mode = "training" if training else "evaluation"
                    raise NotCertified(
                        f"'{self.change}' cannot be put into this model: in {mode}, {branch.block} does not add to its "
                        f"stream what {branch.module} puts out, times factors of channels."
                    )

    def _check_branches(self) -> None:
        """Raise UserError if a block lacks a branch, which the change would leave out."""
        branches = {(branch.block, branch.kind) for branch in self.parts.branches}
        for block, (kind, name) in product(self.parts.blocks, (("attn", "attention"), ("mlp", "MLP"))):
            if (block, kind) not in branches:
                raise NotRecognized(
                    f"'{self.change}': the {name} of {block or 'the model'} is not recognized as a residual branch, "
                    "which is added to the stream times a factor at most."
                )

    def _insert(self, insertion: Insertion) -> _Place:
        """Insert the neutral form."""
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
                return self._without(branch)
            case GatedMLP(branch, hidden):
                return self._gated_mlp(branch, hidden)
            case NewStem(stem, config):
                return self._new_stem(stem, config)
            case PromptTokens(blocks, count):
                return self._prompts(blocks, count)
            case ExactRMS():
                return self._to_rms()
            case _:
                return self._swap()

    def _holder(self, name: str) -> tuple[nn.Module, str, str]:
        """Where an insertion for a module is registered, the child that it serves there, and a name for it: a linear
        map or a norm may be wrapped or replaced later, so the module around it that is called holds its insertions."""
        containers, module = nn.Sequential | nn.ModuleList | nn.ModuleDict, self.model.get_submodule(name)
        if any(module.children()) and not (isinstance(module, containers) or is_map(module)):
            return module, "", ""
        holder = name.rpartition(".")[0]
        while isinstance(self.model.get_submodule(holder), containers):
            holder = holder.rpartition(".")[0]
        child = name.removeprefix(f"{holder}.") if holder else name
        return self.model.get_submodule(holder), child, f"{child.replace('.', '_')}_"

    def _scale(self, branch: Branch, init: float) -> _Place:
        block, slot = self.model.get_submodule(branch.block), {"attn": "ls1", "mlp": "ls2"}[branch.kind]
        layer_scale = getattr(sys.modules[type(block).__module__], "LayerScale", None)
        if layer_scale is not None and isinstance(getattr(block, slot, None), nn.Identity):  # timm's
            setattr(block, slot, self._like(layer_scale(branch.dim, init_values=1.0), block))
            weight = getattr(block, slot).gamma
        else:
            holder, child, label = self._holder(branch.module)
            scale = Scale(branch.dim, 1.0, {child: ("after",)}, branch.axis)
            scale.serve(holder, f"{PREFIX}{label}scale")
            weight = scale.weight

        def set_factors(factors: Tensor) -> dict[str, Edit]:
            weight.data.copy_(factors)
            return {}

        return _Place(lambda: cast(None, nn.init.constant_(weight, init)), branch, set_factors)

    def _norm(self, branch: Branch, config: NormConfig, when: str) -> _Place:
        name, dim = (branch.module, branch.dim) if when == "after" else (branch.projection, branch.hidden)
        module = self.model.get_submodule(name)
        if when == "before" and (not is_map(module) or _is_convolution(module)):
            raise NotRecognized(
                f"'{self.change}' needs the output projection of {name}, which is not called as a linear map of tokens."
            )
        holder, child, label = self._holder(name)
        axis = branch.axis if when == "after" else -1
        inserted = InsertedNorm(nn.Identity(), {child: (when,)}, axis)
        inserted.serve(holder, f"{PREFIX}{label}norm_{when}")

        def set_factors(factors: Tensor) -> dict[str, Edit]:
            inserted.norm = Factors(factors)
            return {}

        def finish() -> None:
            inserted.norm = self._like(make_norm(config, dim), holder)

        return _Place(finish, branch, set_factors if when == "after" else scaling(name, axis))

    def _gate(self, branch: Branch, per: str) -> _Place:
        near = [a for a in self.parts.attentions if f"{a}.".startswith(f"{branch.block}.".lstrip("."))]
        inside = [a for a in near if f"{branch.projection}.".startswith(f"{a}.")]
        before = [a for a in near if not self.called or self.called[a] < self.called[branch.projection]]
        attention = next(iter([*inside, *before[::-1]]), None)
        places = self.search.find([attention], branch.projection, per) if attention is not None else None
        if attention is None or places is None:
            raise NotCertified(
                f"'{self.change}': what {branch.projection} reads is not what the heads of {attention} put out, token "
                "by token."
            )
        places[0].undo()
        module, heads = self.model.get_submodule(attention), places[0].layout.heads[0]
        child = places[0].layout.query or ("tokens" if hasattr(module, "tokens") else next(iter(maps_of(module)), ""))
        query = f"{attention}.{child}".strip(".")
        if self.called and not {query, branch.projection} <= self.called.keys():
            raise NotRecognized(f"'{self.change}': the projections of {branch.module} are not called as modules.")
        path = attention
        while not branch.projection.startswith(f"{path}.".lstrip(".")):
            path = path.rpartition(".")[0]
        holder = self.model.get_submodule(path)
        query, projection = (n.removeprefix(f"{path}.") for n in (query, branch.projection))
        gates = Gates({query: ("before_query",), projection: ("before_projection",)})
        gates.serve(holder, f"{PREFIX}gate")

        def finish() -> None:
            width: Any = module.embed_dim if child == "tokens" else widths(module.get_submodule(child))[0]
            gate = nn.Linear(width, heads if per == "head" else branch.hidden)
            nn.init.trunc_normal_(gate.weight, std=0.02)
            nn.init.zeros_(gate.bias)
            gates.gate = self._like(gate, holder)

        return _Place(finish, branch, scaling(branch.projection))

    def _projection(self, stem: str) -> Any:
        """The projection of patches. Raises UnfitStem if they overlap."""
        projection: Any = self.model.get_submodule(stem)
        kernel = getattr(projection, "kernel_size", None)
        if kernel is not None and (kernel != projection.stride or (set(projection.padding) - {0, *"valid"})):
            raise UnfitStem(f"'{self.change}' needs patches that do not overlap, and those of {stem} do.")
        return projection

    def _new_stem(self, name: str, config: StemConfig) -> _Place:
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
        return _Place(partial(self._replace, name, StemOfImages(stem)))

    def _gated_mlp(self, branch: Branch, hidden: int) -> _Place:
        """In place of the outermost module that maps what the branch reads to what it puts out."""
        name, modules = branch.module, dict(self.model.named_modules())
        inside = {n: m for n, m in modules.items() if f"{n}.".startswith(f"{name}.")}
        maps = [inside[n] for n in maps_of(self.model) if n in inside]
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
        return _Place(partial(self._replace, name, mlp), branch, scaling(name))

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

    def _around_patches(self, stem: str, before: NormConfig | None, after: NormConfig | None) -> _Place:
        projection = self._projection(stem)
        holder, child, label = self._holder(stem)
        sides = tuple(side for side, norm in (("before", before), ("after", after)) if norm is not None)
        norms = PatchNorms(nn.Identity(), nn.Identity(), {child: sides})
        norms.serve(holder, f"{PREFIX}{label}norms_{'_'.join(sides)}")
        values, channels = widths(projection)

        def finish() -> None:
            norms.norm_before = self._like(make_norm(before, values), projection)
            norms.norm_after = self._like(make_norm(after, channels), projection)

        return _Place(finish)

    def _heads(self, attentions: tuple[str, ...], config: NormConfig) -> _Place:
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
            kinds.setdefault((type(module), count_heads(module), shapes, repr(self.layouts.get(name))), []).append(name)
        found: list[HeadPlace] = []
        for names in kinds.values():
            places = self.search.find(names)
            if places is None:
                raise NotCertified(
                    f"'{self.change}': the queries and keys of the heads of {names[0]} are not recognized, or "
                    "something else reads them (positions, cosine attention). Say how many heads there are with "
                    "parts={'heads': ...}."
                )
            found += places

        def set_norms() -> None:
            for place in found:
                make = partial(make_norm, config, place.dim)
                place.set_norms(lambda make=make, near=place.reference: self._like(make(), near))  # type: ignore[misc]

        return _Place(set_norms)

    def _prompts(self, blocks: tuple[str, ...], count: int) -> _Place:
        if any(isinstance(module, InsertedPrompts) for module in self.model.modules()):
            raise UserError(f"'{self.change}' is for models without prompts, and this one has some: leave it out.")
        calls = [] if self.inputs is None else record(self.model, self.inputs, dict.fromkeys(blocks, ()), False)
        counts = Counter(call.block for call in calls)
        for call in calls:
            if counts[call.block] > 1:
                raise NotRecognized(f"'{self.change}' cannot be put into this model: {call.block} runs more than once.")
            if not call.takes_any_order():
                raise NotCertified(
                    f"'{self.change}' cannot be put into this model: {call.block} does not treat tokens alike in "
                    "any order, as rotary and relative positions, windows and masks do not."
                )
        dim, stem = self.parts.branches[0].dim, self.parts.stem
        values = widths(self.model.get_submodule(stem))[0] if stem else dim
        inserted = [InsertedPrompts(dim, {block: ("before", "after")}) for block in blocks]
        for i, prompts in enumerate(inserted):
            prompts.serve(self.model, f"{PREFIX}prompts_{i}")

        def finish() -> None:
            for prompts in inserted:
                prompts.draw(count, values)

        return _Place(finish)

    def _without(self, branch: Branch) -> _Place:
        norm = branch.norm
        if norm is None:
            raise NotRecognized(f"'{self.change}': a norm before {branch.module} is not recognized.")
        for call in record(self.model, self.inputs, {branch.block: [norm]}, False) if self.inputs else ():
            self._check_reads_alone(call, branch, norm)

        def finish() -> None:
            self.removed += [f"{norm}.{name}" for name in self.model.get_submodule(norm).state_dict()]
            self.model.set_submodule(norm, nn.Identity())

        return _Place(finish, branch, scaling(branch.module))

    def _check_reads_alone(self, call: Replay, branch: Branch, norm: str) -> None:
        """Raise UserError if the norm reads something else than the stream, or not this branch alone reads the norm."""
        without: dict[str, Edit] = {branch.module: torch.zeros_like}
        everything = {b.module: torch.zeros_like for b in self.parts.branches if b.block == branch.block}
        (stream, read, *_), _ = call.run(everything)
        (plain, *_), (other, *_) = (call.run({**without, **edit})[0] for edit in ({}, {norm: lambda x: 2 * x + 1}))
        reads_stream = same(stream.flatten(0, -2), read.flatten(0, -2), tolerance_of(self.model))
        if not (reads_stream and same(plain, other, tolerance_of(self.model))):
            raise NotCertified(
                f"'{self.change}': {branch.module} is not the one reader of {norm}, or that does not read the stream."
            )

    def _swap(self) -> _Place:
        """First the same norms again, which shows that they are called and how they compute."""
        change = cast(Norm | DynamicTokenNorm, self.change)
        anatomy, rows = choose_norms(self.model, change)
        sites = [row.site for row in rows if row.now]
        kinds = {name: type(anatomy.modules[name]).__name__ for name in anatomy.unknown_norms()}
        left = [f"{name}, whose class {kind} is not a known norm" for name, kind in kinds.items()]
        maps = maps_of(self.model)
        for site in anatomy.sites:
            around = [a for a in anatomy.attentions if is_below(site.name, a)]
            reading = [self.called[n] for n in maps if around and is_below(n, around[0]) and n in self.called]
            in_front = reading and self.called.get(site.name, max(reading)) < min(reading)
            if site.role == "inside" and in_front and site not in sites:
                left.append(f"{site.name}, which is inside attention and normalizes what it reads")
        for block in (b for b in self.parts.blocks if not any(is_below(site.name, b) for site in sites)):
            kept = ((n, m) for n, m in anatomy.modules.items() if is_below(n, block) and isinstance(m, OTHER_NORMS))
            left += [f"{name}, a {type(module).__name__} that it does not replace" for name, module in kept]
        inside = {_alike(row.site.name): row.site.name for row in rows if not row.now and row.site.role == "inside"}
        counterparts = [inside[name] for site in sites if (name := _alike(site.name)) in inside]
        left += [f"{name}, and change its counterparts" for name in counterparts]
        if left:
            raise NotRecognized(
                f"'{self.change}' would leave out {left[0]}. Name the norms to replace with "
                "vm.replace_norms(..., where=...)."
            )
        silent = [site.name for site in sites if self.inputs is not None and site.name not in self.called]
        if silent:
            raise NotCertified(f"'{self.change}': {silent[0]} is not run on this input: give example= that runs it.")
        for site in sites:
            old = self.model.get_submodule(site.name)
            self.removed += [f"{site.name}.{name}" for name in old.state_dict()]
            if isinstance(old, nn.LayerNorm) or site.name in anatomy.rms:
                affine = bool(list(old.parameters(recurse=False)))
                same = NormConfig("rms" if site.name in anatomy.rms else "layer", eps_of(old), affine)
                new = norm_like(old, make_norm(same, site.dim), anatomy.rms.get(site.name, 0.0))
                self.model.set_submodule(site.name, new)

        return _Place(lambda: cast(None, swap_norms(self.model, Anatomy(self.model), change, sites)))

    def _to_rms(self) -> _Place:
        """Exactly, which the certificate shows."""
        anatomy = Anatomy(self.model)
        try:
            self._check_branches()
            swaps = rms_swaps(anatomy, self.parts)
            if self.inputs is not None:
                self.removed += center_stream(anatomy, self.parts, self.called)
        except NotRecognized as error:
            why = str(error).removeprefix(f"'{self.change}': ").rstrip(".")
            raise NotRecognized(f"'{self.change}' cannot be exact here: {why}. {INEXACT}") from None
        except NoEffect as error:
            raise NoEffect(f"'{self.change}' alters nothing: {error}.") from None
        for name, new in swaps.items():
            self.model.set_submodule(name, norm_like(anatomy.modules[name], new, 0.0))
        return _Place(lambda: None)

    def _like(self, module: nn.Module, holder: nn.Module) -> nn.Module:
        reference = next((p for p in holder.parameters() if p.is_floating_point()), None)
        if reference is None:
            raise UserError(f"'{self.change}' cannot be put next to weights that are quantized.")
        return module.to(device=reference.device, dtype=reference.dtype).train(holder.training)

    def _check_neutral(self, inputs: Inputs) -> None:
        try:
            moved = difference(self.before, self._outputs(inputs))
        except Exception as error:  # whatever the model raises for a shape that the insertion does not fit
            raise NotCertified(f"'{self.change}' cannot be put into this model: {error}") from error
        if not moved <= tolerance_of(self.model):
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
    make_plain(model)
    edited = change.edit_norm(NormConfig())
    assert edited is not None
    if not edited.facts.token_wise:
        ReadsMask.put_on(model)
    return not edited.facts.token_wise


def _check_plain(model: nn.Module) -> None:
    """Raise UserError for parts that compute something else than their modules' classes, or are replaced later."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ in WRAPPERS:
            raise UserError(f"{name} is a {type(module).__name__}: change the model first, then compile or wrap it.")
    odd = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor) or value.is_quantized]
    if odd or not all(p.is_floating_point() or p.is_complex() for p in model.parameters()):
        raise UserError("The model is quantized: change it first, then quantize it.")


def _is_convolution(module: nn.Module) -> bool:
    return hasattr(getattr(module, "base_layer", module), "kernel_size")


def make_plain(model: nn.Module) -> None:
    """Turn off the form of PyTorch's encoder that in evaluation computes without calling its modules."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0


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
