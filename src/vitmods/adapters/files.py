"""Models from files and names: reads files of other libraries without running code from them, and writes files."""

import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitmods.adapters import big_vision, deit, huggingface, own
from vitmods.adapters.apply import apply, read_model
from vitmods.adapters.tensors import Coverage
from vitmods.adapters.weights import ENDINGS, Weights, find_files, find_model, read_tensors_of
from vitmods.changes import parse_changes
from vitmods.model.vit import ViT, vit
from vitmods.util.errors import UserError, explaining
from vitmods.util.files import similar_folder, write_atomically
from vitmods.util.limits import parse_json, read_json

ADAPTER_BESIDE = (
    "an adapter beside the weights (adapter_config.json) is not applied: merge it first (peft: merge_and_unload)"
)
LIBRARIES = ("timm", "hf", "torchvision")
_QUANTIZED = {torch.int8, torch.uint8, torch.int16, torch.int32}


def load(path: str | Path, **settings: Any) -> ViT:
    """Read a ViT from a file of our own or of another library, exactly, in evaluation mode.

    Args:
        path: a file of weights, with the names of timm, big_vision, torchvision or a published ViT (below whatever a
            training script puts before them); a folder that Hugging Face's ``save_pretrained`` or timm's
            ``save_for_hf`` wrote, or the weights in it, in one file or several; what ``save`` wrote; a trial's folder.
            The format follows from the tensors' names and the config next to them, mean and std of the pixels from
            the other files of the folder. ``FILE?key=KEY,num_heads=2`` has settings in it.
        settings: ``key``, which of several models in the file (``teacher.backbone``), also by a part of its place; and
            what the tensors leave open (not where a config goes with them): ``img_size`` in pixels, when it is not the
            square that the positions form; ``num_heads``, when it is not the published one for the width; ``eps`` of
            all norms; other fields of ViTConfig. ``coverage(path, ...)`` lists what was assumed, chosen and left out.

    Warns where weights and their average (EMA) are in the file, and the average was read.

    Raises:
        UserError: the file cannot be read safely, does not contain a ViT or several, a part of it is not covered, or
            weights are NaN; the message names it.
    """
    model, account = _read(path, settings)
    if account.choice:
        warnings.warn(f"{account.source}: {account.choice}.", stacklevel=2)
    return model.eval()


def coverage(source: nn.Module | str | Path, **settings: Any) -> Coverage:
    """List what became of every tensor of a foreign model or file; print it for a table. ``settings`` as for ``load``.

    Raises UserError when something is missing, left over, or not covered.
    """
    if isinstance(source, nn.Module):
        if settings:
            raise UserError(f"A model object needs no settings: leave {', '.join(settings)} out.")
        return read_model(source)[1]
    return _read(source, settings)[1]


def save(model: ViT, path: str | Path) -> None:
    """Write a ViT to a file: .safetensors for our own, any ViT; .npz for big_vision, .pth for DeiT.

    Raises UserError for other endings, for errors of the disk (an existing file stays as it was), and naming the slots
    that the other library does not have.
    """
    path = Path(path)
    if not isinstance(model, ViT):
        raise UserError(f"A {type(model).__name__} is not a vitmods ViT: vm.save_pretrained writes changed models.")
    if path.suffix == ".safetensors":
        own.write_own(model, path)
    elif path.suffix == ".pth":
        tensors = {"model": deit.to_deit(model)}
        write_atomically(path, lambda file: torch.save(tensors, file))
    elif path.suffix == ".npz":
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in big_vision.to_big_vision(model).items()}
        write_atomically(path, lambda file: np.savez(file, **arrays))
    else:
        raise UserError(
            f"{path.name}: the ending says what to write, .safetensors (our own), .npz (big_vision) or .pth (DeiT). "
            "For timm, torchvision and Hugging Face make their model: to_timm, to_torchvision, "
            "to_huggingface(model).save_pretrained(folder)."
        )


