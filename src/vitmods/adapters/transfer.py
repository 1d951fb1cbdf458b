"""A model of another library into vitmods and out again: refuse what cannot be exact, convert, compare the outputs."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters.tensors import Coverage, Row, group_blocks, read_tensors, write_tensors
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig, StemConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, explaining, first_line

Look = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""(model, images (B, channels, height, width)) -> (all tokens after the last block and its norm, the output)"""


def read_weights(
    source: str,
    config: ViTConfig,
    pair: Callable[[Iterable[str]], Sequence[Row]],
    tensors: Mapping[str, Tensor],
    left_out: Mapping[str, str] | None = None,
    assumed: Iterable[str] = (),
) -> tuple[ViT, Coverage]:
    """A ViT of a foreign model's tensors, in their type, and the account of all of them.

    ``pair`` makes the rows from the names of our tensors. Raises UserError when tensors are missing or left over, or
    their shapes do not fit the config.
    """
    shapes = shapes_of(source, config, at_most=len(tensors))  # before memory is taken for what a file may say
    weights, coverage = read_tensors(source, pair(shapes), tensors, left_out, assumed)
    misfits = [
        f"{name} is {tuple(value.shape)}, needed {tuple(shapes[name])}"
        for name, value in weights.items()
        if value.shape != shapes[name]
    ]
    if misfits:
        raise UserError(f"{source}: shapes do not fit a ViT with one width: {'; '.join(misfits[:5])}.")
    with torch.random.fork_rng(devices=[]):  # its initial weights are not used
        new = ViT(config)
    new.to(next(iter(weights.values())).dtype)
    new.load_state_dict(weights)
    return new, coverage


def import_model(
    source: str,
    model: nn.Module,
    config: ViTConfig,
    pair: Callable[[Iterable[str]], Sequence[Row]],
    look: Look,
    left_out: Mapping[str, str] | None = None,
    assumed: Iterable[str] = (),
) -> tuple[ViT, Coverage]:
    """A ViT with the model's weights, device, type, mode and frozen parameters, compared on random images.

    Raises UserError as ``read_weights``, and when the outputs differ.
    """
    check_readable(source, model)
    try:
        new, coverage = read_weights(source, config, pair, model.state_dict(), left_out, assumed)
        new.to(next(model.parameters()).device)
        _freeze(source, new, [(row.ours, row.theirs) for row in coverage.rows], model)
        new.train(model.training)
        check_same(source, (model, look), (new, look_at_vit))
    except UserError as error:
        raise UserError(f"{error} {OTHERWISE}") from None
    return new, coverage


def export_model(target: str, model: ViT, foreign: nn.Module, rows: Sequence[Row], look: Look) -> None:
    """Fill a fresh foreign model with a ViT's weights, device, type, mode and frozen parameters, and compare.

    Raises UserError when the weights cannot be read, or the outputs differ on random images.
    """
    check_readable("The model", model)
    reference = next(model.parameters())
    foreign.to(device=reference.device, dtype=reference.dtype)
    foreign.load_state_dict(foreign.state_dict() | write_tensors(rows, model.state_dict()))
    _freeze(target, foreign, [(name, (row.ours,)) for row in rows for name in row.theirs], model)
    foreign.train(model.training)
    check_same(target, (model, look_at_vit), (foreign, look))


MOST_MODULES = 5_000
"""of a model that a file describes; timm's deepest have some 2,000"""
UNLIMITED = 1 << 60
MOST_NEW_BYTES = 2 << 30
"""of a model whose config comes without weights"""
MOST_CLASSES = 1 << 17
"""of a head, each of which Hugging Face gives a name; ImageNet-21k has 21,843"""
MOST_NUMBER = 1 << 20
"""the largest width, length or count in such a description"""
MOST_SIDE = 4 * 1024
"""pixels of an image's side in a trial or folder that is opened"""
_COUNTS_OF_BLOCKS = ("depth", "depths", "layer", "layers")  # how the names of such settings end


def most_bytes(weights: int) -> int:
    """How large a model may be, as it is made, that goes with weights of so many bytes."""
    return 10 * weights + (128 << 20)


class _Limit(threading.local):
    source: str | None = None
    """whose model this thread builds; None: no limit"""
    modules, remaining = 0, 0
    """modules and bytes that it may still make"""


