"""Images in shards as records: each is read at its place in its tar file."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path

import numpy as np

from vitmods.data.build import digest
from vitmods.data.read import Unreadable, reading
from vitmods.data.records import Records, printable
from vitmods.data.shard_index import Row


def records_of(files: Sequence[Path], rows: Sequence[Sequence[Row]], root: Path | None = None) -> Records:
    """Records sorted by name; their keys run through the shards. With `root`, ids name the shard too.

    What fetching needs is kept as arrays: a million rows would fill hundreds of megabytes in every process.
    """
    everything = list(chain.from_iterable(rows))
    shard = np.repeat(np.arange(len(files)), [len(part) for part in rows])
    prefix = ["" if root is None else f"{file.relative_to(root).as_posix()}: " for file in files]
    ids = [prefix[s] + row.id for s, row in zip(shard.tolist(), everything, strict=True)]
    order = np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)
    stamps = [_stamp(file) for file in files]
    places = np.array([(row.offset, row.size) for row in everything], dtype=np.int64).reshape(-1, 2)
    native = np.array([(row.height, row.width) for row in everything], dtype=np.int64).reshape(-1, 2)
    known = all(row.digest for row in everything)
    digests = np.frombuffer(bytes.fromhex("".join(row.digest for row in everything)), dtype=np.uint8).reshape(-1, 16)

    def fetch(key: int) -> bytes:
        path, (offset, size) = files[shard[key]], places[key].tolist()
        with reading():
            with open(path, "rb", buffering=0) as file:
                file.seek(offset)
                raw = file.read(size)
            if len(raw) < size:
                raise Unreadable(f"the shard {printable(path.name)} is cut off")
            if known and digest(raw) != digests[key].tobytes():
                raise Unreadable(
                    f"damaged in the shard {printable(path.name)} at byte {offset:,}: the checksum differs"
                )
        return raw

    return Records(
        ids=tuple(ids[i] for i in order),
        labels=np.array([everything[i].label for i in order], dtype=np.int64),
        stamps=tuple(f"{stamps[s]}:{offset}" for s, offset in zip(shard[order].tolist(), places[order, 0].tolist())),
        fetch=fetch,
        keys=order,
        shards=shard[order],
        native=native[order] if known else None,
        digests=digests[order] if known else None,
    )


def _stamp(shard: Path) -> str:
    status = shard.stat()
    record = f"{shard.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    return sha256(record.encode("utf-8", "surrogateescape")).hexdigest()[:16]
