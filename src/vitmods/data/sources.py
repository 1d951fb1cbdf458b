"""A spec such as "digits", "path/to/folder" or "torchvision:CIFAR10?root=data" -> the Source it names."""

import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from vitmods.data.folder import folder
from vitmods.data.multilabel import CSV, labels_csv
from vitmods.data.records import ALLOWED, Records, Source, printable
from vitmods.data.sets import KNOWN, open_known
from vitmods.data.shards import folder_options, is_packed, shards
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user


def open_source(spec: str | Path) -> Source:
    """Find a data set. Raises UserError where the spec names nothing that can be opened."""
    spec = str(spec)
    if not spec.strip():
        raise UserError('No data given. Try "digits", or the path of a folder with one sub-folder per class.')
    bare, allow = _allowance(spec)
    source = _open(bare)
    return replace(source, spec=spec, allow=source.allow | allow, classes=tuple(map(printable, source.classes)))


def _open(spec: str) -> Source:
    if spec == "digits":
        return digits()
    kind, colon, rest = spec.partition(":")
    if colon and kind in KNOWN:
        return open_known(spec, kind, rest)
    if colon and kind in EXAMPLES:
        name, _, query = rest.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        if not name:
            raise UserError(f'"{spec}" lacks a name after "{kind}:", as in {EXAMPLES[kind]}.')
        if kind == "torchvision":
            from vitmods.data.torchvision_sets import torchvision_set

            return torchvision_set(spec, name, options)
        if kind == "wds":
            return shards(spec, name, options)
        from vitmods.data.hf import hf_set

        return hf_set(spec, name, options)
    if colon and not os.path.exists(spec) and (hint := nearest(kind, [*KNOWN, *EXAMPLES])).startswith("Did you"):
        raise UserError(f'There is neither a folder "{printable(spec)}" nor a set called "{kind}". {hint}')
    path = Path(spec).expanduser()
    if path.suffix == ".csv" or os.path.isfile(path / CSV):
        return labels_csv(spec if path.suffix == ".csv" else str(Path(spec) / CSV))
    return _folder(spec)


EXAMPLES = {
    "torchvision": "torchvision:CIFAR10?root=data",
    "hf": "hf:uoft-cs/cifar10",
    "wds": "wds:path/to/shards",
}


def _folder(spec: str) -> Source:
    """A folder of class folders, or one that `vitmods data pack` wrote; options follow a question mark."""
    name, mark, query = spec.rpartition("?")
    if not mark or os.path.exists(expand_user(spec)):  # a folder's own name may have a question mark
        name, query = spec, ""
    options = dict(parse_qsl(query, keep_blank_values=True))
    if is_packed(expand_user(name)):
        return shards(spec, name, options)
    source = folder(name)
    source.spec, source.streaming = spec, folder_options(spec, options)
    return source


def _allowance(spec: str) -> tuple[str, frozenset[str]]:
    """The spec without its option "allow", and what that allows. A question mark in a folder's name is left alone."""
    head, mark, query = spec.rpartition("?")
    options = query.split("&") if mark else []
    given = [option for option in options if option.startswith("allow=")]
    if not given:
        return spec, frozenset()
    names = [name for option in given for name in option.removeprefix("allow=").split(",")]
    for name in names:
        if name not in ALLOWED:
            raise UserError(f'"{spec}": there is nothing called "{name}" to allow. {nearest(name, ALLOWED)}')
    rest = "&".join(option for option in options if option not in given)
    return f"{head}?{rest}" if rest else head, frozenset(names)


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 gray (Alpaydin and Kaynak, UCI 1998); no download."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    n = len(pixels)
    ids = tuple(f"{i:04d}" for i in range(n))
    records = Records(ids, bunch.target.astype(np.int64), ids, lambda key: pixels[key], np.arange(n))
    return Source("digits", "digits", tuple(str(name) for name in bunch.target_names), {"train": records})