_LIMIT = _Limit()


@contextmanager
def bounded(source: str, most_bytes: int) -> Iterator[None]:
    """Bound a model made as a file says, which may be damaged or hostile: UserError as soon as this thread makes more
    than `MOST_MODULES` modules, or parameters and buffers of more bytes."""
    _watch_modules()
    _LIMIT.source, _LIMIT.modules, _LIMIT.remaining = source, MOST_MODULES, most_bytes
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _LIMIT.source = None


@contextmanager
def outline(source: str, most_bytes: int = UNLIMITED) -> Iterator[None]:
    """The same on the meta device, without memory for the tensors."""
    with bounded(source, most_bytes), torch.device("meta"):
        yield


@cache  # PyTorch's hooks are those of all threads, some of which may be making modules: they are added once and stay
def _watch_modules() -> None:
    def watch_module(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if _LIMIT.source is not None:
            _LIMIT.modules -= 1
            if _LIMIT.modules < 0:
                raise UserError(f"{_LIMIT.source}: its config has more than {MOST_MODULES:,} modules.")

    def watch_tensor(parent: nn.Module, name: str, tensor: Tensor | None) -> None:
        if _LIMIT.source is not None and tensor is not None:
            _LIMIT.remaining -= tensor.nbytes
            if _LIMIT.remaining < 0:
                raise UserError(f"{_LIMIT.source}: its config describes a much larger model than its weights allow.")

    hooks = nn.modules.module
    hooks.register_module_module_registration_hook(watch_module)
    hooks.register_module_parameter_registration_hook(watch_tensor)
    hooks.register_module_buffer_registration_hook(watch_tensor)


def check_numbers(source: str, values: Any, most: int = MOST_NUMBER) -> None:
    """Raise UserError for a number in a description of a model, at any depth, that is larger than models have.

    Counts of blocks may be up to `MOST_MODULES`, the bases of rotary positions (theta) of any size.
    """
    if isinstance(values, Mapping):
        for name, value in values.items():
            if not str(name).endswith("theta"):
                check_numbers(source, value, MOST_MODULES if str(name).endswith(_COUNTS_OF_BLOCKS) else most)
    elif isinstance(values, list | tuple):
        for value in values:
            check_numbers(source, value, most)
    elif isinstance(values, int | float) and not -most <= values <= most:
        raise UserError(f"{source}: its config has the number {str(values)[:20]}, above the limit of {most:,}.")


def shapes_of(source: str, config: ViTConfig, at_most: int) -> dict[str, torch.Size]:
    """Name and shape of every tensor of the config's model, without memory for them. Raises UserError when no model can
    be made of it, or one of more than ``at_most`` branches.
    """
    if config.depth * config.parallel > at_most:
        raise UserError(f"{source} does not fit its own config, which has more blocks than the file has tensors.")
    invalid = f"{source} cannot be read: its config contains invalid ViT settings"
    kinds = (TypeError, AttributeError, ValueError, RuntimeError)
    with explaining(lambda error: f"{invalid} ({first_line(error)}).", *kinds), outline(source):
        return {name: tensor.shape for name, tensor in ViT(config).state_dict().items()}


def check_readable(source: str, model: nn.Module) -> None:
    """Raises UserError for a model whose weights or outputs could not be compared: on the meta device, spread over
    devices, in half precision, or with parameters that two places share."""
    parameters = list(model.parameters())
    if any(p.is_meta for p in parameters):
        raise UserError(f"{source} is on the meta device and has no weights: load them first.")
    if len({p.device for p in parameters}) != 1:
        raise UserError(f"{source} is spread over several devices: move it to one, model.to('cpu').")
    types = {p.dtype for p in parameters}
    if types not in ({torch.float32}, {torch.float64}):
        names = ", ".join(sorted(str(t).removeprefix("torch.") for t in types))
        raise UserError(
            f"{source} is in {names}, in which outputs cannot be compared closely. Read it in float32 "
            "(model.float()) and convert the result."
        )
    if len(parameters) != sum(1 for _ in model.named_parameters(remove_duplicate=False)):
        raise UserError(f"{source} uses one parameter in two places, which vitmods ViTs cannot share. {OTHERWISE}")


OTHERWISE = (
    "It can be the base of a study (timm:NAME, hf:FOLDER or torchvision:NAME) and be changed in place: "
    "vm.apply(model, ..., in_place=True)"
)
"""Alternatives for a model that cannot be read."""


def refuse(source: str, problems: Sequence[str]) -> None:
    """Raises UserError naming every part without a counterpart here, if there is one."""
    if problems:
        raise UserError(f"{source} cannot be read exactly. Not covered: {'; '.join(problems)}. {OTHERWISE}")


def refuse_slots(target: str, config: ViTConfig, nearest: ViTConfig) -> None:
    """Raises UserError naming the slots in which a config differs from the nearest that the target can express. How
    weights start is not compared, nor the shape of drop path without any."""
    ignored = fields(config, "init head_bias") | ({} if config.drop_path else fields(config, "drop_path_shape"))
    different = list(_differences(config, nearest.with_(**ignored)))
    if different:
        raise UserError(f"{target} does not have: {'; '.join(different)}.")


def _differences(ours: Any, theirs: Any, prefix: str = "") -> Iterator[str]:
    def describe(value: Any) -> str:
        if not isinstance(value, NormConfig):
            return str(value)
        return f"{value.kind} norm, eps {value.eps:g}" + ("" if value.affine else ", not affine")

    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if a != b and isinstance(a, BranchConfig | StemConfig):
            yield from _differences(a, b, f"{prefix}{field.name}.")
        elif a != b:
            yield f"{prefix}{field.name}={describe(a)} (there: {describe(b)})"


def one_norm(config: ViTConfig) -> NormConfig:
    """The LayerNorm of a library with one setting for all norms: the eps of the config's first."""
    norm = config.attn.before or config.final_norm or NormConfig()
    return NormConfig("layer", norm.eps)


def whole_heads(config: ViTConfig) -> int:
    """The number of heads, or 1 where they do not divide the width, which libraries cannot build."""
    return 1 if config.embed_dim % config.num_heads else config.num_heads


def fields(config: ViTConfig, names: str) -> dict[str, Any]:
    """Some of a config's fields, to build the nearest config that another library can express."""
    return {name: getattr(config, name) for name in names.split()}


def look_at_vit(model: ViT, images: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens (B, N, C) and the logits of an image batch: what two models are compared by."""
    return model.forward_features(images), model(images)


@torch.no_grad()
def check_same(where: str, first: tuple[Any, Look], second: tuple[Any, Look]) -> None:
    """Raises UserError unless two models give the same tokens and outputs on a random image, up to rounding.

    Runs in evaluation mode, leaves the random state and every module's mode alone.
    """
    vit = next(model for model, _ in (first, second) if isinstance(model, ViT))
    p = next(vit.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, vit.vit_config.in_chans, *vit.vit_config.img_size, generator=generator).to(
        p.device, p.dtype
    )
    results = []
    for model, look in (first, second):
        with evaluating(model):
            results.append(look(model, images))
    tolerance = 1e-4 if p.dtype == torch.float32 else 1e-9
    for what, a, b in zip(("tokens", "outputs"), *results, strict=True):
        if not a.isfinite().all():
            raise UserError(f"{where}: the model's {what} are not finite on a random image; its weights are broken.")
        if a.shape != b.shape:
            raise UserError(f"{where}: the {what} have shapes {tuple(a.shape)} and {tuple(b.shape)}.")
        difference = float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))
        if not difference <= tolerance:
            raise UserError(
                f"{where}: {what} differ by {difference:.1e} of the largest: a part of this model is not covered."
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; each module returns to its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _freeze(where: str, new: nn.Module, pairs: Sequence[tuple[str, Sequence[str]]], old: nn.Module) -> None:
    """A new parameter is frozen when the old ones that it is made of are."""
    frozen = {name for name, p in old.named_parameters() if not p.requires_grad}
    partly = [name for name, made_of in pairs if 0 < len(frozen.intersection(made_of)) < len(made_of)]
    if partly:
        raise UserError(f"{where}: a part of {', '.join(group_blocks(partly))} is frozen: freeze all of it or none.")
    for name, made_of in pairs:
        new.get_parameter(name).requires_grad_(not frozen.issuperset(made_of))
