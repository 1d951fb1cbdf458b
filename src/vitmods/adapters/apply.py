"""Apply changes to a model, a ViT of vitmods or of another library, and verify what they promise to preserve."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from importlib import import_module
from typing import Any, overload

import torch
from torch import nn

from vitmods.adapters.new_norms import mark_new_norms
from vitmods.adapters.running import check_not_wrapped
from vitmods.adapters.surgery import operate
from vitmods.adapters.tensors import Coverage
from vitmods.adapters.transfer import OTHERWISE, evaluating
from vitmods.changes import Change, Weights, parse_changes
from vitmods.changes.compose import check_conflicts, edit_one
from vitmods.model.branch_names import parallel_name, sequential_name
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError

_STRENGTH = ("nothing", "weights", "function")


Given = Change | str | Sequence[Change | str]
"""a change, its short form, or several of them"""


@overload
def apply(model: ViT, *changes: Given) -> ViT: ...
@overload
def apply(
    model: nn.Module,
    *changes: Given,
    in_place: bool | None = None,
    example: Any = None,
    parts: Mapping[str, Any] | None = None,
) -> Any: ...
def apply(
    model: nn.Module,
    *changes: Given,
    in_place: bool | None = None,
    example: Any = None,
    parts: Mapping[str, Any] | None = None,
) -> Any:
    """A new model with the changes, in order; the old one is untouched. A change may be given as text, "dpn+rms".

    A vitmods ViT, or one of timm, Hugging Face or torchvision that can be read exactly, gives a vitmods ViT. Weights
    are carried as each change says, new parameters start from PyTorch's global generator; device, type, mode and frozen
    parameters are the old model's. A vitmods ViT on the meta device gives another one there, and nothing is verified.

    Any other transformer keeps its class and the names of its weights: the changes are put into a copy of it, in place,
    and certified by what it computes (docs/in-place.md). ``in_place=True`` does so with models that could be read too,
    ``False`` never does. ``example`` is what such a model is called with, where no input can be made for it. ``parts``
    says what is not recognized in it: patterns (fnmatch) of the names of its modules for ``attention`` and ``mlp``, and
    the number of ``heads``; with these it is changed in place.

    A model in half precision, or with one parameter at two places, cannot be read and is changed in place too.

    Raises NoEffect for a change that alters nothing here, SlotConflict when two changes claim one slot, UserError for
    a model that can neither be read nor be changed in place, and AssertionError when a change breaks its promise (a bug
    in that change).
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"vm.apply changes a model, an nn.Module, not a {type(model).__name__}: build it first "
            "(timm.create_model, vm.vit), and load weights into it (vm.adapters.load)."
        )
    return _applied(model, _listed(changes), in_place, example, parts)


def _listed(changes: Sequence[Any]) -> tuple[Change, ...]:
    """Changes in the order in which they were given, in lists or as text."""
    listed: list[Change] = []
    for change in changes:
        if isinstance(change, str):
            listed += parse_changes(change)
        else:
            listed += _listed(change) if isinstance(change, list | tuple) else [change]
    return tuple(listed)


def _applied(
    model: nn.Module,
    changes: Sequence[Change],
    in_place: bool | None,
    example: Any,
    parts: Mapping[str, Any] | None,
) -> nn.Module:
    check_conflicts(changes)
    if parts and (in_place is False or isinstance(model, ViT)):
        raise UserError("parts=... are of a model that is changed in place, and this one is not: leave it out.")
    if (in_place or parts) and not isinstance(model, ViT):
        return operate(model, *changes, example=example, parts=parts)
    try:
        old = model if isinstance(model, ViT) else as_vit(model)
    except UserError as unread:
        if in_place is False or not changes:
            raise
        try:
            return operate(model, *changes, example=example)
        except UserError as refused:
            reason = str(unread).removesuffix(f" {OTHERWISE}")
            raise type(refused)(f"{refused} It was tried in place, since the model cannot be read: {reason}") from None
    check_conflicts(changes, old.changes)
    _check_shared(old)
    config, parallel = old.vit_config, old.vit_config.parallel
    weights = {sequential_name(name, parallel): value.clone() for name, value in old.state_dict().items()}
    for change in changes:
        config, weights = _apply_one(change, config, weights)
    new = _build(config, weights, old, "+".join(map(str, changes)))
    new.changes = (*old.changes, *changes)
    mark_new_norms(old, new, changes)
    if not next(new.parameters()).is_meta:
        verify(old, new, *changes)
    return new


def as_vit(model: nn.Module) -> ViT:
    """The model as a vitmods ViT: itself, or an exact import of one of timm, Hugging Face or torchvision.

    Raises UserError for other models, for parts without a counterpart (docs/foreign-models.md), and for models
    without weights, on the meta device.
    """
    if isinstance(model, ViT):
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UserError("The model is on the meta device and has no weights: load them first.")
        return model
    return read_model(model)[0]


def read_model(model: nn.Module) -> tuple[ViT, Coverage]:
    """The model as a vitmods ViT, exactly, with the account of its tensors.

    Raises UserError for classes and parts that are not covered.
    """
    model = _inside(model)
    return _reader(model).read(model)


def config_of(model: nn.Module) -> ViTConfig:
    """The config of a model that `as_vit` reads, which may be on the meta device. Raises UserError as that."""
    if isinstance(model, ViT):
        return model.vit_config
    model = _inside(model)
    return _reader(model).read_config(model)


def _inside(model: nn.Module) -> nn.Module:
    """The model of timm that a TimmWrapper of Hugging Face holds, or the model itself."""
    inside = getattr(model, "timm_model", None) if type(model).__name__.startswith("TimmWrapper") else None
    return inside if isinstance(inside, nn.Module) else model


