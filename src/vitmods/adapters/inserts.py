"""Modules that changes put into models of other libraries, and the hooks that call them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vitmods.adapters.replay import Edit, along, on_first
from vitmods.layers.stems import Stem
from vitmods.model.init import draw_prompts
from vitmods.util.errors import UserError


class Insert(nn.Module):
    """A module registered in a foreign one, its holder, and called by hooks on ``children`` of that ("": on itself).

    The hooks are bound methods: copies and pickles call the copy's own. A library may wrap a child later, as LoRA does,
    whose product belongs to what the child puts out. So each call of the holder first moves the hooks to the modules
    that have the children's names then.
    """

    is_first = False
    """whether it acts before insertions that are there already"""

    def __init__(self, children: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.places = dict(children)
        """child -> methods of this class, ``before...`` for what it reads, ``after...`` for what it puts out"""
        self.hung: dict[str, list[Any]] = {}

    def serve(self, holder: nn.Module, name: str) -> None:
        """Register in the holder under a name, and hang the hooks."""
        reference = next((p for p in holder.parameters() if p.is_floating_point()), None)
        if reference is not None:
            self.to(device=reference.device, dtype=reference.dtype)
        self.train(holder.training)
        while hasattr(holder, name):  # of an earlier change
            name += "_2"
        self.name = name
        holder.add_module(name, self)
        self.hang(holder)
        if any(self.places):
            self.hung["hang"] = [holder, holder.register_forward_pre_hook(self.hang)]

    def withdraw(self, holder: nn.Module) -> None:
        """Leave the holder as it was."""
        for _, *handles in self.hung.values():
            for handle in handles:
                handle.remove()
        delattr(holder, self.name)

    def hang(self, holder: nn.Module, args: Any = ()) -> None:
        """Put the hooks on the children as they are now."""
        for child, methods in self.places.items():
            module = holder.get_submodule(child)
            if child in self.hung and self.hung[child][0] is module:
                continue
            if torch.compiler.is_compiling():  # hooks are put on outside the graph
                torch._dynamo.graph_break(msg="Run a model once before compiling it if its modules were wrapped.")
            for handle in self.hung.get(child, [None])[1:]:
                handle.remove()
            handles = [
                module.register_forward_pre_hook(getattr(self, method), prepend=self.is_first)
                if method.startswith("before")
                else module.register_forward_hook(
                    getattr(self, method), always_call=method == "after_attention", prepend=self.is_first
                )
                for method in methods
            ]
            self.hung[child] = [module, *handles]


class Scale(Insert):
    """A learned factor for each channel of a branch's output: LayerScale."""

    def __init__(self, dim: int, init: float, children: Mapping[str, Sequence[str]], axis: int = -1) -> None:
        super().__init__(children)
        self.weight, self.axis = nn.Parameter(torch.full((dim,), init)), axis

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return on_first(output, lambda x: x * along(self.weight, x, self.axis))


class InsertedNorm(Insert):
    """A norm on what a module reads or puts out. A branch is normalized before it is scaled, as in a vitmods ViT."""

    is_first = True

    def __init__(self, norm: nn.Module, children: Mapping[str, Sequence[str]], axis: int = -1) -> None:
        super().__init__(children)
        self.norm, self.axis = norm, axis

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.norm(args[0]), *args[1:])

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return on_first(output, lambda x: on_channels(self.norm, x, self.axis))


