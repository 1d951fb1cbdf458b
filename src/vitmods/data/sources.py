"""A spec such as "digits", "path/to/folder" or "torchvision:CIFAR10?root=data" -> the Source it names."""

import os
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from vitmods.data.folder import folder
from vitmods.data.records import Records, Source
from vitmods.data.shards import folder_options, is_packed, shards
from vitmods.errors import UserError


def open_source(spec: str | Path) -> Source:
    """Find a data set. Raises UserError where the spec names nothing that can be opened."""
    spec = str(spec)
    if not spec.strip():
        raise UserError('No data given. Try "digits", or the path of a folder with one sub-folder per class.')
    if spec == "digits":
        return digits()
    kind, colon, rest = spec.partition(":")
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
    return _folder(spec)


EXAMPLES = {
    "torchvision": "torchvision:CIFAR10?root=data",
    "hf": "hf:uoft-cs/cifar10",
    "wds": "wds:path/to/shards",
}


def _folder(spec: str) -> Source:
    """A folder of class folders, or one that `vitmods data pack` wrote; options follow a question mark."""
    name, mark, query = spec.rpartition("?")
    if not mark or os.path.exists(Path(spec).expanduser()):  # a folder's own name may have a question mark
        name, query = spec, ""
    options = dict(parse_qsl(query, keep_blank_values=True))
    if is_packed(Path(name).expanduser()):
        return shards(spec, name, options)
    source = folder(name)
    source.spec, source.streaming = spec, folder_options(spec, options)
    return source


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 grey (Alpaydin and Kaynak, UCI 1998); no download."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    n = len(pixels)
    ids = tuple(f"{i:04d}" for i in range(n))
    records = Records(ids, bunch.target.astype(np.int64), ids, lambda key: pixels[key], np.arange(n))
    return Source("digits", "digits", tuple(str(name) for name in bunch.target_names), {"train": records})
