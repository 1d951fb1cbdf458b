"""Finds the parts of a transformer that changes refer to, by runs: where it computes attention, which linear maps end
the branches of its blocks, and how these are added to the stream."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitmods.adapters.anatomy import (
    Anatomy,
    ancestors,
    count_heads,
    eps_of,
    is_below,
    maps_of,
    norm_sites,
    widths,
    within,
)
from vitmods.adapters.replay import Edit, Replay, record, same, scaling
from vitmods.adapters.running import Inputs, hooked, run, tensors_of
from vitmods.changes.insertions import Branch, Parts
from vitmods.layers.norms import NORMS
from vitmods.model.slots import NormConfig
from vitmods.util.errors import UserError

_HINTS = ("attention", "heads", "mlp")


@dataclass(frozen=True)
class Attend:
    """Weights of attention that a run computes, or a fused form of it: ``shape`` is that of the weights or queries.
    ``around`` are the modules that run then, the outermost first; ``time`` is the number of modules that have ended."""

    around: tuple[str, ...]
    time: int
    shape: tuple[int, ...]
    is_fused: bool


class Timeline(TorchDispatchMode):
    """What happens in a run: ``ends`` is when each module that runs last ends, ``firsts`` when it first does, both in
    numbers of modules that have ended; ``attends`` are softmax and fused attention, but not a softmax over the channels
    that a linear map puts out (a router, a classifier) or of one weight for each token (pooling).
    Nothing is seen of a model that does not run then, as one with compiled attention (``flex_attention``)."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ends: dict[str, int] = {}
        self.firsts: dict[str, int] = {}
        self.attends: list[Attend] = []
        self._stack: list[str] = []
        self._time, self._mapped = 0, (torch.Size(), 0)
        maps = {*maps_of(model)}

        def end(module: nn.Module, args: Any, output: Any, name: str) -> None:
            self._stack.pop()
            self._time += 1
            self.ends[name] = self._time
            self.firsts.setdefault(name, self._time)
            if name in maps and (out := next(tensors_of(output), None)) is not None:
                self._mapped = (out.shape, 1 if isinstance(module, nn.Conv2d) else out.ndim - 1)

        hooks = []
        for name, module in model.named_modules():
            hooks += [
                module.register_forward_pre_hook(lambda m, a, name=name: self._stack.append(name)),
                module.register_forward_hook(partial(end, name=name)),
            ]
        with hooked(hooks):
            try:
                with self:
                    run(model, inputs)
            except Exception:
                self._stack, self._time, self.attends = [], 0, []
                run(model, inputs)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        shape, axis = self._mapped
        if name.startswith(("_softmax.", "_safe_softmax.")):
            weights = args[0]
            mapped = weights.shape == shape and (args[1] % weights.ndim == axis or shape[axis] == 1)
            if not mapped and weights.ndim > 2 and (weights.ndim > 3 or min(weights.shape[1:]) > 1):
                self.attends.append(Attend(tuple(self._stack), self._time, tuple(weights.shape), False))
        elif name.startswith("_scaled_dot_product") and args[0].ndim > 2:
            self.attends.append(Attend(tuple(self._stack), self._time, tuple(args[0].shape), True))
        return function(*args, **(kwargs or {}))


