"""Folders of models that were changed in place: written with how they are made, opened without running them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlencode

import torch
from torch import nn

from vitmods.adapters.apply import as_vit
from vitmods.adapters.huggingface import open_changed_huggingface, to_huggingface
from vitmods.adapters.inputs import find_inputs
from vitmods.adapters.own import preparation
from vitmods.adapters.replay import TOLERANCE
from vitmods.adapters.running import difference, tensors_of
from vitmods.adapters.surgery import outputs_of, width_of
from vitmods.adapters.timm_folder import timm_words, write_timm_folder
from vitmods.adapters.transfer import OTHERWISE
from vitmods.changes import Change
from vitmods.fast.optimize import as_plain
from vitmods.model.names import split_options
from vitmods.model.vit import ViT
from vitmods.study.arms import FunctionSpec
from vitmods.study.bases import ForeignBase, load_into, rebuilt, record_of
from vitmods.study.store import read_object
from vitmods.util.errors import UserError
from vitmods.util.files import make_folder, write_atomically, write_json

DESCRIPTION, CONFIG, WEIGHTS = "vitmods.json", "config.json", "model.safetensors"
PREPROCESSOR = "preprocessor_config.json"
Library = Literal["timm", "hf"]
Origin = str | Callable[..., nn.Module] | None


def write_changed(model: nn.Module, folder: Path, base: Origin = None) -> str | None:
    """Write a model that was changed in place to a folder that exists, and open it again to compare.

    Hugging Face's models are written by their own `save_pretrained`, with the changes in config.json. Of others
    vitmods.json says how they are made. timm opens the folder too if its own arguments express the changes.

    Args:
        base: the model before the changes, as a study names it (`timm:NAME?depth=2`, `python:module:function`, or the
            function). None: timm's name of the model without options.

    Returns timm's name of the architecture if timm opens the folder. Raises UserError if `base` is missing or another
    model.
    """
    inputs = find_inputs(model, None, width_of(model))
    outputs = outputs_of(model, inputs) if inputs else []
    architecture, is_huggingface = None, hasattr(getattr(model, "config", None), "vitmods_changes")
    if is_huggingface:
        model.save_pretrained(folder)  # type: ignore[operator]
    else:
        foreign = _origin_of(model, base)
        changes: tuple[Change, ...] = model.vm_changes  # type: ignore[assignment]
        if foreign.spec.startswith("timm:"):
            architecture = _write_as_timm(model, folder, foreign, changes)
        from safetensors.torch import save

        weights = {name: tensor.cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
        write_atomically(folder / WEIGHTS, lambda file: file.write(save(weights, {"format": "pt"})))
        versions = {package: version(package) for package in ("vitmods", "torch", "timm")}
        write_json(folder / DESCRIPTION, {**(record_of(model, foreign, changes) or {}), "versions": versions})
    try:
        opened = open_changed(folder)
        assert opened is not None
        again = opened.to(next(model.parameters()).device)
        if inputs and not difference(outputs, outputs_of(again, inputs)) <= TOLERANCE:
            raise UserError(f"What is opened from {folder} computes something else.")
    except UserError as error:
        (folder / DESCRIPTION).unlink(missing_ok=True)
        remedy = (
            ""
            if is_huggingface
            else " Give base= with the options that it was made with: timm:NAME?depth=2&num_heads=3."
        )
        raise UserError(f"{error}{remedy}") from error
    return architecture


def _origin_of(model: nn.Module, base: Origin) -> ForeignBase:
    inputs = find_inputs(model, None, width_of(model))
    images = next(tensors_of(inputs)) if inputs else torch.empty(0)
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if (base is None and name is None) or images.ndim != 4:
        raise UserError(
            f"A {type(model).__name__} cannot be written without its origin: give base=, as timm:NAME, "
            "torchvision:NAME or a function that makes models of images."
        )
    spec = f"timm:{name}" if base is None else base if isinstance(base, str) else FunctionSpec.of(base)
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or images.shape[2:]
    classes = getattr(model, "num_classes", outputs_of(model, inputs)[0].shape[-1])  # type: ignore[arg-type]
    return ForeignBase(spec, classes, (size[0], size[1]), images.shape[1])


def write_library(model: nn.Module, folder: Path, library: Library, base: Origin = None) -> str:
    """Write a folder that timm or transformers opens without vitmods; what their classes do not know is folded into the
    weights. ``base``: see `write_changed`. Returns timm's architecture or transformers' class.

    Raises UserError, before a file is written, where the library's classes cannot express the model.
    """
    from vitmods.adapters.timm import timm_arguments

    if library not in ("timm", "hf"):
        raise UserError(f"library is timm or hf, not {library!r}: leave it out for a folder that vitmods opens.")
    try:
        if library == "hf":
            return _write_as_huggingface(model, folder)
        plain = as_plain(model)
        try:
            vit = cast(ViT, as_plain(as_vit(plain)))
            if timm_words(vit.vit_config) is None:
                timm_arguments(vit.vit_config)  # raises, naming what timm's ViT does not have
                raise UserError("timm makes it only with arguments that a file cannot hold: other eps, or classes.")
            return write_timm_folder(vit, folder)
        except UserError:
            theirs = None
            if type(model).__module__.startswith("timm."):
                theirs = _write_as_timm(plain, folder, _origin_of(model, base), getattr(plain, "vm_changes", ()))
            if theirs is None:
                raise
            return theirs
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            raise
        raise UserError(
            f"This model cannot be one of {library} alone: {str(error).removesuffix(f' {OTHERWISE}')} Write it as ONNX "
            "(--to onnx), as a program of torch.export (--to torch), or as a folder that vitmods opens (--to hub)."
        ) from error


def _write_as_huggingface(model: nn.Module, folder: Path) -> str:
    plain, theirs = as_plain(model), None
    if type(model).__module__.startswith("transformers."):
        config: Any = copy.deepcopy(plain.config)
        vars(config).pop("vitmods_changes", None)
        theirs = _same_of(plain, lambda: type(plain)(config))
    new: Any = to_huggingface(cast(ViT, as_plain(as_vit(plain)))) if theirs is None else theirs
    seen = preparation(model, new.config.num_labels)
    if names := seen.get("label_names"):
        new.config.id2label, new.config.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
    new.save_pretrained(make_folder(folder))
    rows, columns = next(tensors_of(find_inputs(new, None, width_of(new)) or ())).shape[2:]
    pixels: Any = {f"image_{name}": seen[name] for name in ("mean", "std") if name in seen}
    pixels |= {"image_processor_type": "ViTImageProcessor", "size": {"height": rows, "width": columns}}
    if "image_mean" in pixels:  # without them transformers would take 0.5
        write_json(folder / PREPROCESSOR, pixels)
    return type(new).__name__


def _same_of(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module | None:
    """A new model with the weights of another if it takes them and computes the same, in evaluation mode."""
    inputs = find_inputs(model, None, width_of(model))
    with suppress(UserError, RuntimeError), torch.random.fork_rng(devices=[]):  # unknown arguments, other weights
        new = make().to(next(model.parameters())).eval()
        new.load_state_dict(model.state_dict())
        if inputs and difference(outputs_of(model, inputs), outputs_of(new, inputs)) <= TOLERANCE:
            return new
    return None


def _write_as_timm(model: nn.Module, folder: Path, base: ForeignBase, changes: Sequence[Change]) -> str | None:
    """Write config.json in timm's layout if timm's arguments express the changes: timm makes a model with the same
    names of weights, which computes the same. Returns the architecture, or None."""
    from timm.models import save_for_hf

    from vitmods.changes.layer_scale import LayerScale
    from vitmods.changes.norm import Norm
    from vitmods.changes.qk_norm import QKNorm

    options: dict[str, Any] = {}
    for change in changes:
        if isinstance(change, LayerScale):  # folded where timm's blocks have no place for it
            options |= {"init_values": change.init} if any(".ls1." in name for name in model.state_dict()) else {}
        elif isinstance(change, QKNorm):
            options["qk_norm"] = True
        elif isinstance(change, Norm) and change.kind in ("rms", "layer"):
            options["norm_layer"] = f"{change.kind}norm"
        else:
            return None
    name, _, query = base.spec.removeprefix("timm:").partition("?")
    plain = ForeignBase(
        f"timm:{name}?{query}{'&' if query else ''}{urlencode(options)}", base.num_classes, base.img_size, base.in_chans
    )
    again: Any = _same_of(model, lambda: plain.build(pretrained=False))
    if again is None:
        return None
    seen = preparation(model, base.num_classes)
    again.pretrained_cfg.update({name: seen[name] for name in seen if name != "task"})
    arguments = {**split_options(base.spec)[1], **options, "img_size": list(base.img_size), "in_chans": base.in_chans}
    save_for_hf(again, str(make_folder(folder)), model_args=arguments, safe_serialization=True)
    return name


def open_changed(folder: Path) -> nn.Module | None:
    """Open a model that `write_changed` wrote, or Hugging Face's `save_pretrained` of a changed model, in evaluation
    mode; None for other folders. No code in the folder is run.

    Raises UserError if a file is damaged, or the weights are of another model.
    """
    weights = folder / WEIGHTS
    if "vitmods_changes" in (read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}):
        return open_changed_huggingface(folder).eval()
    if not (folder / DESCRIPTION).is_file():
        return None
    record = read_object(folder / DESCRIPTION)
    if not weights.is_file():
        raise UserError(f"{folder} describes a model without its weights: {WEIGHTS} is missing.")
    model = rebuilt(record, weights)
    load_into(model, weights)
    return model


def pixels_of(model: nn.Module, folder: Path) -> dict[str, Any]:
    """How a changed model's images are prepared, in timm's words, as far as its folder says.

    Raises UserError for a model that does not read images.
    """
    cfg = dict(getattr(model, "pretrained_cfg", None) or {})
    config = getattr(model, "config", None)
    if isinstance(side := getattr(config, "image_size", None), int | list | tuple):
        sides = [side, side] if isinstance(side, int) else list(side)
        cfg["input_size"] = (getattr(config, "num_channels", 3), *sides)
    elif (folder / DESCRIPTION).is_file():
        record = read_object(folder / DESCRIPTION)
        cfg["input_size"] = (record["in_chans"], *record["img_size"])
    if "input_size" not in cfg:
        raise UserError(f"{folder} holds a {type(model).__name__}, which does not read images.")
    return json.loads(json.dumps(cfg, default=str))
