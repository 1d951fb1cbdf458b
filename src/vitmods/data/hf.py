"""Hugging Face sets, from their hub or saved on the disk. Needs the extra: pip install "vitmods[hf]"."""

from typing import Any

import numpy as np

from vitmods.data.folder import SPLIT_NAMES
from vitmods.data.hf_stream import BUFFER, stored_bytes, streamed_source
from vitmods.data.read import reading
from vitmods.data.records import Records, Source
from vitmods.data.shards import streaming_options
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user

OPTIONS = ("config", "revision", "image", "label", "streaming", "buffer")
ROWS_A_SHARD = 1000  # of a saved set that is streamed
_SAVED = ("dataset_dict.json", "dataset_info.json")  # what save_to_disk leaves


def hf_set(spec: str, name: str, options: dict[str, str]) -> Source:
    """The set NAME of the hub, or the folder that save_to_disk wrote.

    options: config and revision as load_dataset takes them; image and label name the columns where there is a choice;
    streaming=1 reads rows as they are needed, with a shuffle buffer of `buffer` rows.
    Raises UserError without the extra, for unknown options, and where no image or label column can be reported.
    """
    _refuse_unknown(spec, options)
    streaming = streaming_options(spec, options, "streaming", BUFFER)
    tables, warnings = _by_split(_load(name, options, bool(streaming.asked)))
    columns = image, label = _columns(next(iter(tables.values())), options, spec)
    if streaming.asked:
        return streamed_source(name, spec, tables, columns, streaming, warnings)
    tables = {split: _class_numbers(table, label) for split, table in tables.items()}
    classes = {split: tuple(table.features[label].names) for split, table in tables.items()}
    if len(set(classes.values())) > 1:
        raise UserError(f'The splits of "{spec}" name different classes: give all of them one ClassLabel in "{label}".')
    splits = {split: _records(split, table, image, label) for split, table in tables.items()}
    return Source(name.rstrip("/").split("/")[-1], spec, next(iter(classes.values())), splits, warnings=warnings)


def _refuse_unknown(spec: str, options: dict[str, str]) -> None:
    for name in options:
        if name not in OPTIONS:
            raise UserError(f'"{spec}": hf has no option "{name}". {nearest(name, OPTIONS)}')
    if "buffer" in options and options.get("streaming") != "1":
        raise UserError(f'"{spec}": buffer is for streaming=1 alone.')


def _load(name: str, options: dict[str, str], streaming: bool) -> Any:
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
        split = next((split for split, names in SPLIT_NAMES.items() if name in names), None)
        if split is None or split in tables:
            unused.append(name)
        else:
            tables[split] = table
    if "train" not in tables:
        raise UserError(f"The Hugging Face set has no train split, only {', '.join(loaded)}.")
    warnings = [f"These splits were not used: {', '.join(unused)}."] if unused else []
    return tables, warnings


def _columns(table: Any, options: dict[str, str], spec: str) -> tuple[str, str]:
    from datasets import ClassLabel, Image

    chosen = []
    for role, kind in (("image", Image), ("label", ClassLabel)):
        typed = [name for name, feature in table.features.items() if isinstance(feature, kind)]
        column = options.get(role) or (typed[0] if len(typed) == 1 else role)
        if column not in table.features or (role == "image" and column not in typed):
            names = ", ".join(table.features)
            raise UserError(f'Which column of "{spec}" is the {role}? Add "?{role}=NAME" (or "&"); it has {names}.')
        chosen.append(column)
    return chosen[0], chosen[1]


def _class_numbers(table: Any, label: str) -> Any:
    from datasets import ClassLabel

    return table if isinstance(table.features[label], ClassLabel) else table.class_encode_column(label)


def _records(split: str, table: Any, image: str, label: str) -> Records:
    from datasets import Image

    images = table.select_columns([image]).cast_column(image, Image(decode=False))

    def fetch(key: int) -> bytes:
        with reading():
            return stored_bytes(images[key][image])

    ids = tuple(f"{split}[{i}]" for i in range(len(table)))
    labels = np.asarray(table[label], dtype=np.int64)
    return Records(ids, labels, tuple(f"{table._fingerprint}:{i}" for i in ids), fetch, np.arange(len(ids)))
