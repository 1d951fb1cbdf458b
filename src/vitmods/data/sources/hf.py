"""Hugging Face sets, from their hub or saved on the disk. Needs the extra: pip install "vitmods[hf]"."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from vitmods.data.augment import Ints
from vitmods.data.multilabel import with_rarest
from vitmods.data.read import Unreadable, decode, reading
from vitmods.data.records import Raw, Records, Source, Streaming, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user
from vitmods.util.limits import parse_json, read_bytes

BUFFER = 1000  # rows, as in datasets: unlike files of which any part can be read, they fill the memory
_LOOKED_AT = 4  # images of a stream that are read before training; all others are when they are needed
_BITS = (8, 16, 32, 64)
_LABELS_AT_A_TIME = 10_000
ROWS_A_SHARD = 1000  # of a saved set that is streamed
KEPT = Streaming(asked=False)
_SAVED = ("dataset_dict.json", "dataset_info.json")  # what save_to_disk leaves


@data_source(
    "hf",
    "hf:NAME",
    "a Hugging Face data set, from the hub, written by `save_to_disk`, or a folder of parquet files",
    options=("config", "revision", "image", "label", "streaming", "buffer"),
    needs='pip install "vitmods[hf]"',
)
def hf(spec: Spec) -> Source:
    """The set NAME of the hub, or the folder that save_to_disk wrote.

    Options: config and revision as load_dataset takes them; image and label name the columns where there is a choice;
    streaming=1 reads rows as they are needed, with a shuffle buffer of `buffer` rows.
    Raises UserError without the extra, and where no image or label column can be found.
    """
    if "buffer" in spec.options and spec.options.get("streaming") != "1":
        raise UserError(f'"{spec}": buffer is only for streaming=1.')
    return hf_set(spec.rest, spec.options, spec.streaming("streaming", BUFFER))


def hf_set(name: str, options: Mapping[str, str], streaming: Streaming = KEPT) -> Source:
    """A set of the hub or of the disk. options: config, revision, image, label.

    Labels are read once, so that classes, lengths and splits are known. Rows of a streamed set are read as they are
    needed. Rows of one file (a shard) can only be read from its beginning; those read last wait in memory.
    """
    short = printable(name.rstrip("/").split("/")[-1])
    loaded, tables, unused = _load(name, options, bool(streaming.asked)), dict[str, Any](), []
    for split_name, table in loaded.items():
        if (split := split_named(split_name)) is None or split in tables:
            unused.append(split_name)
        else:
            tables[split] = table
    if "train" not in tables:
        raise UserError(f"The Hugging Face set does not have a train split, only {', '.join(loaded)}.")
    warnings = [f"These splits were not used: {', '.join(unused)}."] if unused else []
    image, label = _columns(next(iter(tables.values())), options, short)
    labels: dict[str, list[Any]] = {}
    sizes: dict[str, list[int]] = {}
    for split, table in tables.items():
        parts = _labels_of_shards(table, label) if streaming.asked else [list(table[label])]
        values = [value for part in parts for value in part]
        if all(value in (None, -1) for value in values):
            warnings.append(f"The labels of {split} are not public; it was not used.")
        else:
            labels[split], sizes[split] = values, [len(part) for part in parts]
    if "train" not in labels:
        raise UserError(f'"{short}" lacks labels in train.')
    feature = tables["train"].features[label]
    if any(tables[split].features[label] != feature for split in labels):
        raise UserError(
            f'The splits of "{short}" name different classes: give all of them one ClassLabel in "{label}".'
        )
    one = getattr(feature, "feature", feature)  # of a list
    if not hasattr(one, "dtype") or one.dtype not in (
        "string",
        "large_string",
        "bool",
        *(f"{u}int{n}" for u in ("", "u") for n in _BITS),
    ):
        cast = "" if one is feature else ", in lists"
        raise UserError(
            f'The column "{label}" of "{short}" has the type {one}{cast}, which is not a class: cast it with '
            f'cast_column("{label}", datasets.ClassLabel(names=...)), or name another with ?label=.'
        )
    names = list(getattr(one, "names", None) or [])
    number: dict[Any, int] = {i: i for i in range(len(names))}
    if not names:  # numbers or words
        each = (
            v for part in labels.values() for value in part for v in (value if isinstance(value, list) else [value])
        )
        distinct = sorted({value for value in each if value is not None}, key=str)
        names, number = list(map(str, distinct)), {value: i for i, value in enumerate(distinct)}
    splits = {}
    for split, part in labels.items():
        several = part if one is not feature else None
        numbers = np.array([0 if several else number.get(value, -1) for value in part], dtype=np.int64)
        buffer = streaming.buffer if streaming.asked else None  # a label of -1 is refused afterwards
        splits[split] = _records(split, short, tables[split], image, numbers, sizes[split], buffer)
        if several is not None:
            sets = tuple(tuple(sorted({number[value] for value in values or ()})) for values in several)
            splits[split] = replace(splits[split], label_sets=sets)
    if streaming.asked:
        first = splits["train"].some(_LOOKED_AT)
        for i, key in enumerate(first.keys.tolist()):
            try:
                decode(first.fetch(key), 3)
            except Unreadable as error:
                raise UserError(f'{first.ids[i]} of "{short}" cannot be read: {error}.') from error
        warnings.append("Streamed: the fingerprint is of names and labels, and images are checked when they are read.")
    target = "class" if one is feature else "labels"
    source = Source(short, tuple(names), splits, warnings, streaming=streaming, target=target)
    return source if target == "class" else with_rarest(source)


def _load(name: str, options: Mapping[str, str], streaming: bool) -> dict[str, Any]:
    """Tables by their names for splits. A set without splits is all train."""
    try:
        import datasets
    except ImportError:
        raise UserError('Hugging Face sets need the extra packages: pip install "vitmods[hf]"') from None
    if any((expand_user(name) / saved).is_file() for saved in _SAVED):
        saved: Any = datasets.load_from_disk(str(expand_user(name)))
        saved = saved if isinstance(saved, dict) else {"train": saved}
        if not streaming:
            return dict(saved)
        shards = {split: -(-max(len(table), 1) // ROWS_A_SHARD) for split, table in saved.items()}
        return {split: table.to_iterable_dataset(num_shards=shards[split]) for split, table in saved.items()}
    if (folder := expand_user(name)).is_dir():
        _check_parquet(folder)
    try:
        revision: Any = options.get("revision")
        loaded: Any = datasets.load_dataset(name, options.get("config"), revision=revision, streaming=streaming)
    except Exception as error:  # hub, network, scripts and formats raise many kinds; all mean that it cannot be had
        raise UserError(f'The Hugging Face set "{name}" cannot be loaded: {type(error).__name__}: {error}') from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _check_parquet(folder: Path) -> None:
    """Raises UserError where files number the classes differently: datasets reads all by the names of the first."""
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    first: dict[str, tuple[list[str], Path]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        try:
            info = parse_json((parquet.read_schema(path).metadata or {})[b"huggingface"])["info"]["features"]
            columns = {name: feature["names"] for name, feature in info.items() if "names" in feature}
        except (ArrowException, OSError, ValueError, LookupError, TypeError):
            continue  # written without datasets, or for it to refuse
        for name, classes in columns.items():
            names, other = first.setdefault(name, (classes, path))
            if names != classes:
                raise UserError(
                    f"{printable(path.name)} and {printable(other.name)} number the classes of {printable(name)} "
                    "differently: write both with one ClassLabel."
                )


def _columns(table: Any, options: Mapping[str, str], name: str) -> tuple[str, str]:
    from datasets import ClassLabel, Image

    features, chosen = table.features, []
    for role, kind in (("image", Image), ("label", ClassLabel)):
        typed = [column for column, feature in features.items() if isinstance(feature, kind)]
        if role == "image":
            typed = typed or [column for column in features if _is_stored(features[column])]
        column = options.get(role) or (typed[0] if len(typed) == 1 else role)
        if column not in features:
            raise UserError(
                f'Which column of "{name}" is the {role}? Add "?{role}=NAME" (or "&"); it has {", ".join(features)}.'
            )
        if role == "image" and column not in typed and not _is_stored(features[column]):
            raise UserError(
                f'The column "{column}" of "{name}" has the type {features[column]}, which is not an image: cast it '
                f'with cast_column("{column}", datasets.Image()), or name another ({", ".join(features)}) by ?image=.'
            )
        chosen.append(column)
    return chosen[0], chosen[1]


def _is_stored(feature: Any) -> bool:
    """Whether a column of another type than Image holds images: bytes, a struct with bytes, or an array of 8 bits."""
    if isinstance(feature, dict):
        return "bytes" in feature
    return getattr(feature, "dtype", "") in ("binary", "large_binary") or (
        getattr(feature, "dtype", "") == "uint8" and len(getattr(feature, "shape", ())) == 3
    )


def _stored_image(img: Any) -> Raw:
    """The bytes of an image that datasets has not decoded, or its pixels (H, W, C)."""
    if isinstance(img, dict):
        return img["bytes"] if img["bytes"] is not None else read_bytes(Path(img["path"]), "image")
    if isinstance(img, bytes):
        return img
    if img is None:
        raise Unreadable("the row has no image")
    pixels = np.asarray(img, dtype=np.uint8)
    pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3) else pixels
    return pixels[..., 0] if pixels.shape[2] == 1 else pixels


def _labels_of_shards(table: Any, label: str) -> list[list[Any]]:
    """The labels of each file that a streamed table is made of."""
    labels, count = table.select_columns([label]), table.num_shards
    shards = [labels.shard(num_shards=count, index=shard).with_format("arrow") for shard in range(count)]
    return [
        [value for rows in shard.iter(batch_size=_LABELS_AT_A_TIME) for value in rows[label].to_pylist()]
        for shard in shards
    ]


def _records(
    split: str, name: str, table: Any, image: str, labels: Ints, sizes: list[int], buffer: int | None
) -> Records:
    """The rows of a table; a streamed one has `sizes` rows in each shard, and a shuffle buffer."""
    from datasets import Image

    images = table.select_columns([image])
    if isinstance(table.features[image], Image):
        images = images.cast_column(image, Image(decode=False))
    ids = tuple(f"{split}[{row}]" for row in range(len(labels)))

    def fetch(key: int) -> Raw:
        with reading():
            return _stored_image(images[key][image])

    def read_shard(shard: int) -> Iterator[Raw]:
        return (_stored_image(row[image]) for row in images.shard(num_shards=len(sizes), index=shard))

    if buffer is None:
        stamps = tuple(f"{table._fingerprint}:{row}" for row in ids)
        return Records(ids, labels, stamps, fetch, np.arange(len(ids)))
    digests = (blake2b(f"{name}\0{row}".encode(), digest_size=16).digest() for row in ids)
    return Records(
        ids=ids,
        labels=labels,
        stamps=ids,
        fetch=Forward(read_shard, sizes, limit=4 * buffer),
        keys=np.arange(len(ids)),
        shards=np.repeat(np.arange(len(sizes)), sizes),
        native=np.zeros((len(ids), 2), dtype=np.int64),
        digests=np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16),
        sequential=True,
    )


class Forward:
    """Random access to shards that can only be read forwards.

    The last `limit` rows are held; for an older row its shard is read again from the beginning. In an order whose rows
    moved by fewer than b places, 4 b are enough to read every shard once. Threads take turns.
    """

    def __init__(self, read: Callable[[int], Iterator[Raw]], sizes: list[int], limit: int):
        self._read, self._limit = read, limit
        self._starts: Ints = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._open: dict[int, tuple[Iterator[Raw], int]] = {}
        weakref.finalize(self, self._open.clear)  # at the latest before the interpreter takes the readers' modules away
        self._held: OrderedDict[int, Raw] = OrderedDict()
        self._lock = Lock()

    def __call__(self, row: int) -> Raw:
        """The image of a row, counted through all shards. Raises Unreadable."""
        with self._lock, reading():
            if row in self._held:
                return self._held[row]
            shard = int(np.searchsorted(self._starts, row, side="right")) - 1
            rows, position = self._open.pop(shard, (None, 0))
            if rows is None or position > row:
                rows, position = self._read(shard), int(self._starts[shard])
            for passed in range(position, row + 1):
                if (read := next(rows, None)) is None:
                    raise Unreadable("the stream ends before this row")
                self._held[passed] = raw = read
                if len(self._held) > self._limit:
                    self._held.popitem(last=False)
            if row + 1 < self._starts[shard + 1]:
                self._open[shard] = rows, row + 1
            return raw