def _anatomy(model: nn.Module, timeline: Timeline, hints: Mapping[str, Any]) -> Anatomy:
    """The anatomy of a model whose attentions are the innermost modules around weights of attention that have a linear
    map in front of them, or one that they do not call, or weights of their own. Raises UserError for hints that fit no
    module."""
    modules, last = dict(model.named_modules(remove_duplicate=False)), timeline.ends
    maps = maps_of(model)
    dims = {widths(modules[n])[1] for n in maps}
    own = [n for n, m in modules.items() if any(p.ndim > 1 and p.shape[-1] in dims for p in m.parameters(False))]
    attends: dict[str, list[Attend]] = {}
    for attend in timeline.attends:
        for name in reversed(attend.around):
            makes = (n for n in maps if within(n, name) and timeline.firsts.get(n, 0) <= attend.time)
            if name in own or any(makes):
                attends.setdefault(name, []).append(attend)
                break
    if "attention" in hints:
        attends = {name: attends.get(name, []) for name in _named(hints, "attention", last)}
    if not timeline.attends:
        attends |= {name: [] for name in Anatomy(model).attentions if name in last}
    written = []
    for name, found in attends.items():
        behind = [n for n in maps if within(n, name) and found and last.get(n, 0) > found[-1].time]
        written += [name] if len(behind) > 2 else []
    # The same at other places, and what does not run but is like one that does, or is called so.
    kinds = {type(modules[name]) for name in attends if name not in written}
    idle = [n for n, m in modules.items() if n not in last and type(m) in kinds]
    names = dict.fromkeys([*attends, *idle, *(n for n in Anatomy(model).attentions if n not in last)])
    mlps = _named(hints, "mlp", last) if "mlp" in hints else []
    return Anatomy(model, {name: count_heads(modules[name]) for name in names}, written, mlps)


def _named(hints: Mapping[str, Any], part: str, last: Mapping[str, int]) -> list[str]:
    names = [name for name in last if fnmatchcase(name, hints[part])]
    if not names:
        shown = ", ".join(dict.fromkeys(name for name in list(last)[:-1] if name.count(".") < 4))
        raise UserError(f"parts: no module that runs fits {part} {hints[part]!r}. These run: {shown[:400]}.")
    return names


def check_hints(hints: Mapping[str, Any]) -> None:
    """Raise UserError for hints of other names or types."""
    for name, value in hints.items():
        if name not in _HINTS:
            raise UserError(f"parts: {name!r} is not one of {', '.join(_HINTS)}.")
        what = "a number" if name == "heads" else "a pattern of names of modules"
        if not (isinstance(value, int) and value > 0 if name == "heads" else isinstance(value, str)):
            raise UserError(f"parts: {name} is {what}, not {value!r}.")


def find_parts(model: nn.Module, inputs: Inputs, hints: Mapping[str, Any] | None = None) -> Parts:
    """The parts of a model that changes refer to, from runs of the model and repeated runs of its blocks.

    A branch's module is the outermost one whose output is the branch's, without the residual: scaled and left out
    while the other branches of the block are left out, it scales and leaves out what is added to the stream. Branches
    of a block where no choice of modules does so are not among the parts. ``model`` has random weights. ``hints`` are
    what a user says: patterns of the names of modules for ``attention`` and ``mlp``, the number of ``heads``.

    In a model without attention no block is recognized.
    """
    timeline = Timeline(model, inputs)
    anatomy, last = _anatomy(model, timeline, hints or {}), timeline.ends
    blocks = [block.name for block in anatomy.blocks if block.name in last]
    norms = norms_that_run(model, blocks, last)
    calls: dict[str, list[Replay]] = {block: [] for block in blocks}
    for call in record(model, inputs, norms, training=False):
        calls[call.block].append(call)
    branches: list[Branch] = []
    post_norm: list[str] = []
    dims: set[int] = set()
    found: tuple[int, ...] = (0, 0)
    for name in blocks:
        ends = _ends(anatomy, name, calls[name], last)
        dims |= {widths(anatomy.modules[end])[1] for end in ends}
        chains = list(_chains(anatomy, timeline, name, ends))
        longest = max((len(names) for _, names in chains), default=0)
        # Blocks of a model are alike: what the one before has is tried first.
        for levels in sorted(product(range(longest), repeat=2), key=lambda pair: (pair != found, sum(pair))):
            modules = [names[min(levels[kind == "mlp"], len(names) - 1)] for kind, names in chains]
            points = _points(anatomy, calls[name], [names[-1] for _, names in chains], modules)
            if points is not None:
                found = levels
                post_norm += [name] if any(is_in_front for is_in_front, _ in points) else []
                branches += [
                    _branch(anatomy, name, kind, names[-1], module, axis, last)
                    for (kind, names), module, (_, axis) in zip(chains, modules, points, strict=True)
                ]
                break
    attentions = [a for a in anatomy.attentions if a in last and any(within(a, name) for name in blocks)]
    before = next((site for site in anatomy.sites if site.role == "attn"), None)
    config = NormConfig()
    if before:
        norm = anatomy.modules[before.name]
        kinds = (name for name, kind in NORMS.items() if type(norm) is kind.module)
        config = NormConfig(next(kinds, "rms" if before.name in anatomy.rms else "layer"), eps_of(norm))
    reads = next(tensors_of([*inputs[0], *inputs[1].values()]))
    stem = _stem(anatomy, blocks, last, dims) if reads.is_floating_point() else None
    known = [anatomy.modules[name] for name in blocks]  # under another name too
    left = [a for a in anatomy.attentions if a not in attentions]
    others = {a: anatomy.reason(a, last) for a in left if anatomy.modules[anatomy.block_of(a) or ""] not in known}
    others |= dict.fromkeys(anatomy.siblings(blocks, last), "is beside the blocks, and its attention is not recognized")
    return Parts(
        tuple(blocks), tuple(branches), tuple(attentions), stem, config, tuple(post_norm), tuple(others.items())
    )


