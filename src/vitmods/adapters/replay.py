"""The certificate of a branch: its block runs again, on the input that it got, with the branch scaled and left out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.running import Inputs, copy_model, fresh, hooked, run, steady, tensors_of
from vitmods.util.errors import UserError

Edit = Callable[[Tensor], Tensor]
TOLERANCE = 2e-5
"""of numbers that must be equal, relative to the largest"""


def on_first(output: Any, function: Edit) -> Any:
    """The output with its first tensor replaced; other modules return tuples."""
    return function(output) if isinstance(output, Tensor) else (function(output[0]), *output[1:])


def scaling(name: str, axis: int = -1) -> Callable[[Tensor], Mapping[str, Edit]]:
    """What multiplies the output of a module by factors of its channels, on the last axis or on axis 1."""
    return lambda factors: {name: lambda x: x * along(factors, x, axis)}


def along(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """Values of channels in a shape in which they lie along an axis of ``x``, the last or axis 1."""
    return values if axis == -1 else values.view(-1, *[1] * (x.ndim - 2))


def tolerance_of(model: nn.Module) -> float:
    is_exact = next((p.dtype for p in model.parameters()), None) in (torch.float32, torch.float64)
    return TOLERANCE if is_exact else 5e-2


@torch.no_grad()
def scrambled(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy with random weights, in which each part matters as after training, and its inputs; in float32 if it can.

    Zero biases, factors, heads and equal gains, which new models have, let wrong changes pass as right ones.
    """
    for noise in (1.0, 0.1):
        new, generator = copy_model(model), torch.Generator().manual_seed(0)
        if next(new.parameters()).dtype in (torch.float16, torch.bfloat16):
            new, inputs = new.float(), to_float(inputs)
        for p in new.parameters():
            if p.is_floating_point():
                scale = noise * (0.2 if p.ndim < 2 else 0.5 / max(1, p.numel() // max(1, len(p))) ** 0.5)
                p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=scale)
        if all(out.isfinite().all() for out in run(new, inputs)):
            return new, inputs
    raise UserError("The model cannot be tested: with random weights its outputs are not finite.")


def to_float(value: Any) -> Any:
    """The same with tensors of half precision in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Mapping):
        return {key: to_float(item) for key, item in value.items()}
    return tuple(map(to_float, value)) if isinstance(value, list | tuple) else value


def record(model: nn.Module, inputs: Inputs, norms: Mapping[str, Sequence[str]], training: bool) -> list["Replay"]:
    """The first and the last call of each of these blocks in a run of the model; with the norms in each."""
    calls: dict[str, list[Inputs]] = {name: [] for name in norms}

    def keep(module: nn.Module, args: Any, keywords: Any, name: str) -> None:
        calls[name].append((fresh(args), fresh(keywords)))

    blocks = ((model.get_submodule(name), partial(keep, name=name)) for name in norms)
    with hooked(block.register_forward_pre_hook(hook, with_kwargs=True) for block, hook in blocks):
        run(model, inputs, training=training)
    chosen = [(name, call) for name, kept in calls.items() for call in kept[:1] + kept[1:][-1:]]
    return [Replay(model, name, norms[name], call, training) for name, call in chosen]


class Replay:
    """A call of a block that can be repeated."""

    def __init__(self, model: nn.Module, block: str, norms: Sequence[str], call: Inputs, training: bool) -> None:
        self.model, self.block, self.norms, self.call, self.training = model, block, norms, call, training

    @torch.no_grad()
    def run(self, edits: Mapping[str, Edit]) -> tuple[list[Tensor], list[Tensor]]:
        """Points where a branch may be added to the stream, and what the stream may be there: what the block puts out
        and its norms read; what the block reads and its norms put out. ``edits`` change what modules put out."""
        arguments, keywords = fresh(self.call)
        points: list[Tensor] = []
        given = tensors_of([*arguments, *keywords.values()])
        streams = [t.clone() for t in given if t.is_floating_point() and t.any()]

        def edit(module: nn.Module, args: Any, output: Any, function: Edit) -> Any:
            return on_first(output, function)

        def tap(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            points.append(next(tensors_of([*args, *keywords.values()])).clone())
            out = next(tensors_of(output)).clone()
            streams.extend([out] if varies(out) else [])

        hooks = [
            self.model.get_submodule(name).register_forward_hook(partial(edit, function=function))
            for name, function in edits.items()
        ]
        hooks += [self.model.get_submodule(n).register_forward_hook(tap, with_kwargs=True) for n in self.norms]
        with hooked(hooks), steady(self.model, self.training):
            output = self.model.get_submodule(self.block)(*arguments, **keywords)
        return [next(tensors_of(output)), *points], streams

    @torch.no_grad()
    def takes_any_order(self) -> bool:
        """Whether the block reads tokens (B, N, C) first, and in another order puts out the same in that order, each
        image by itself: others may then join them anywhere."""
        (x, *others), keywords = self.call if self.call[0] else ((None,), {})
        if not isinstance(x, Tensor) or x.ndim != 3:
            return False

        def put_out(x: Tensor) -> Tensor:
            with steady(self.model, self.training):
                return next(tensors_of(self.model.get_submodule(self.block)(x, *fresh(others), **fresh(keywords))))

        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0)).to(x.device)
        usual, tolerance = put_out(x), tolerance_of(self.model)
        other = torch.cat([x[:1].flip(-1), x[1:]])  # another first image
        is_alike = usual.shape == x.shape and same(put_out(x[:, order]), usual[:, order], tolerance)
        return is_alike and same(put_out(other)[1:], usual[1:], tolerance)

    def adds(
        self,
        scale: Callable[[Tensor], Mapping[str, Edit]],
        others: Mapping[str, Edit],
        like: Tensor,
        strict: bool,
        in_branch: bool = False,
    ) -> int | None:
        """Return the point where the stream is ``s`` without a branch, ``s + F`` with it, and ``s + factors * F`` with
        random factors of channels where ``scale`` sets them; None if there is none. ``others`` leaves the other
        branches out. ``strict`` demands that F is not zero there; ``in_branch`` takes a norm that reads F alone too."""
        draw = torch.Generator().manual_seed(1)
        sizes, signs = torch.rand(len(like), generator=draw) * 3.4 - 0.7, torch.randn(len(like), generator=draw).sign()
        factors, tolerance = (signs * sizes.exp()).to(like), tolerance_of(self.model)
        try:
            none, streams = self.run({**others, **scale(torch.zeros_like(factors))})
            streams += [torch.zeros_like(none[0])] if in_branch else []
            if self.block and not any(same(a, s, tolerance) for a in none for s in streams):
                return None
            one, some = (self.run({**others, **scale(f)})[0] for f in (torch.ones_like(factors), factors))
        except Exception:  # a module whose output has another shape, or whose shape is needed elsewhere
            return None
        finally:
            scale(torch.ones_like(factors))
        if not self.block:  # the model reads images: its stream is what norms in front of the branch read
            streams += [a for a, b in zip(none[1:], one[1:], strict=False) if same(a, b, tolerance)]
        streams += [pooled for s in streams if s.ndim == 3 for pooled in (s[:, 0], s.mean(1))]
        for index, (a, b, c) in enumerate(zip(none, one, some, strict=False)):
            axes = [axis for axis in (-1, 1) if a.ndim > 1 and a.shape == b.shape and a.shape[axis] == len(factors)]
            moves = bool((b - a).abs().max() > 50 * tolerance * b.abs().max()) if axes else False
            for axis in axes if moves or not strict else ():
                shape = [-1 if i == axis % a.ndim else 1 for i in range(a.ndim)]
                if same(c, a + factors.view(shape) * (b - a), tolerance) and any(
                    same(a, s, tolerance) for s in streams
                ):
                    return index
        return None


def varies(stream: Tensor) -> bool:
    """Whether tokens differ: a constant is no stream."""
    tokens = stream.flatten(0, -2) if stream.ndim > 1 else stream
    return bool((tokens - tokens[:1]).abs().max() > 1e-3 * tokens.abs().max())


def same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * torch.maximum(a.abs().max(), b.abs().max()))
