"""The weights of a model in a file or folder: read as tensors alone, unwrapped, and told apart where there are several.

Training scripts nest state dicts, put words before names and keep other things beside the model. The rule here needs no
list of them: mappings are walked, and a model is wherever names of a known kind stand, below whatever comes before.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitmods.adapters.tensors import OUTSIDE
from vitmods.util.errors import UserError, explaining
from vitmods.util.files import check_weights, check_weights_kept, expand_user
from vitmods.util.limits import check_file, check_zip, read_json, read_npz
from vitmods.util.text import first_of, listing, printable

ENDINGS = (".npz", ".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
NAMES = tuple(f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json"))
"""of weights, or of the index of several files with weights, in a folder"""
ROOT = "."
"""the key of a model before whose names nothing comes"""
MOST_LEVELS = 50
_BLOCK = r"(?:blocks\.|transformer\.resblocks\.|encoder\.layers\.encoder_layer_)0\."
_KINDS = {
    "big_vision": (r"Transformer/encoder_norm/scale", ""),
    "huggingface": (r"embeddings\.patch_embeddings?(?:\.projection)?\.weight", ""),
    "timm": (r"(?:patch_embed\.proj(?:\.0|ection)?|conv1|conv_proj)\.weight", _BLOCK),
}
"""kind of names -> the name that says where such a model is, and how another of its names begins"""
_CLASSIFIER = re.compile(r"(head|classifier|fc)(\.\d+)?\.(weight|bias)")
_NORM = re.compile(r"(^|\.)(norm\d?|ln|ln_\w+|layer_?norm\w*)\.weight$")
_EMA = re.compile(r"(^|[._])ema([._]|$)", re.IGNORECASE)
_UNREAD = (  # classes of plain values that training scripts save along
    *("argparse.Namespace", "pathlib.PosixPath", "pathlib._local.PosixPath", "numpy.dtype"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
)


@dataclass(frozen=True)
class Weights:
    """A model's tensors by their names, without what comes before all of these.

    kind:    whose names they have, of ``_KINDS``; None if they are not known
    outside: tensors of the file that are not the model's, with the reason
    choice:  what was chosen from what, where nobody asked; empty otherwise
    """

    tensors: Mapping[str, Tensor]
    kind: str | None = None
    outside: Mapping[str, str] = field(default_factory=dict)
    choice: str = ""


def find_files(path: Path) -> list[Path]:
    """List the files of weights that a path stands for: a file, the one in a folder, or all that its index names.

    Raises UserError if there is none.
    """
    path = expand_user(path)
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    found = path if path.is_file() else next((path / name for name in NAMES if (path / name).is_file()), None)
    if found is not None:
        with explaining(lambda error: f"{found} cannot be read; it may be damaged: {error}"):
            return files_of_index(found) if found.name.endswith(".index.json") else [found]
    check_weights_kept(path)
    if (path / "study.json").is_file():
        raise UserError(f"{path} is a study: name one of its trials, such as {path / 'trials' / 'base' / 'seed0'}.")
    raise UserError(f"{path} contains neither {listing(NAMES[::2], 'nor')}, nor an index of them: name the file.")


def files_of_index(index: Path) -> list[Path]:
    """List the files of weights next to their index. Raises ValueError if one is elsewhere, OSError without it."""
    ending = index.name.removesuffix(".index.json").rpartition(".")[2]
    names = sorted(set(read_json(index)["weight_map"].values()))
    for name in names:
        if not re.fullmatch(rf"[\w-][\w.-]*\.{ending}", name):
            raise ValueError(f"its index names {printable(name)[:80]!r}, which is not a file of weights in it")
        check_file(index.with_name(name), "weights")
    return [index.with_name(name) for name in names]


def read_tensors_of(paths: Sequence[Path]) -> dict[str, Tensor]:
    """All tensors of files by name, of nested mappings by the keys on the way.

    Raises UserError for a file that is damaged or holds anything but plain tensors with all of their elements: a file
    can repeat one number a million times without a byte more, until a copy takes the memory.
    """
    tensors: dict[str, Tensor] = {}
    for path in paths:
        found = _flatten(path.name, _read(path))
        if twice := next((name for name in found if name in tensors), None):
            raise UserError(f"{path.name} holds {printable(twice[:80])} a second time: save the model again.")
        tensors |= found
    if not tensors:
        raise UserError(f"{paths[0].name} is not a set of named tensors.")
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            label = printable(name[:80])
            raise UserError(f"The tensor {label} is not a plain one with all of its elements: save it again.")
    return tensors


def find_model(source: str, tensors: Mapping[str, Tensor], key: str | None = None) -> Weights:
    """The model among a file's tensors, without what wrappers put into names: words that begin with ``_``, as
    ``_orig_mod`` of torch.compile. Of several models it is the one that ``key`` names, by its place or a part of that,
    and of weights and their average (EMA) the average, as in timm. Raises UserError naming the models there are.
    """
    short = [re.sub(r"(^|(?<=\.))_[^.]*\.", "", name) for name in tensors]
    if len({*short}) == len(short):
        tensors = dict(zip(short, tensors.values(), strict=True))
    places = _places(tensors)
    labels = {place: printable(place.rstrip("./")) or ROOT for place in places}
    chosen, choice = list(places), ""
    if key is not None:
        chosen = [place for place, label in labels.items() if key == label] or [
            place for place, label in labels.items() if f".{key}.".replace("/", ".") in f".{label}.".replace("/", ".")
        ]
    elif len(places) > 1:
        chosen = [place for i, place in enumerate(places) if not any(_same(tensors, place, p) for p in chosen[:i])]
        averages = [place for place in chosen if _EMA.search(labels[place])]
        if len(chosen) == 2 and len(averages) == 1:
            (other,) = {*chosen} - {*averages}
            chosen = averages
            choice = f"{labels[averages[0]]} was read, an average; key={labels[other]} is there too"
    if len(chosen) != 1 and (places or key is not None):
        there = f"holds the models {first_of(list(labels.values()), 20)}" if places else "has no names of a known ViT"
        asked = "" if key is None else f", and {printable(key)} names {len(chosen) or 'none'} of them"
        way = " Choose one: --key KEY, or key= in Python." if places else ""
        raise UserError(f"{source} {there}{asked}.{way}")
    prefix = chosen[0] if chosen else ""
    kind, start = places.get(prefix), prefix
    inside, outside = dict[str, Tensor](), dict[str, str]()
    if kind == "huggingface":  # its head, and in some files its blocks, are next to the body
        start = prefix[: prefix[:-1].rfind(".") + 1]
    body = re.compile(rf"{re.escape(start)}(\w+_)?classifier\.|{re.escape(start)}(encoder\.)?layers?\.\d+\.")
    for name, tensor in tensors.items():
        if name.startswith(prefix) or (kind == "huggingface" and body.match(name)):
            inside[name[len(start) :]] = tensor
        else:
            outside[name] = f"{OUTSIDE}{prefix.rstrip('.')}"
    if kind == "timm":
        _add_classifier(source, tensors, inside, outside, prefix[: prefix[:-1].rfind(".") + 1])
    return Weights(inside, kind, outside, choice)


def _add_classifier(
    source: str, tensors: Mapping[str, Tensor], inside: dict[str, Tensor], outside: dict[str, str], above: str
) -> None:
    """Give the model a linear classifier that is next to it, or a part of a sequence (after dropout), as its head.
    Warns of any other, which is left out: of several layers, of another width, or without a bias."""
    beside = {name.removeprefix(above): name for name in outside if name.startswith(above)}
    near = {name: tensors[full] for name, full in beside.items()} | inside
    names = [name for name in near if _CLASSIFIER.fullmatch(name)]
    if not names or "head.weight" in inside or any(name.startswith("heads.") for name in inside):
        return
    parts = {name.rpartition(".")[2]: name for name in names}
    widths = {len(tensor) for name, tensor in inside.items() if _NORM.search(name)}
    shapes = [near[parts[kind]].shape for kind in ("weight", "bias") if kind in parts]
    if len(names) != 2 or [len(shape) for shape in shapes] != [2, 1] or shapes[0][1] not in widths:
        text = "is not one linear layer with a bias on the width of the ViT, and is left out"
        warnings.warn(f"{source}: the classifier ({first_of(names, 3)}) {text}.", stacklevel=3)
        return
    for kind, name in parts.items():
        tensor = inside.pop(name) if name in inside else tensors[beside[name]]
        outside.pop(beside.get(name, ""), None)
        inside[f"head.{kind}"] = tensor


def _places(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What comes before the names of each model, and the kind of these."""
    places = {}
    for kind, (anchor, other) in _KINDS.items():
        for match in filter(None, map(re.compile(rf"((?:.*[./])?){anchor}").fullmatch, tensors)):
            if any(map(re.compile(re.escape(match[1]) + other).match, tensors)):
                places[match[1]] = kind
    return places