class PatchNorms(Insert):
    """Norms of the values of each patch, before its projection, and of the channels of its token, after it."""

    def __init__(self, before: nn.Module, after: nn.Module, children: Mapping[str, Sequence[str]]) -> None:
        super().__init__(children)
        self.norm_before, self.norm_after = before, after

    def before(self, projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Values of a patch in the order of the projection's weight: channels, then rows and columns (and frames)."""
        images = args[0]
        kernel = getattr(projection, "kernel_size", None)
        if kernel is None:  # a linear map of patches that are cut already
            return (self.norm_before(images), *args[1:])
        grid = [side // k for side, k in zip(images.shape[2:], kernel, strict=True)]
        cut = images[(..., *(slice(0, count * k) for count, k in zip(grid, kernel, strict=True)))]
        axes = len(kernel)
        patches = cut.unflatten(1, (1, -1))  # (B, 1, channels, ...): the axis of channels comes after the grid
        for axis, (count, k) in enumerate(zip(grid, kernel, strict=True)):
            patches = patches.unflatten(3 + 2 * axis, (count, k))
        rows = [3 + 2 * axis for axis in range(axes)]
        inside = [4 + 2 * axis for axis in range(axes)]
        order = (0, 1, *rows, 2, *inside)
        patches = patches.permute(order)
        values = self.norm_before(patches.flatten(2 + axes)).view(patches.shape)
        back = sorted(range(len(order)), key=order.__getitem__)
        return (values.permute(back).reshape(cut.shape), *args[1:])

    def after(self, projection: nn.Module, args: Any, output: Tensor) -> Tensor:
        last = output.ndim - 1  # counted from the front, as the older exporter to ONNX needs
        axis = last if getattr(projection, "kernel_size", None) is None else 1
        normalized: Tensor = self.norm_after(output.movedim(axis, last))
        return normalized.movedim(last, axis)


class InsertedPrompts(Insert):
    """Learned tokens (count, C) behind those that a block reads, taken off behind it."""

    def __init__(self, dim: int, children: Mapping[str, Sequence[str]]) -> None:
        super().__init__(children)
        self.tokens = nn.Parameter(torch.zeros(0, dim))

    def draw(self, count: int, values: int) -> None:
        """Draw that many for patches of so many values."""
        self.tokens = nn.Parameter(self.tokens.new_zeros(count, self.tokens.shape[1]))
        draw_prompts(self.tokens, values)

    def before(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        return (torch.cat([x, self.tokens.to(x.dtype).expand(x.shape[0], -1, -1)], dim=1), *args[1:])

    def after(self, block: nn.Module, args: Any, output: Any) -> Any:
        count = len(self.tokens)
        return on_first(output, lambda x: x[:, : x.shape[1] - count])


class Gates(Insert):
    """Gates of what the output projection of attention reads, which read what the queries do."""

    def __init__(self, children: Mapping[str, Sequence[str]]) -> None:
        super().__init__(children)
        self.gate: nn.Module | None = None
        self.tokens: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the tokens of a call that raised, which may have a graph and cannot be copied then."""
        return {**self.__dict__, "tokens": None}

    def before_query(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.tokens = args[0]

    def before_projection(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        heads, tokens, self.tokens = args[0], self.tokens, None
        if self.gate is None or tokens is None:
            return args
        if tokens.shape[:-1] != heads.shape[:-1]:
            raise UserError("The output projection of this attention does not read the tokens that its queries read.")
        gates = self.gate(tokens).sigmoid()
        return ((heads.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]).flatten(-2), *args[1:])


class StemOfImages(nn.Module):
    """A stem in place of a convolution: images (B, channels, height, width) -> (B, C, rows, columns)."""

    def __init__(self, stem: Stem) -> None:
        super().__init__()
        self.stem = stem
        stem.strict_img_size, stem.crop_border, stem.output_fmt = False, True, "NHWC"

    @property
    def weight(self) -> Any:
        """Models ask the projection for its type."""
        return self.stem.proj.weight

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.stem(images)
        return tokens.permute(0, 3, 1, 2)


def on_channels(function: Edit, x: Tensor, axis: int) -> Tensor:
    """The function of tokens (..., C) where the channels lie along an axis, the last or axis 1."""
    return function(x) if axis == -1 else function(x.movedim(axis, -1)).movedim(-1, axis)


def _mapped(linear: nn.Module, output: Any, function: Edit) -> Any:
    """The function on what a linear map puts out, or a convolution."""
    is_linear = not hasattr(getattr(linear, "base_layer", linear), "kernel_size")
    return on_first(output, lambda x: on_channels(function, x, -1 if is_linear else 1))


class HeadNorms(Insert):
    """Norms over the channels of each head's queries and keys, where the projections of attention put them out.

    ``layout`` names the axes of a joint projection's output: "thd" (three, heads, channels) or "htd" (heads, three,
    channels); "" for separate projections; "sdpa" where the attention reads the weights of its projections itself, and
    queries and keys are taken as they enter ``F.scaled_dot_product_attention``.
    """

    def __init__(self, norms: tuple[nn.Module, nn.Module], heads: tuple[int, int], layout: str, children: Any) -> None:
        super().__init__(children)
        self.q_norm, self.k_norm = norms
        self.heads, self.layout = heads, layout
        self.modes: list[_NormedHeads] = []

    def after_query(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _mapped(module, output, lambda x: self.q_norm(x.unflatten(-1, (self.heads[0], -1))).flatten(-2))

    def after_key(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _mapped(module, output, lambda x: self.k_norm(x.unflatten(-1, (self.heads[1], -1))).flatten(-2))

    def after_key_value(self, module: nn.Module, args: Any, output: Any) -> Any:
        def normalize(x: Tensor) -> Tensor:
            k, v = x.unflatten(-1, (2, self.heads[1], -1)).unbind(-3)
            return torch.stack((self.k_norm(k), v), -3).flatten(-3)

        return _mapped(module, output, normalize)

    def after_joint(self, module: nn.Module, args: Any, output: Any) -> Any:
        axis, shape = (-3, (3, self.heads[0], -1)) if self.layout == "thd" else (-2, (self.heads[0], 3, -1))

        def normalize(x: Tensor) -> Tensor:
            q, k, v = x.unflatten(-1, shape).unbind(axis)
            return torch.stack((self.q_norm(q), self.k_norm(k), v), axis).flatten(-3)

        return _mapped(module, output, normalize)

    def before_attention(self, module: nn.Module, args: Any) -> None:
        self.modes.append(_NormedHeads(self))
        self.modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def after_attention(self, module: nn.Module, args: Any, output: Any) -> None:
        mode = self.modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if output is not None and not mode.is_called:  # without an output the attention raised
            raise UserError(
                f"The norms of queries and keys act in F.scaled_dot_product_attention, which {type(module).__name__} "
                "did not call: leave its fused attention on."
            )


class _NormedHeads(TorchFunctionMode):
    """While it is on, scaled dot-product attention gets normalized queries and keys."""

    def __init__(self, norms: HeadNorms) -> None:
        super().__init__()
        self.norms, self.is_called = norms, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and len(args) >= 2:
            self.is_called = True
            args = (self.norms.q_norm(args[0]), self.norms.k_norm(args[1]), *args[2:])
        return function(*args, **kwargs)


class Factors(nn.Module):
    """Multiplies by factors; by ones that may have a gradient where there are none."""

    def __init__(self, factors: Any) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.factors, Tensor):
            self.factors = torch.full_like(x, self.factors, requires_grad=torch.is_grad_enabled())
        return x * self.factors