def open_model(source: str, img_size: int | tuple[int, int] | None = None, **fields: Any) -> nn.Module:
    """Open a model by a path or a name.

    Args:
        source: a file or folder that ``vitmods.adapters.load`` reads, a trial's too; a size name with or without
            changes ("S/16", "S18x2/16", "S/16+dpn+rms"); or a library's own module: "timm:NAME", "torchvision:NAME",
            "hf:FOLDER" (the folder's config.json). All but files have new weights.
        img_size: of the images, in pixels; None: the model's own.
        fields: further fields of ViTConfig, for size names.

    Raises UserError when the file or name does not exist, or the library is not installed.
    """
    library, mark, name = source.partition(":")
    if mark and library == "timm":
        import timm

        from vitmods.adapters.timm import check_timm

        check_timm(source, name, {})
        size_argument: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
        return timm.create_model(name, **size_argument)
    if mark and library == "torchvision":
        from torchvision.models import get_model

        from vitmods.adapters.torchvision import check_torchvision

        check_torchvision(name)
        side = img_size[0] if isinstance(img_size, tuple) else img_size  # its images are square
        return get_model(name, **({} if side is None else {"image_size": side}))
    if mark and library == "hf":
        config = huggingface.read_huggingface_config(source, Path(name))
        if img_size is not None:
            config.image_size = img_size
        return huggingface.build_classifier(source, Path(name), config)
    if Path(source).exists():
        model = load(source)
        if img_size is not None:
            model.set_input_size(img_size)
        return model
    size, _, changes = source.partition("+")
    if Path(source).suffix in ENDINGS or source.startswith((".", "/", "~")):
        raise UserError(f"{source} does not exist.")
    model = vit(size, **fields, **({} if img_size is None else {"img_size": img_size}))
    return apply(model, *parse_changes(changes)) if changes else model


def open_checkpoint(source: str) -> ViT:
    """Open trained weights, in evaluation mode, to fine-tune, export or start a study from.

    Args:
        source: a trial's folder (`vitmods train`, or one of a study), a file or folder that `vitmods.adapters.load`
            reads, with `?key=KEY` where it holds several models, or the name of a timm model with published weights,
            with or without `timm:` before it.

    Raises:
        UserError: the checkpoint does not exist, cannot be read, or cannot be downloaded.
    """
    if _split(source)[0].exists():
        return load(source)
    import timm

    from vitmods.adapters.timm import from_timm

    name = source.removeprefix("timm:")
    if not timm.is_model(name):
        raise UserError(
            f"There is no checkpoint '{source}': give a trial's folder, a file of weights, or a timm model's name as "
            f"vit_small_patch16_224.augreg_in1k. {similar_folder(Path(source))}".rstrip()
        )
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever the network, the hub or the file may raise
        raise UserError(
            f"timm gives no weights of {name}: {str(error).rstrip('.')}. Without a network, give a file of weights."
        ) from error
    return from_timm(model).eval()


def cached_checkpoints() -> list[str]:
    """List weights of ViTs in the caches of Hugging Face and torch hub, by name, as `open_checkpoint` takes them.
    No weights are read, and nothing is downloaded."""
    from huggingface_hub import constants

    paths = []
    for weights in Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*/model.safetensors"):
        with suppress(OSError, ValueError, AttributeError):  # not a model's folder
            config = read_json(weights.with_name("config.json"))
            if _is_vit_name(config.get("architecture") or "") or config.get("model_type") in huggingface.FAMILIES:
                paths.append(weights.parent)
    hub = Path(torch.hub.get_dir(), "checkpoints")
    paths += [path for path in hub.glob("*") if path.suffix in ENDINGS and _is_vit_name(path.name)]
    return sorted(map(str, paths))


def _is_vit_name(name: str) -> bool:
    """Whether weights of this name are a plain ViT's, which may still have parts that are not covered."""
    return name.startswith(("vit_", "deit", "beit", "eva", "dino"))


def _split(source: str | Path) -> tuple[Path, dict[str, Any]]:
    """The path and the settings of ``FILE?key=KEY,num_heads=2``."""
    path, _, options = str(source).partition("?")
    if not options or Path(source).exists():
        return Path(source), {}
    settings = dict[str, Any]()
    for option in options.split(","):
        name, _, value = option.partition("=")
        settings[name] = value
        with suppress(ValueError):
            settings[name] = value if name == "key" else parse_json(value)
    return Path(path), settings