def _same(tensors: Mapping[str, Tensor], first: str, second: str) -> bool:
    """Whether two places hold the same numbers by the same names."""
    a, b = (
        {name[len(place) :]: tensor for name, tensor in tensors.items() if name.startswith(place)}
        for place in (first, second)
    )
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def _flatten(source: str, content: Any) -> dict[str, Tensor]:
    """The tensors in nested mappings and lists. One that is there several times, or within itself, is read once."""
    if not isinstance(content, Mapping):
        raise UserError(f"{source} is a {type(content).__name__}, expected a state dict, or one under a name.")
    tensors, seen, level = dict[str, Tensor](), {id(content)}, [("", content)]
    for _ in range(MOST_LEVELS):
        below = []
        for path, mapping in level:
            for key, value in mapping.items():
                if isinstance(value, Tensor):
                    tensors[f"{path}{key}"] = value
                elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
                    seen.add(id(value))
                    below.append((f"{path}{key}.", value if isinstance(value, Mapping) else dict(enumerate(value))))
        level = below
    if level:
        raise UserError(f"{source} is nested too deeply.")
    return tensors


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix not in ENDINGS:
        raise UserError(f"{path.name}: files that can be read end in {', '.join(ENDINGS)}.")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    errors = (OSError, ValueError, TypeError, RuntimeError, LookupError, EOFError, MemoryError, zipfile.BadZipFile)
    with explaining(lambda error: f"{path.name} cannot be read; it may be damaged: {error}", *errors, SafetensorError):
        if path.suffix == ".npz":
            tensors = {}
            for name, array in read_npz(path, small=0).items():  # numpy does not know bfloat16
                tensor = torch.from_numpy(array.view(np.int16) if array.dtype == np.dtype("V2") else array)
                tensors[name] = tensor.view(torch.bfloat16) if array.dtype == np.dtype("V2") else tensor
            return tensors
        if path.suffix == ".safetensors":
            check_weights(path)
            return load_file(path)
        return _from_torch(path)


class _Unread:
    """Stands for a value that is not read."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


def _from_torch(path: Path) -> Any:
    """Weights alone, never other code; plain values that are saved along are not made."""
    unread: list[Any] = [(_Unread, name) for name in _UNREAD]
    try:
        if zipfile.is_zipfile(path):
            check_zip(path, small=0)
        with torch.serialization.safe_globals(unread):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path.name} contains more than tensors, or is damaged, and is not opened: reading it could run its code. "
            "Write its state dict alone, torch.save(model.state_dict(), ...), where it is trusted."
        ) from error