def norms_that_run(model: nn.Module, blocks: Sequence[str], last: Mapping[str, int]) -> dict[str, list[str]]:
    """The norms in each block, in order: those that are known, and modules without linear maps that are called so."""
    modules, maps = dict(model.named_modules()), maps_of(model)
    known = {site.name for site in norm_sites(model)}
    called = [n for n in last if "norm" in type(modules[n]).__name__.lower() and not any(within(m, n) for m in maps)]
    norms = sorted({n for n in (*known, *called) if n in last}, key=last.__getitem__)
    return {block: [n for n in norms if is_below(n, block)] for block in blocks}


def _ends(anatomy: Anatomy, block: str, calls: Sequence[Replay], last: Mapping[str, int]) -> list[str]:
    """The linear maps that end branches, in order: what they put out reaches the block's output although all other maps
    of that width put out what they did. In the model as a whole, the map of the stem does so too."""
    points, _ = calls[0].run({})
    dims = {point.shape[axis] for point in points for axis in (-1, 1) if point.ndim > 2}
    inside = [n for n in anatomy.maps if n in last and is_below(n, block) and widths(anatomy.modules[n])[1] in dims]
    inside.sort(key=last.__getitem__)
    kept: dict[str, list[Tensor]] = {name: [] for name in inside}

    def keep(name: str, out: Tensor) -> Tensor:
        kept[name].append(out.clone())
        return out

    def disturb(out: Tensor) -> Tensor:
        return out + torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)

    (before, *_), _ = calls[0].run({name: partial(keep, name) for name in inside})
    ends = []
    for name in inside:
        fixed = {n: iter(outs) for n, outs in kept.items() if n != name}
        edits: dict[str, Edit] = {n: lambda out, outs=outs: next(outs, out) for n, outs in fixed.items()}  # type: ignore[misc]
        (after, *_), _ = calls[0].run({**edits, name: disturb})
        if not same(before, after, 1e-6):
            ends.append(name)
    first = min((last[n] for n in anatomy.attentions if n in last and within(n, block)), default=0)
    return [end for end in ends if block or last[end] > first or any(within(end, a) for a in anatomy.attentions)]