def _read(source: str | Path, asked: dict[str, Any]) -> tuple[ViT, Coverage]:
    path, settings = _split(source)
    asked = settings | asked
    settings = {name: value for name, value in asked.items() if name != "key"}
    files, key = find_files(path), asked.get("key")
    tensors, record = read_tensors_of(files), None
    with suppress(OSError, ValueError):  # the reader that needs the file says what is wrong with it
        record = read_json(files[0].with_name("config.json"))
    is_timms = isinstance(record, dict) and isinstance(record.get("architecture"), str) and not own.is_own(files[0])
    description = None if is_timms else own.own_description(files[0])
    complete = [*settings] if is_timms else [*asked] if description is not None else []
    if complete:
        raise UserError(f"The config of {path.name} is complete: leave {', '.join(complete)} out.")
    if files[0].with_name("vitmods.json").is_file() or (isinstance(record, dict) and "vitmods_changes" in record):
        raise UserError(f"{path.name} is a model that was changed in place: vm.from_pretrained opens it.")
    weights = Weights(tensors) if description else find_model(path.name, tensors, key)
    whole = [n for n, t in weights.tensors.items() if t.dtype in _QUANTIZED and n.endswith(("weight", "bias"))]
    if whole and description is None:
        kind = str(weights.tensors[whole[0]].dtype).removeprefix("torch.")
        raise UserError(f"{path.name}: {whole[0]} is {kind}: quantized weights are not read. Save them as numbers.")
    kept = {torch.float64} if description else set()  # half precision loses nothing, and images are in float32
    singles = {
        name: tensor.float() if tensor.is_floating_point() and tensor.dtype not in kept else tensor
        for name, tensor in weights.tensors.items()
    }
    if is_timms:
        from vitmods.adapters.timm import read_saved

        model, account = read_saved(files[0], singles)
    elif description is not None:
        model, account = own.read_own(path.name, singles, description)
    else:
        model, account = _read_foreign(path.name, files[0].name, replace(weights, tensors=singles), record, settings)
    beside = ADAPTER_BESIDE if files[0].with_name("adapter_config.json").is_file() else ""
    said = "; ".join(filter(None, (weights.choice, beside)))
    account = replace(account, left_out=(*account.left_out, *weights.outside.items()), choice=said)
    names = {row.ours: " + ".join(row.theirs) for row in account.rows}
    if broken := [names[name] for name, value in model.state_dict().items() if not value.isfinite().all()]:
        raise UserError(
            f"{path.name} has NaN or infinite numbers in {len(broken)} of its {len(names)} tensors ({broken[0]}): its "
            "training diverged, or the file is damaged. Take an earlier checkpoint."
        )
    model.pretrained_cfg.update(_pixels_beside(files[0]))
    model.pretrained_cfg["account"] = account.summary
    return model, account


def _read_foreign(
    source: str, file: str, weights: Weights, record: Any, settings: dict[str, Any]
) -> tuple[ViT, Coverage]:
    if weights.kind == "huggingface":
        if settings:
            raise UserError(f"The config of {source} is complete: leave {', '.join(settings)} out.")
        if record is None:
            raise UserError(f"{file} needs a readable config.json next to it, as save_pretrained writes it.")
        return huggingface.read_saved(source, weights.tensors, record)
    kinds = (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError)
    with explaining(lambda error: f"{source} cannot be read, its tensors have unknown shapes: {error}", *kinds):
        if weights.kind == "big_vision":
            return big_vision.read_big_vision(source, weights.tensors, **settings)
        if weights.kind == "timm":
            return deit.read_deit(source, weights.tensors, beside=weights.outside, **settings)
    raise UserError(
        f"{source} does not contain a ViT with the names of timm, big_vision, torchvision, Hugging Face, CLIP or "
        f"another known release; its first are {', '.join(list(weights.tensors)[:3])}."
    )


def _pixels_beside(weights: Path) -> dict[str, tuple[float, ...]]:
    """``mean`` and ``std`` of pixels in [0, 1], and ``seen_size``, the (rows, columns) to which images are cropped or
    resized, from Hugging Face's preprocessor_config.json; empty without that file.

    Raises UserError when that file cannot be read, or scales pixels otherwise.
    """
    path = weights.with_name("preprocessor_config.json")
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = read_json(path)
        crops = record.get("do_center_crop", "crop_size" in record)
        size = record.get("crop_size" if crops else "size")
        sides: Any = (size, size) if isinstance(size, int) else [(size or {}).get(s) for s in ("height", "width")]
        pixels: dict[str, tuple[float, ...]] = (
            {} if None in sides else {"seen_size": tuple(int(side or 0) for side in sides)}
        )
        if not record.get("do_normalize", True):
            return pixels | {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        names = [name for name in ("mean", "std") if f"image_{name}" in record]
        pixels |= {name: tuple(map(float, record[f"image_{name}"])) for name in names}
        scale = float(record.get("rescale_factor", 1 / 255)) if record.get("do_rescale", True) else 1.0
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} cannot be read ({error}). Repair it, or remove it and give --mean and --std."
        ) from error
    if abs(scale * 255 - 1) > 1e-3:
        raise UserError(
            f"{path} scales pixels by {scale:g}, and here they are in [0, 1]: write mean and std for that, with "
            "rescale_factor 1/255."
        )
    return pixels
