"""Where norms of the queries and keys of each head can be set in attention: hypotheses about its linear maps and its
number of heads, of which runs choose the one that is true."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import permutations
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitmods.adapters.anatomy import count_heads, is_below, maps_of, norm_sites, widths
from vitmods.adapters.inserts import Factors, HeadNorms
from vitmods.adapters.parts import Attend, Timeline
from vitmods.adapters.replay import same, tolerance_of
from vitmods.adapters.running import Inputs, difference, hooked, run, tensors_of
from vitmods.changes.insertions import Parts

PREFIX = "vm_"
"""of the names of inserted modules"""
MOST_HEADS = 64  # of those that are tried where nothing says the number


class Layout(NamedTuple):
    """A place of queries and keys. ``kind`` is ``slot`` (the attention calls ``q_norm`` and ``k_norm``), ``sdpa`` (they
    enter ``F.scaled_dot_product_attention``), ``separate``, or the axes of a joint map, ``thd`` and ``htd``. ``heads``
    are those of queries and keys, of ``dim`` channels; ``children`` the hooks, as `HeadNorms` takes them."""

    kind: str
    heads: tuple[int, int]
    dim: int
    children: Mapping[str, Sequence[str]]

    @property
    def query(self) -> str | None:
        """The map that makes queries, in attention; None where it is not called."""
        return next((child for child, (first, *_) in self.children.items() if first in _OF_QUERIES), None)


_OF_QUERIES = ("after_query", "after_joint")


class HeadPlace(NamedTuple):
    """Where norms of queries and keys are set: attributes ``q_norm`` and ``k_norm`` of ``owner``. ``axis`` is that of
    the heads in what they get."""

    owner: nn.Module
    reference: nn.Module
    heads: tuple[int, int]
    dim: int
    axis: int
    undo: Callable[[], None]
    layout: Layout

    def set_norms(self, make: Callable[[], nn.Module]) -> None:
        self.owner.q_norm, self.owner.k_norm = make(), make()

    def set_factors(self, queries: Tensor | float, keys: Tensor | float) -> None:
        """Factors instead of norms: one for each head of keys, and of the queries that read them, or one for all."""
        p, shape = next(self.reference.parameters()), (-1,) + (1,) * (-1 - self.axis)
        if isinstance(queries, Tensor):
            queries = queries.repeat_interleave(self.heads[0] // self.heads[1]).view(shape).to(p)
        keys = keys.view(shape).to(p) if isinstance(keys, Tensor) else keys
        self.owner.q_norm, self.owner.k_norm = Factors(queries), Factors(keys)

    def is_of(self, read: Tensor, strict: bool, by_head: bool, by_token: bool) -> bool:
        """Whether each channel of a head's queries and keys acts on the channels of this head alone in ``read``, and,
        if ``strict``, on them (``by_head``); and queries on their own token alone (``by_token``)."""
        (heads, of_keys), wide = self.heads, read.shape[-1] // self.heads[0]
        factors: list[Any] = [cast(Any, norm).factors for norm in (self.owner.q_norm, self.owner.k_norm)]
        draw = torch.randn(read.shape, generator=torch.Generator().manual_seed(0)).to(read)

        def effects(part: Tensor) -> list[Tensor]:
            """Absolute gradients of factors of queries and keys (..., heads, channels)."""
            found = torch.autograd.grad(part.sum(), factors, retain_graph=True, allow_unused=True)
            return [torch.zeros(1) if g is None else g.abs().movedim(self.axis, -2) for g in found]

        for head in range(heads) if by_head else ():
            own = slice(head * wide, (head + 1) * wide)
            group, one = effects((read * draw)[..., own]), effects((read * draw)[..., own.start]) if strict else ()
            for at, number in enumerate((head, head * of_keys // heads)):
                if (channels := group[at]).ndim < 3:
                    return False
                channels = channels.flatten(0, -3).sum(0)
                leaks = channels.sum(1).index_fill(0, torch.tensor(number, device=channels.device), 0).max()
                if leaks > 1e-6 * channels.max():
                    return False
                if strict:
                    channels = one[at].flatten(0, -3).sum(0)[number]
                    if not channels.min() > 1e-6 * channels.max():
                        return False
        for token in (-1, read.shape[-2] // 2) if by_token else ():
            tokens = effects((read * draw)[..., token, :])[0].sum((-1, -2))
            if tokens.shape != read.shape[:-1]:
                return False
            at_token = tokens.select(-1, token).max()
            tokens.select(-1, token).zero_()
            if tokens.max() > 1e-6 * at_token or (strict and not at_token):
                return False
        return True


class HeadSearch:
    """The search in one model. ``known`` are the layouts that are found, by attention; ``strict`` is for weights at
    which each part has an effect; ``number`` is that of the heads, if the user says it. Without inputs nothing is run:
    what is known is put in."""

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        known: dict[str, Any],
        inputs: Inputs | None,
        timeline: Timeline | None,
        strict: bool,
        number: int | None,
    ) -> None:
        self.model, self.parts, self.known, self.inputs, self.strict = model, parts, known, inputs, strict
        self.called: Mapping[str, int] = timeline.ends if timeline else {}
        self.attends: Sequence[Attend] = timeline.attends if timeline else ()
        self.number = number

    def find(self, names: list[str], reader: str = "", per: str = "head") -> list[HeadPlace] | None:
        """Where norms of queries and keys can be set in these attentions, which are alike; None if nowhere.

        Each channel of a head's queries and keys acts on the channels of this head alone, in what a map of the
        attention reads or it puts out; and the queries of each head times a number and its keys times the inverse
        leave what each attention puts out. With a ``reader``, it is the map, queries act on their own tokens alone
        (with ``per`` channel only that), and the inverse is not tried.
        """
        for layout in self._layouts(names[0]):
            places = [self._place(name, layout) for name in names]
            try:
                is_theirs = self.inputs is None or all(
                    self._are_heads(names, places, reader, per, training) for training in (False, True)
                )
            except Exception:  # shapes that do not fit this layout
                is_theirs = False
            for place in places:
                place.set_norms(nn.Identity)
            if is_theirs:
                self.known.update({name: layout._asdict() for name in names})
                return places
            for place in places:
                place.undo()
        return None

    def _layouts(self, name: str) -> Iterator[Layout]:
        """The layouts to try: the one that is known, or all that fit the widths of the maps."""
        known = self.known.get(name)
        if isinstance(known, Mapping):
            yield Layout(known["kind"], (known["heads"][0], known["heads"][1]), known["dim"], known["children"])
            return
        tried = (layout for heads in self._numbers(name) for layout in self._fitting(name, heads))
        if known is None:
            yield from tried
        else:  # in a record of an earlier version, the kind
            yield from [layout for layout in tried if layout.kind == known][:1]

    def _own(self, name: str) -> list[Attend]:
        return [attend for attend in self.attends if name in attend.around]

    def _numbers(self, name: str) -> list[int]:
        """Numbers of heads to try: what the user says; or what the module states and the shape of its weights of
        attention, and where that is not sure, all that divide the channels."""
        if self.number:
            return [self.number]
        shapes = {attend.shape for attend in self._own(name)}
        numbers = [count_heads(self.model.get_submodule(name)), *(s[i] for i in (1, 0) for s in shapes if len(s) > 3)]
        if all(len(shape) > 3 for shape in shapes) and any(numbers):
            return [n for n in dict.fromkeys(numbers) if n]
        width = max((widths(m)[1] for m in self._maps(name).values()), default=0)
        return [n for n in dict.fromkeys([*numbers, *range(1, MOST_HEADS + 1)]) if n and width % n == 0]

    def _maps(self, name: str) -> dict[str, nn.Module]:
        """The maps of an attention that may make queries and keys: those called before its weights are computed."""
        module, own = self.model.get_submodule(name), self._own(name)
        paths = {n: f"{name}.{n}".strip(".") for n in maps_of(module)}
        end = own[-1].time if own else float("inf")
        inside = [n for n, path in paths.items() if not self.called or self.called.get(path, end + 1) <= end]
        return {n: module.get_submodule(n) for n in sorted(inside, key=lambda n: self.called.get(paths[n], 0))}

    def _fitting(self, name: str, heads: int) -> Iterator[Layout]:
        module, maps = self.model.get_submodule(name), self._maps(name)
        dim = self._head_dim(name, heads)
        if dim and all(isinstance(getattr(module, slot, None), nn.Identity) for slot in ("q_norm", "k_norm")):
            yield Layout("slot", (heads, heads), dim, {})
        # Those called queries and keys first: to swap them would be right too, but not their names.
        for query, key in sorted(
            permutations(maps, 2), key=lambda p: ("q" not in p[0].lower(), "k" not in p[1].lower())
        ):
            width, other = widths(maps[query])[1], widths(maps[key])[1]
            for method, parts in (("after_key", 1), ("after_key_value", 2)) if width % heads == 0 else ():
                dim = width // heads
                count, rest = divmod(other, parts * dim)
                if not rest and heads % count == 0:
                    yield Layout("separate", (heads, count), dim, {query: ("after_query",), key: (method,)})
        for joint in (n for n, m in maps.items() if widths(m)[1] % (3 * heads) == 0):
            for kind in ("thd", "htd"):
                yield Layout(kind, (heads, heads), widths(maps[joint])[1] // (3 * heads), {joint: ("after_joint",)})
        # Where the projections are called, something may stand between them and the product, as norms or positions.
        shapes = {attend.shape[-1] for attend in self._own(name) if attend.is_fused}
        dim = shapes.pop() if len(shapes) == 1 else dim
        if dim and not (self.called and maps):
            yield Layout("sdpa", (heads, heads), dim, {"": ("before_attention", "after_attention")})

    def _head_dim(self, name: str, heads: int) -> int | None:
        """Channels of a head, from what attention modules call them or the width of a joint map."""
        module = self.model.get_submodule(name)
        for attribute in ("head_dim", "attention_head_size"):
            if isinstance(size := getattr(module, attribute, None), int) and not isinstance(
                module, nn.MultiheadAttention
            ):
                return size
        if isinstance(width := getattr(module, "embed_dim", None), int):
            return width // heads
        joint = (widths(module.get_submodule(n))[1] for n in maps_of(module))
        return next((width // (3 * heads) for width in joint if width % (3 * heads) == 0), None)

    def _place(self, name: str, layout: Layout) -> HeadPlace:
        module = self.model.get_submodule(name)
        if layout.kind == "slot":

            def empty() -> None:
                module.q_norm, module.k_norm = nn.Identity(), nn.Identity()

            return HeadPlace(module, module, layout.heads, layout.dim, -3, empty, layout)
        kind = "" if layout.kind == "separate" else layout.kind
        norms = HeadNorms((nn.Identity(), nn.Identity()), layout.heads, kind, layout.children)
        norms.serve(module, f"{PREFIX}heads")
        axis = -3 if kind == "sdpa" else -2
        return HeadPlace(norms, module, layout.heads, layout.dim, axis, partial(norms.withdraw, module), layout)

    @torch.enable_grad()
    def _are_heads(
        self, names: Sequence[str], places: Sequence[HeadPlace], reader: str, per: str, training: bool
    ) -> bool:
        assert self.inputs is not None
        generator, outputs = torch.Generator().manual_seed(0), []
        scales = [torch.rand(place.heads[1], generator=generator) + 0.5 for place in places]
        for queries, keys in () if reader else ((0, 0), (1, 1), (1, 0)):
            for place, scale in zip(places, scales, strict=True):
                place.set_factors(scale**queries, scale**-keys)
            outputs.append(
                [v for kept in _tensors_at(self.model, self.inputs, names, training)[0].values() for v in kept]
            )
        if outputs and not difference(outputs[0], outputs[1]) < tolerance_of(self.model):
            return False
        if self.strict and outputs and any(same(a, b, 1e-4) for a, b in zip(outputs[0], outputs[2], strict=True)):
            return False
        for place in places:
            place.set_factors(1.0, 1.0)
        readers = {name: ([reader], []) if reader else self._readers(name) for name in names}
        every = {n for inside, behind in readers.values() for n in (*inside, *behind)}
        outs, reads = _tensors_at(self.model, self.inputs, {*names, *every}, training, gradients=True)
        for name, place in zip(names, places, strict=True):
            inside, behind = ([read for near in kind for read in reads[near][:1]] for kind in readers[name])
            width = place.heads[0] * place.dim
            own = [out for out in outs[name][:1] if out.ndim == 3 and out.shape[-1] == width and not reader]
            if not self._separates(place, [*inside, *own, *behind], per, bool(reader)):
                return False
        return True

    def _separates(self, place: HeadPlace, reads: list[Tensor], per: str, by_token: bool) -> bool:
        """Whether what is read of the queries first is made head by head."""
        factors = cast(Any, place.owner.q_norm).factors
        for read in reads:
            if (
                read.requires_grad
                and torch.autograd.grad(read.sum(), factors, retain_graph=True, allow_unused=True)[0] is not None
            ):
                fits = read.ndim > 2 and not read.shape[-1] % place.heads[0]
                return fits and place.is_of(read, self.strict, per == "head", by_token)
        return False

    @cached_property
    def _norms(self) -> set[str]:
        return {site.name for site in norm_sites(self.model)}

    def _readers(self, attention: str) -> tuple[list[str], list[str]]:
        """The maps and norms that may read what the heads put out, as they are called: inside attention; and the next
        map beside it in a part of the block, or the last of its branch."""
        order, maps = self.called, {*maps_of(self.model)}
        inside = [n for n in order if is_below(n, attention) and (n in self._norms or n in maps)]
        branches = [b.projection for b in self.parts.branches if b.kind == "attn" and is_below(attention, b.block)]
        around = attention.rpartition(".")[0]
        beside = [n for n in order if around not in self.parts.blocks and is_below(n, around) and n in maps]
        behind = [name for name in (*branches, *beside) if order[name] > order[attention]]
        return sorted(inside, key=order.__getitem__), sorted(behind, key=order.__getitem__)[:1]


def _tensors_at(
    model: nn.Module, inputs: Inputs, names: Iterable[str], training: bool, gradients: bool = False
) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """The first tensor that each of these modules puts out, and the first that it reads, in each call; of convolutions
    as tokens (B, N, C)."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}
    reads: dict[str, list[Tensor]] = {name: [] for name in outputs}

    def keep(module: nn.Module, args: Any, keywords: Any, output: Any, name: str) -> None:
        outputs[name].append(next(tensors_of(output)))
        read = next(tensors_of([*args, *keywords.values()]))
        reads[name].append(read.flatten(2).mT if isinstance(module, nn.modules.conv._ConvNd) else read)

    modules = ((model.get_submodule(name), partial(keep, name=name)) for name in outputs)
    with hooked(module.register_forward_hook(hook, with_kwargs=True) for module, hook in modules):
        run(model, inputs, gradients, training)
    return outputs, reads
