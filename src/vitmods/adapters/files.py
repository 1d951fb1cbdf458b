"""Files of other libraries, read without running anything that they hold, and written."""

import argparse
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitmods.adapters import big_vision, deit, huggingface, own
from vitmods.adapters.apply import read_model
from vitmods.adapters.tensors import Coverage
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError
from vitmods.util.files import check_weights, check_weights_kept, write_atomically
from vitmods.util.limits import check_zip, read_json, read_npz
from vitmods.util.text import printable

_TORCH = (".pth", ".pt", ".bin", ".ckpt")


def load(path: str | Path, **settings: Any) -> ViT:
    """A ViT from a file of our own or of another library, exactly, in evaluation mode.

    Args:
        path: a .safetensors that ``save`` wrote, or a trial's folder; a .npz of big_vision; a .pth of DeiT, or a
            .safetensors, with DeiT's or timm's names; a folder that Hugging Face's ``save_pretrained`` or timm's
            ``save_for_hf`` wrote, or the weights in it. What it is, the tensors' names and the config that goes with
            them say; mean and std of the pixels, what else lies in the folder.
        settings: what the tensors do not tell (not where a config goes with them): ``img_size`` in
            pixels, when it is not the square that the positions form; ``num_heads``, when it is not the published one
            for the width; ``eps`` of all norms, 1e-6; other fields of ViTConfig. ``coverage(path, ...)`` lists what
            was assumed.

    Raises:
        UserError: the file cannot be read safely, holds no ViT, or a part of it is not covered; the message names it.
    """
    return _read(Path(path), settings)[0].eval()


def coverage(source: nn.Module | str | Path, **settings: Any) -> Coverage:
    """What became of every tensor of a foreign model or file; print it for a table. ``settings`` as for ``load``.

    Raises UserError when something is missing, has no place here, or is not covered.
    """
    if isinstance(source, nn.Module):
        if settings:
            raise UserError(f"A model object says all of itself: leave {', '.join(settings)} out.")
        return read_model(source)[1]
    return _read(Path(source), settings)[1]


def save(model: ViT, path: str | Path) -> None:
    """Write a ViT to a file: .safetensors for our own, any ViT; .npz for big_vision, .pth for DeiT.

    Raises UserError for other endings, for errors of the disk (a file that was there is then as it was), and naming the
    slots for which that library has no counterpart.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz", ".pth"):
        raise UserError(
            f"{path.name}: the ending says what to write, .safetensors (our own), .npz (big_vision) or .pth (DeiT). "
            "For timm, torchvision and Hugging Face make their model: to_timm, to_torchvision, "
            "to_huggingface(model).save_pretrained(folder)."
        )
    if path.suffix == ".safetensors":
        own.write_own(model, path)
        return
    if path.suffix == ".pth":
        tensors = {"model": deit.to_deit(model)}
        write_atomically(path, lambda file: torch.save(tensors, file))
        return
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in big_vision.to_big_vision(model).items()}
    write_atomically(path, lambda file: np.savez(file, **arrays))


def _read(path: Path, settings: dict[str, Any]) -> tuple[ViT, Coverage]:
    weights = _weights_file(path)
    model, coverage = _read_weights(path, weights, settings)
    model.pretrained_cfg.update(_pixels_beside(weights))
    return model, coverage


def _read_weights(path: Path, weights: Path, settings: dict[str, Any]) -> tuple[ViT, Coverage]:
    tensors = _tensors(weights)
    if _is_timms(weights) and not own.is_own(weights):
        from vitmods.adapters.timm import read_saved

        _refuse_settings(path, settings)
        return read_saved(weights, tensors)
    record = own.own_description(weights)
    if record is not None:
        _refuse_settings(path, settings)
        return own.read_own(path.name, tensors, record)
    if big_vision.is_big_vision(tensors):
        return big_vision.read_big_vision(path.name, tensors, **settings)
    if huggingface.is_saved(tensors):
        _refuse_settings(path, settings)
        return huggingface.read_saved(path.name, tensors, _hugging_face_config(weights))
    if deit.is_deit(tensors):
        return deit.read_deit(path.name, tensors, **settings)
    if "conv_proj.weight" in tensors:
        raise UserError(f"{path.name} has torchvision's names: load it into torchvision's model and give that.")
    some = ", ".join(list(tensors)[:3])
    raise UserError(
        f"{path.name} holds no ViT with the names of big_vision, DeiT, timm or Hugging Face; its first are {some}."
    )


def _refuse_settings(path: Path, settings: dict[str, Any]) -> None:
    if settings:
        raise UserError(f"The config of {path.name} says all of it: leave {', '.join(settings)} out.")


def _weights_file(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"There is no {path}.")
    if path.is_file():
        return path
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return path / name
    check_weights_kept(path)
    if (path / "study.json").is_file():
        raise UserError(f"{path} is a study: name one of its trials, such as {path / 'trials' / 'base' / 'seed0'}.")
    raise UserError(
        f"{path} holds neither model.safetensors nor pytorch_model.bin. Weights in several files: load them with their "
        "library and give the model."
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    """The file's tensors by name; half precision becomes float32, which loses nothing."""
    readers = {".npz": _from_npz, ".safetensors": _from_safetensors, **dict.fromkeys(_TORCH, _from_torch)}
    if path.suffix not in readers:
        raise UserError(f"{path.name}: files that can be read end in {', '.join(readers)}.")
    try:
        found = readers[path.suffix](path)
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
        LookupError,
        EOFError,
        MemoryError,
        zipfile.BadZipFile,
    ) as error:
        raise UserError(f"{path.name} cannot be read; it may be damaged: {error}") from error
    odd = [name for name, value in found.items() if not isinstance(value, Tensor)]
    if odd or not found:
        raise UserError(f"{path.name} is no set of named tensors: {', '.join(map(str, odd[:5])) or 'it is empty'}.")
    for name, tensor in found.items():
        _check_tensor(name, tensor)
    return {name: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for name, t in found.items()}


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Raise UserError for a tensor that is no plain one, or says that it has more elements than the file: one number
    can be repeated a million times without a byte more, until somebody copies it."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UserError(
            f"The tensor {printable(str(name)[:80])} is no plain one with all of its elements: save it again."
        )


