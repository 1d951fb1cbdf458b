"""Hugging Face sets, from their hub or saved on the disk. Needs the extra: pip install "vitmods[hf]"."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from vitmods.data.augment import Ints
from vitmods.data.read import Unreadable, decode, reading
from vitmods.data.records import Records, Source, Streaming, printable, split_named
from vitmods.data.sources import Spec, data_source
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user
from vitmods.util.limits import read_bytes

BUFFER = 1000  # rows, as in datasets: unlike files of which any part can be read, they fill the memory
_LOOKED_AT = 4  # images of a stream that are read before training; all others are when they are needed
_LABELS_AT_A_TIME = 10_000
ROWS_A_SHARD = 1000  # of a saved set that is streamed
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
        raise UserError(f'"{spec}": buffer is for streaming=1 alone.')
    return hf_set(spec.rest, spec.options, spec.streaming("streaming", BUFFER))


def hf_set(name: str, options: Mapping[str, str], how: Streaming | None = None) -> Source:
    """A set of the hub or of the disk. options: config, revision, image, label."""
    short, how = printable(name.rstrip("/").split("/")[-1]), how or Streaming(asked=False)
    tables, warnings = _by_split(_load(name, options, bool(how.asked)))
    columns = image, label = _columns(next(iter(tables.values())), options, short)
    if how.asked:
        return _streamed(short, tables, columns, how, warnings)
    from datasets import ClassLabel

    tables = {
        split: table if isinstance(table.features[label], ClassLabel) else table.class_encode_column(label)
        for split, table in tables.items()
    }
    for split in [name for name, table in tables.items() if set(table.unique(label)) <= {None, -1}]:
        warnings.append(_not_public(split))
        del tables[split]
    if "train" not in tables:
        raise UserError(f'"{short}" has no labels in train.')
    classes = {split: tuple(table.features[label].names) for split, table in tables.items()}
    if len(set(classes.values())) > 1:
        raise _other_classes(short, label)
    splits = {split: _records(split, table, image, label) for split, table in tables.items()}
    return Source(short, next(iter(classes.values())), splits, warnings)


def _load(name: str, options: Mapping[str, str], streaming: bool) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError('Hugging Face sets need the extra packages: pip install "vitmods[hf]"') from None
    if any((expand_user(name) / saved).is_file() for saved in _SAVED):
        saved = datasets.load_from_disk(str(expand_user(name)))
        return _as_stream(saved) if streaming else saved
    try:
        return datasets.load_dataset(name, options.get("config"), revision=options.get("revision"), streaming=streaming)
    except Exception as error:  # hub, network, scripts and formats raise many kinds; all mean that it cannot be had
        raise UserError(f'The Hugging Face set "{name}" cannot be loaded: {type(error).__name__}: {error}') from error


def _as_stream(saved: Any) -> Any:
    if isinstance(saved, dict):
        return {split: _as_stream(table) for split, table in saved.items()}
    return saved.to_iterable_dataset(num_shards=-(-max(len(saved), 1) // ROWS_A_SHARD))


def _by_split(loaded: Any) -> tuple[dict[str, Any], list[str]]:
    """Tables under our names for splits, and warnings. A set without splits is all train."""
    if not isinstance(loaded, dict):
        return {"train": loaded}, []
    tables: dict[str, Any] = {}
    unused = []
    for name, table in loaded.items():
        split = split_named(name)
        if split is None or split in tables:
            unused.append(name)
        else:
            tables[split] = table
    if "train" not in tables:
        raise UserError(f"The Hugging Face set has no train split, only {', '.join(loaded)}.")
    warnings = [f"These splits were not used: {', '.join(unused)}."] if unused else []
    return tables, warnings


def _columns(table: Any, options: Mapping[str, str], name: str) -> tuple[str, str]:
    from datasets import ClassLabel, Image

    chosen = []
    for role, kind in (("image", Image), ("label", ClassLabel)):
        typed = [column for column, feature in table.features.items() if isinstance(feature, kind)]
        column = options.get(role) or (typed[0] if len(typed) == 1 else role)
        if column not in table.features or (role == "image" and column not in typed):
            names = ", ".join(table.features)
            raise UserError(f'Which column of "{name}" is the {role}? Add "?{role}=NAME" (or "&"); it has {names}.')
        chosen.append(column)
    return chosen[0], chosen[1]


def _records(split: str, table: Any, image: str, label: str) -> Records:
    from datasets import Image

    images = table.select_columns([image]).cast_column(image, Image(decode=False))

    def fetch(key: int) -> bytes:
        with reading():
            return _stored_bytes(images[key][image])

    ids = tuple(f"{split}[{i}]" for i in range(len(table)))
    labels = np.array([-1 if value is None else value for value in table[label]], dtype=np.int64)
    return Records(ids, labels, tuple(f"{table._fingerprint}:{i}" for i in ids), fetch, np.arange(len(ids)))


def _streamed(
    name: str, tables: dict[str, Any], columns: tuple[str, str], how: Streaming, warnings: list[str]
) -> Source:
    """Rows are read from the hub, or from files on the disk, as they are needed.

    The labels are read once before training, by themselves, so that classes, lengths and splits are known; each row
    then has a number, by which it is augmented and mixed as any other image. Rows of one file (datasets calls it a
    shard) can only be read from its beginning on; those that were read last wait in memory until their turn comes.
    """
    image, label = columns
    shards = {split: _Shards(table, image, label) for split, table in tables.items()}
    found = {split: part.labels() for split, part in shards.items()}
    hidden = [split for split, (labels, _) in found.items() if all(value in (None, -1) for value in labels)]
    for split in hidden:
        warnings.append(_not_public(split))
        del found[split]
    if "train" not in found:
        raise UserError(f'"{name}" has no labels in train.')
    features = [tables[split].features[label] for split in found]
    if any(feature != features[0] for feature in features):
        raise _other_classes(name, label)
    classes, number = _classes(features[0], [value for labels, _ in found.values() for value in labels])
    splits = {}
    for split, (labels, sizes) in found.items():
        unlabeled = next((row for row, value in enumerate(labels) if value not in number), None)
        if unlabeled is not None:
            raise UserError(f'Row {unlabeled} of {split} in "{name}" has no label of a class: {labels[unlabeled]!r}.')
        numbers = np.array([number[value] for value in labels], dtype=np.int64)
        splits[split] = _streamed_records(split, name, numbers, sizes, shards[split], how.buffer)
    _look_at_first(splits["train"], name)
    warnings.append("Streamed: the fingerprint is of names and labels, and images are checked when they are read.")
    return Source(name, classes, splits, warnings, streaming=how)


def _not_public(split: str) -> str:
    return f"The labels of {split} are not public; it was not used."


def _other_classes(name: str, label: str) -> UserError:
    return UserError(f'The splits of "{name}" name different classes: give all of them one ClassLabel in "{label}".')


def _stored_bytes(img: dict[str, Any]) -> bytes:
    """Of an image that datasets has not decoded."""
    return img["bytes"] if img["bytes"] is not None else read_bytes(Path(img["path"]), "image")


def _classes(feature: Any, labels: list[Any]) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Names of the classes, and the number of each value that the column can have."""
    names = getattr(feature, "names", None)
    if names:
        return tuple(names), {i: i for i in range(len(names))}
    values = sorted({value for value in labels if value is not None}, key=str)  # as datasets' class_encode_column
    return tuple(str(value) for value in values), {value: i for i, value in enumerate(values)}