def _chains(anatomy: Anatomy, timeline: Timeline, block: str, ends: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
    """For each branch its kind and the modules that end with it: a norm behind it, and those around its last map, from
    the outermost to the map."""
    last, begin = timeline.ends, -1
    attends = [attend.time for attend in timeline.attends if block in attend.around]
    unseen = [a for a in anatomy.attentions if a in last and not any(a in t.around for t in timeline.attends)]
    attends += [min(last[n] for n in last if within(n, a)) for a in unseen if within(a, block)]
    for end in ends:
        chain = [n for n in (end, *ancestors(end)) if n in last and is_below(n, block)]
        chain = [n for n in reversed(chain) if not any(within(other, n) for other in ends if other != end)]
        # A norm in front of a branch, in a row with it, is not part of it.
        rows = [n for n in chain if isinstance(anatomy.modules[n], nn.Sequential)]
        mixed = [n for n in rows if any(is_below(site.name, n) for site in anatomy.sites)]
        chain = [n for n in chain if n not in mixed]
        attends_inside = any(begin <= time < last[end] for time in attends)
        is_mlp = any(within(end, mlp) for mlp in anatomy.mlps)
        is_attention = any(within(end, a) for a in anatomy.attentions if a not in anatomy.written) or attends_inside
        yield "attn" if is_attention and not is_mlp else "mlp", _trailing(anatomy, block, chain, last) + chain
        begin = last[end]


def _trailing(anatomy: Anatomy, block: str, chain: list[str], last: Mapping[str, int]) -> list[str]:
    """The first norm behind the projection of a branch: it may be the branch's last part (Swin V2, Gemma 2)."""
    later = [s for s in anatomy.sites if is_below(s.name, block) and last.get(s.name, -1) > last[chain[-1]]]
    norms = sorted(later, key=lambda site: last[site.name])[:1]
    dim = widths(anatomy.modules[chain[-1]])[1]
    return [s.name for s in norms if s.dim == dim and not any(is_below(s.name, module) for module in chain)]


def _points(
    anatomy: Anatomy, calls: list[Replay], projections: list[str], modules: list[str]
) -> list[tuple[bool, int]] | None:
    """For each branch with these modules, whether it is added to the stream in front of a norm, and the axis of its
    channels; None if one is not added."""
    points = []
    for projection, module in zip(projections, modules, strict=True):
        others: dict[str, Edit] = {other: torch.zeros_like for other in modules if other != module}
        like = next(anatomy.modules[projection].parameters()).new_ones(widths(anatomy.modules[projection])[1])
        for axis in (-1, 1):
            found = [call.adds(scaling(module, axis), others, like, strict=True) for call in calls]
            if None not in found:
                points.append((any(found), axis))
                break
        else:
            return None
    return points


def _branch(
    anatomy: Anatomy, block: str, kind: Any, projection: str, module: str, axis: int, last: Mapping[str, int]
) -> Branch:
    hidden, dim = widths(anatomy.modules[projection])
    norms = [s.name for s in anatomy.sites if s.role == kind and is_below(s.name, block) and s.name in last]
    before = [norm for norm in norms if last[norm] < last[projection] and not is_below(norm, module)]
    norm = max(before, key=last.__getitem__, default=None)
    return Branch(kind, block, module, projection, dim, hidden, norm, axis)


def _stem(anatomy: Anatomy, blocks: list[str], last: Mapping[str, int], dims: set[int]) -> str | None:
    """The projection of patches: the one map to the width of the stream that runs before the blocks; None for several
    layers. A map to another width makes positions."""
    maps = sorted((n for n in anatomy.maps if n in last), key=last.__getitem__)
    inside = [part for block in blocks for part in ([block] if block else [*anatomy.attentions, *anatomy.mlps])]
    first = next((i for i, n in enumerate(maps) if any(is_below(n, part) for part in inside)), len(maps))
    modules = [(n, anatomy.modules[n]) for n in maps[:first]]
    convolutions = [n for n, m in modules if not isinstance(m, nn.Linear)]
    stem = convolutions or [n for n, m in modules if widths(m)[1] in dims]
    return stem[0] if len(stem) == 1 and widths(anatomy.modules[stem[0]])[1] in dims else None