def _from_npz(path: Path) -> dict[str, Tensor]:
    return {name: _from_array(array) for name, array in read_npz(path, small=0).items()}


def _from_array(array: Any) -> Tensor:
    if array.dtype == np.dtype("V2"):  # bfloat16, which numpy does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_weights(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path.name} cannot be read; it may be damaged: {error}") from error


def _from_torch(path: Path) -> dict[str, Tensor]:
    """Weights alone, never other code; the arguments that DeiT's main.py saves along are plain values."""
    try:
        if zipfile.is_zipfile(path):
            check_zip(path, small=0)
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path.name} holds more than tensors, or is damaged, and is not opened: reading it could run its code. "
            "Write its state dict alone, torch.save(model.state_dict(), ...), where it is trusted."
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise UserError(f"{path.name} holds a {type(found).__name__}, expected a state dict, or one under 'model'.")
    wrapped = all(str(name).startswith("module.") for name in found)
    return {str(name).removeprefix("module.") if wrapped else name: value for name, value in found.items()}


def _hugging_face_config(weights: Path) -> dict[str, Any]:
    path = weights.with_name("config.json")
    try:
        values: dict[str, Any] = read_json(path)
    except (OSError, ValueError):
        raise UserError(
            f"{weights.name} needs a readable config.json beside it, as save_pretrained writes it."
        ) from None
    return values


def _is_timms(weights: Path) -> bool:
    """Whether the config.json beside weights is timm's, as ``timm.models.save_for_hf`` writes it."""
    path = weights.with_name("config.json")
    try:
        record = read_json(path) if path.is_file() else None
    except (OSError, ValueError):
        return False  # whoever needs the file says what is wrong with it
    return isinstance(record, dict) and isinstance(record.get("architecture"), str)


def _pixels_beside(weights: Path) -> dict[str, tuple[float, ...]]:
    """``mean`` and ``std`` of pixels in [0, 1] from Hugging Face's preprocessor_config.json; empty where there is none.

    Raises UserError when that file cannot be read, or scales pixels otherwise.
    """
    path = weights.with_name("preprocessor_config.json")
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = read_json(path)
        if not record.get("do_normalize", True):
            return {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        found = {
            name: tuple(map(float, record[f"image_{name}"])) for name in ("mean", "std") if f"image_{name}" in record
        }
        scale = float(record.get("rescale_factor", 1 / 255)) if record.get("do_rescale", True) else 1.0
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} cannot be read ({error}). Repair it, or remove it and give --mean and --std."
        ) from error
    if abs(scale * 255 - 1) > 1e-3:
        raise UserError(
            f"{path} scales pixels by {scale:g}, and here they lie in [0, 1]: write mean and std for that, with "
            "rescale_factor 1/255."
        )
    return found
