"""Models from files and names: reads files of other libraries without running code from them, and writes files."""

import argparse
import pickle
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitmods.adapters import big_vision, deit, huggingface, own
from vitmods.adapters.apply import apply, read_model
from vitmods.adapters.tensors import Coverage
from vitmods.changes import parse_changes
from vitmods.model.vit import ViT, vit
from vitmods.util.errors import UserError, explaining
from vitmods.util.files import check_weights, check_weights_kept, similar_folder, write_atomically
from vitmods.util.limits import check_zip, read_json, read_npz
from vitmods.util.text import printable

LIBRARIES = ("timm", "hf", "torchvision")
_ENDINGS = (".npz", ".safetensors", ".pth", ".pt", ".bin", ".ckpt")


def load(path: str | Path, **settings: Any) -> ViT:
    """Read a ViT from a file of our own or of another library, exactly, in evaluation mode.

    Args:
        path: a .safetensors that ``save`` wrote, or a trial's folder; a .npz of big_vision; a .pth of DeiT, or a
            .safetensors, with DeiT's or timm's names; a folder that Hugging Face's ``save_pretrained`` or timm's
            ``save_for_hf`` wrote, or the weights in it. The format follows from the tensors' names and the config
            next to them, mean and std of the pixels from the other files of the folder.
        settings: what the tensors leave open (not where a config goes with them): ``img_size`` in
            pixels, when it is not the square that the positions form; ``num_heads``, when it is not the published one
            for the width; ``eps`` of all norms, 1e-6; other fields of ViTConfig. ``coverage(path, ...)`` lists what
            was assumed.

    Raises:
        UserError: the file cannot be read safely, does not contain a ViT, or a part of it is not covered; the message
            names it.
    """
    return _read(Path(path), settings)[0].eval()


def coverage(source: nn.Module | str | Path, **settings: Any) -> Coverage:
    """List what became of every tensor of a foreign model or file; print it for a table. ``settings`` as for ``load``.

    Raises UserError when something is missing, left over, or not covered.
    """
    if isinstance(source, nn.Module):
        if settings:
            raise UserError(f"A model object needs no settings: leave {', '.join(settings)} out.")
        return read_model(source)[1]
    return _read(Path(source), settings)[1]


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
    if Path(source).suffix in (".safetensors", ".pth", ".npz") or source.startswith((".", "/", "~")):
        raise UserError(f"{source} does not exist.")
    model = vit(size, **fields, **({} if img_size is None else {"img_size": img_size}))
    return apply(model, *parse_changes(changes)) if changes else model


def open_checkpoint(source: str) -> ViT:
    """Open trained weights, in evaluation mode, to fine-tune, export or start a study from.

    Args:
        source: a trial's folder (`vitmods train`, or one of a study), a file or folder that `vitmods.adapters.load`
            reads, or the name of a timm model with published weights, with or without `timm:` before it.

    Raises:
        UserError: the checkpoint does not exist, cannot be read, or cannot be downloaded.
    """
    if Path(source).exists():
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
    paths += [path for path in hub.glob("*") if path.suffix in _ENDINGS and _is_vit_name(path.name)]
    return sorted(map(str, paths))


def _is_vit_name(name: str) -> bool:
    """Whether weights of this name are a plain ViT's, which may still have parts that are not covered."""
    return name.startswith(("vit_", "deit", "beit", "eva", "dino"))


def _read(path: Path, settings: dict[str, Any]) -> tuple[ViT, Coverage]:
    weights = _find_weights(path)
    model, account = _read_weights(path, weights, settings)
    model.pretrained_cfg.update(_pixels_beside(weights))
    return model, account