class _Shards:
    """The files that a table is made of."""

    def __init__(self, table: Any, image: str, label: str):
        from datasets import Image

        self._images = table.select_columns([image]).cast_column(image, Image(decode=False))
        self._labels = table.select_columns([label])
        self._image, self._label, self._count = image, label, table.num_shards

    def labels(self) -> tuple[list[Any], list[int]]:
        """All labels in order, and the number of rows of each shard."""
        labels: list[Any] = []
        sizes = []
        for shard in range(self._count):
            before = len(labels)
            part = self._labels.shard(num_shards=self._count, index=shard).with_format("arrow")
            for rows in part.iter(batch_size=_LABELS_AT_A_TIME):
                labels += rows[self._label].to_pylist()
            sizes.append(len(labels) - before)
        return labels, sizes

    def images(self, shard: int) -> Iterator[bytes]:
        """The bytes of each image of a shard, from its beginning on."""
        for row in self._images.shard(num_shards=self._count, index=shard):
            yield _stored_bytes(row[self._image])


class Forward:
    """Random access to shards that can be read forwards only.

    The rows that were read last are held, `limit` of them; for a row that is no longer held its shard is read again
    from the beginning. In an order whose rows moved by fewer than b places, 4 b are enough to read every shard once: a
    row is asked for before 4 b others are read. Threads take turns.
    """

    def __init__(self, read: Callable[[int], Iterator[bytes]], sizes: list[int], limit: int):
        self._read, self._limit = read, limit
        self._starts: Ints = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._open: dict[int, tuple[Iterator[bytes], int]] = {}
        weakref.finalize(self, self._open.clear)  # at the latest before the interpreter takes the readers' modules away
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()

    def __call__(self, row: int) -> bytes:
        """The bytes of a row, counted through all shards. Raises Unreadable."""
        with self._lock, reading():
            return self._held[row] if row in self._held else self._reach(row)

    def _reach(self, row: int) -> bytes:
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


def _streamed_records(split: str, name: str, labels: Ints, sizes: list[int], shards: _Shards, buffer: int) -> Records:
    ids = tuple(f"{split}[{row}]" for row in range(len(labels)))
    digests = (blake2b(f"{name}\0{row}".encode(), digest_size=16).digest() for row in ids)
    return Records(
        ids=ids,
        labels=labels,
        stamps=ids,
        fetch=Forward(shards.images, sizes, limit=4 * buffer),
        keys=np.arange(len(ids)),
        shards=np.repeat(np.arange(len(sizes)), sizes),
        native=np.zeros((len(ids), 2), dtype=np.int64),
        digests=np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16),
        sequential=True,
    )


def _look_at_first(records: Records, name: str) -> None:
    first = records.some(_LOOKED_AT)
    for i, key in enumerate(first.keys.tolist()):
        try:
            decode(first.fetch(key), 3)
        except Unreadable as error:
            raise UserError(f'{first.ids[i]} of "{name}" cannot be read: {error}.') from error
