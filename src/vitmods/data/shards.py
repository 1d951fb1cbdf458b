"""A folder of WebDataset shards (tar files) as a source: each image is read at its place in its tar file.

Shards written by `vitmods data pack` come with a manifest and an index and give the same source as the folder that was
packed: names, order, splits and fingerprint are the same. Every image's checksum is compared whenever it is read.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from vitmods.data.build import cores
from vitmods.data.foreign_shards import foreign_shards
from vitmods.data.records import Source, Streaming, printable
from vitmods.data.shard_index import ShardIndex
from vitmods.data.shard_records import records_of
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user

MANIFEST, MANIFEST_FORMAT = "manifest.json", "vitmods shards 1"
_OPTIONS = ("stream", "buffer", "allow")
_AGAIN = "Copy it anew, or write it again with vitmods data pack."


def is_packed(path: Path) -> bool:
    """Whether `vitmods data pack` wrote this folder to its end."""
    return (path / MANIFEST).is_file()


def shards(spec: str, name: str, options: dict[str, str]) -> Source:
    """The source in a folder of shards, or in the tar files of a pattern such as train-{0000..0009}.tar.

    options: stream and buffer. Raises UserError where there is no shard, or one is missing or no tar file.
    """
    streaming = folder_options(spec, options)
    path = expand_user(name)
    source = _packed(spec, path) if is_packed(path) else foreign_shards(spec, path)
    source.streaming = streaming
    return source


def streaming_options(
    spec: str, options: dict[str, str], word: str = "stream", buffer: int = Streaming.buffer
) -> Streaming:
    """`stream` (0 or 1; or another word) and `buffer` (images) behind the question mark. Raises UserError."""
    asked = {"": None, "0": False, "1": True}.get(options.get(word, ""), "?")
    places = options.get("buffer", str(buffer))
    if asked == "?" or not places.isdecimal() or int(places) < 1:
        raise UserError(f'"{printable(spec)}": {word} is 0 or 1, and buffer a number of images, at least 1.')
    return Streaming(asked, int(places))  # type: ignore[arg-type]


def folder_options(spec: str, options: dict[str, str]) -> Streaming:
    """The same, where no other options are known."""
    for name in options:
        if name not in _OPTIONS:
            raise UserError(f'"{printable(spec)}": there is no option "{name}". {nearest(name, _OPTIONS)}')
    return streaming_options(spec, options)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `vitmods data pack` wrote last. Raises UserError if it cannot be read."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{printable(str(path))} cannot be read ({error}). {_AGAIN}") from error
    if found != MANIFEST_FORMAT:
        raise UserError(f"{printable(str(path))} is of the format {found!r}; this version reads {MANIFEST_FORMAT!r}.")
    return manifest


def index_path(shard: Path) -> Path:
    """Where the index of a packed shard lies."""
    return shard.with_suffix(".json")


def file_sha256(path: Path) -> str:
    """Of the whole file, in hex."""
    content = sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            content.update(chunk)
    return content.hexdigest()


def _packed(spec: str, folder: Path) -> Source:
    manifest = read_manifest(folder)
    try:
        return _listed(spec, folder, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        where = printable(str(folder / MANIFEST))
        raise UserError(f"{where} does not list what was packed ({error!r}). {_AGAIN}") from error


def _listed(spec: str, folder: Path, manifest: dict[str, Any]) -> Source:
    splits = {}
    listed: dict[Path, dict[str, Any]] = {}
    for split, facts in manifest["splits"].items():
        files = {folder / shard["file"]: shard for shard in facts["shards"]}
        indexes = [_packed_index(path, shard) for path, shard in files.items()]
        listed |= files
        splits[split] = records_of(list(files), [index.rows for index in indexes])
    source = Source(manifest["name"], spec, tuple(manifest["classes"]), splits)
    left_out = manifest["unreadable"]
    if left_out:
        source.warnings.append(f"{len(left_out)} images that cannot be read were left out when it was packed.")
    source.verify = lambda: _verify(listed)
    return source


def _packed_index(path: Path, shard: dict[str, Any]) -> ShardIndex:
    """The index that belongs to a shard of the manifest, and with it a shard of the right length."""
    name = printable(str(path))
    try:
        content, length = index_path(path).read_bytes(), path.stat().st_size
    except OSError as error:
        raise UserError(f"{printable(str(error.filename))} cannot be read: {error.strerror}. {_AGAIN}") from error
    if length != shard["bytes"]:
        raise UserError(f"The shard {name} has {length:,} bytes, not {shard['bytes']:,}. {_AGAIN}")
    if sha256(content).hexdigest() != shard["index_sha256"]:
        raise UserError(f"{printable(str(index_path(path)))} is not what was packed: its checksum differs. {_AGAIN}")
    return ShardIndex.from_bytes(content)


def _verify(listed: dict[Path, dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(cores()) as pool:
        same = pool.map(lambda path: file_sha256(path) == listed[path]["sha256"], listed)
        damaged = [path for path, equal in zip(listed, same, strict=True) if not equal]
    return [
        f"The shard {printable(path.name)} is not what was packed: its checksum differs. {_AGAIN}" for path in damaged
    ]