def _reader(model: nn.Module) -> Any:
    """The module of this package that reads models of a library. Raises UserError for other classes."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    readers = {"timm": "timm", "transformers": "huggingface", "torchvision": "torchvision"}
    for library, reader in readers.items():
        if library in libraries:
            return import_module(f"vitmods.adapters.{reader}")
    check_not_wrapped(model)
    raise UserError(
        f"A {type(model).__name__} cannot be read: give a vitmods ViT (vm.vit), timm's or torchvision's "
        "VisionTransformer, or a ViT of Hugging Face (docs/foreign-models.md)."
    )


def _check_shared(model: ViT) -> None:
    places: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = places.setdefault(id(parameter), name)
        is_described = name.endswith("rel_pos.table") and model.vit_config.rel_pos == "shared"
        if other != name and not is_described:
            raise UserError(
                f"{other} and {name} are one parameter, and in the new model they would be two: give each place a copy "
                "(copy.deepcopy) first."
            )


def _apply_one(change: Change, config: ViTConfig, weights: Weights) -> tuple[ViTConfig, Weights]:
    edited = edit_one(config, change)
    versions = {name: value._version for name, value in weights.items()}
    carried = change.carry(dict(weights), config.unrolled, edited.unrolled)
    written = [name for name, value in weights.items() if value._version != versions[name]]
    assert not written, f"'{change}' writes into {written[0]} in place: `carry` must make new tensors"
    drops = change.drops(config.unrolled, edited.unrolled)
    _check_carried(change, weights, carried, drops)
    gone = {n for n in carried if carried[n] is weights.get(n) and any(fnmatch(n, pattern) for pattern in drops)}
    return edited, {name: value for name, value in carried.items() if name not in gone}


def _check_carried(change: Change, weights: Weights, carried: Weights, drops: Sequence[str]) -> None:
    """Nothing is lost that the change did not declare, and nothing is altered where it promises the weights."""
    kept = {id(value) for value in carried.values()}
    for name, value in weights.items():
        if id(value) in kept or any(fnmatch(name, pattern) for pattern in drops):
            continue
        assert change.preserves != "weights", f"'{change}' promises the weights and loses or alters {name}"
        assert name in carried, f"'{change}' loses {name} without saying so"


def _build(config: ViTConfig, weights: Weights, old: ViT, row: str) -> ViT:
    reference = next(old.parameters())
    new = ViT(config).to(device=reference.device, dtype=reference.dtype)
    weights = {parallel_name(name, config.parallel): value for name, value in weights.items()}
    initial = new.state_dict()
    for name, value in weights.items():
        if name not in initial:
            raise UserError(
                f"{row} leaves no place for {name} in the new model: give the weight its new name in the change's "
                "`carry`, or name it in `drops`."
            )
        if initial[name].shape != value.shape:
            raise UserError(
                f"{row} gives {name} another shape, {tuple(initial[name].shape)} instead of {tuple(value.shape)}: say "
                "in the change's `carry` how the old weight becomes the new one, or name it in `drops` to train it "
                "anew."
            )
    new.load_state_dict(weights, strict=False)
    frozen = {sequential_name(n, old.vit_config.parallel) for n, p in old.named_parameters() if not p.requires_grad}
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(sequential_name(name, config.parallel) not in frozen)
    new.grad_checkpointing = old.grad_checkpointing
    new.forms = old.forms
    fitting = {key: new.pretrained_cfg[key] for key in ("input_size", "num_classes", "first_conv")}
    new.pretrained_cfg = new.default_cfg = {**old.pretrained_cfg, **fitting}
    return new.train(old.training)


def preserved(changes: Sequence[Change]) -> str:
    """Return what several changes promise together: the weakest of their promises."""
    return min((change.preserves for change in changes), key=_STRENGTH.index, default="function")


@torch.no_grad()
def verify(old: nn.Module, new: nn.Module, *changes: Change, images: torch.Tensor | None = None) -> float:
    """The largest difference of outputs on two random images, or on those given, relative to the largest output.

    Raises AssertionError if the changes promise the function and the outputs differ by more than float32 rounding.
    Runs in evaluation mode and leaves the random state and the models' modes alone.
    """
    before, after = as_vit(old), as_vit(new)
    difference = _difference(before, after, images)
    tolerance = 1e-5 if next(after.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    promised = bool(changes) and preserved(changes) == "function"
    assert not promised or difference <= tolerance, f"outputs differ by {difference:.1e}, promised the same function"
    return difference


def _difference(old: ViT, new: ViT, images: torch.Tensor | None) -> float:
    if (old.vit_config.in_chans, old.vit_config.img_size) != (new.vit_config.in_chans, new.vit_config.img_size):
        return float("nan")
    p = next(new.parameters())
    if images is None:
        generator = torch.Generator().manual_seed(0)
        images = new.patch_embed.example(2, generator)
    images = images.to(p.device, p.dtype if images.is_floating_point() else None)
    outputs = []
    for model in (old, new):
        with evaluating(model):
            silent = _silent(model)
            outputs.append(model.forward_head(model.forward_features(images), True) if silent else model(images))
    a, b = (out.cpu().double() for out in outputs)  # some devices do not have float64
    if a.shape != b.shape:
        return float("nan")
    moved = a - b
    if _silent(old):
        moved = moved - moved.mean(0)  # the bias of a head can replace what is the same for all images
    return float(moved.abs().max() / a.abs().max().clamp_min(1e-12))


def _silent(model: ViT) -> bool:
    """A head that starts at zero hides every difference behind it."""
    head = model.head
    return isinstance(head, nn.Linear) and not bool(head.weight.any())