def _read_weights(path: Path, weights: Path, settings: dict[str, Any]) -> tuple[ViT, Coverage]:
    tensors, record = _read_tensors(weights), None
    with suppress(OSError, ValueError):  # the reader that needs the file says what is wrong with it
        record = read_json(weights.with_name("config.json"))
    is_timms = isinstance(record, dict) and isinstance(record.get("architecture"), str) and not own.is_own(weights)
    description = None if is_timms else own.own_description(weights)
    is_big_vision = big_vision.is_big_vision(tensors)
    is_huggingface = description is None and not is_big_vision and huggingface.is_saved(tensors)
    if settings and (is_timms or description is not None or is_huggingface):
        raise UserError(f"The config of {path.name} is complete: leave {', '.join(settings)} out.")
    if weights.with_name("vitmods.json").is_file() or (isinstance(record, dict) and "vitmods_changes" in record):
        raise UserError(f"{path.name} is a model that was changed in place: vm.from_pretrained opens it.")
    if is_timms:
        from vitmods.adapters.timm import read_saved

        return read_saved(weights, tensors)
    if description is not None:
        return own.read_own(path.name, tensors, description)
    if is_huggingface:
        if record is None:
            raise UserError(f"{weights.name} needs a readable config.json next to it, as save_pretrained writes it.")
        return huggingface.read_saved(path.name, tensors, record)
    if is_big_vision:
        return big_vision.read_big_vision(path.name, tensors, **settings)
    if deit.is_deit(tensors):
        return deit.read_deit(path.name, tensors, **settings)
    if "conv_proj.weight" in tensors:
        raise UserError(f"{path.name} has torchvision's names: load it into torchvision's model and give that.")
    raise UserError(
        f"{path.name} does not contain a ViT with the names of big_vision, DeiT, timm or Hugging Face; its first are "
        f"{', '.join(list(tensors)[:3])}."
    )


def _find_weights(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    if path.is_file():
        return path
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return path / name
    check_weights_kept(path)
    if (path / "study.json").is_file():
        raise UserError(f"{path} is a study: name one of its trials, such as {path / 'trials' / 'base' / 'seed0'}.")
    raise UserError(
        f"{path} contains neither model.safetensors nor pytorch_model.bin. Weights in several files: load them with "
        "their library and give the model."
    )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The file's tensors by name; half precision becomes float32, which loses nothing.

    Raises UserError for a file that is damaged or holds anything but plain tensors with all of their elements: a file
    can repeat one number a million times without a byte more, until a copy takes the memory.
    """
    if path.suffix not in _ENDINGS:
        raise UserError(f"{path.name}: files that can be read end in {', '.join(_ENDINGS)}.")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    errors = (OSError, ValueError, TypeError, RuntimeError, LookupError, EOFError, MemoryError, zipfile.BadZipFile)
    tensors: dict[str, Any]
    with explaining(lambda error: f"{path.name} cannot be read; it may be damaged: {error}", *errors, SafetensorError):
        if path.suffix == ".npz":
            arrays = read_npz(path, small=0)  # numpy does not know bfloat16
            tensors = {}
            for name, array in arrays.items():
                tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.dtype("V2") else array)
                tensors[name] = tensor.view(torch.bfloat16) if array.dtype == np.dtype("V2") else tensor
        elif path.suffix == ".safetensors":
            check_weights(path)
            tensors = load_file(path)
        else:
            tensors = _from_torch(path)
    others = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if others or not tensors:
        content = ", ".join(map(str, others[:5])) or "it is empty"
        raise UserError(f"{path.name} is not a set of named tensors: {content}.")
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            label = printable(str(name)[:80])
            raise UserError(f"The tensor {label} is not a plain one with all of its elements: save it again.")
    half_types = (torch.float16, torch.bfloat16)
    return {name: tensor.float() if tensor.dtype in half_types else tensor for name, tensor in tensors.items()}


def _from_torch(path: Path) -> dict[str, Tensor]:
    """Weights alone, never other code; the arguments that DeiT's main.py saves along are plain values."""
    try:
        if zipfile.is_zipfile(path):
            check_zip(path, small=0)
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path.name} contains more than tensors, or is damaged, and is not opened: reading it could run its code. "
            "Write its state dict alone, torch.save(model.state_dict(), ...), where it is trusted."
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        raise UserError(f"{path.name} is a {type(content).__name__}, expected a state dict, or one under 'model'.")
    wrapped = all(str(name).startswith("module.") for name in content)
    return {str(name).removeprefix("module.") if wrapped else name: value for name, value in content.items()}


def _pixels_beside(weights: Path) -> dict[str, tuple[float, ...]]:
    """``mean`` and ``std`` of pixels in [0, 1] from Hugging Face's preprocessor_config.json; empty without that file.

    Raises UserError when that file cannot be read, or scales pixels otherwise.
    """
    path = weights.with_name("preprocessor_config.json")
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = read_json(path)
        if not record.get("do_normalize", True):
            return {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        names = [name for name in ("mean", "std") if f"image_{name}" in record]
        pixels = {name: tuple(map(float, record[f"image_{name}"])) for name in names}
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
