"""Shards against the folder they were packed from, on one core: packing, opening, reading, streaming, paired.

    OMP_NUM_THREADS=1 python benchmarks/shards.py path/to/images [--out benchmarks/results]

Packing is compared with reading and decoding every image, which anything that checks them has to do; streaming with
batches of the images that are decoded once and kept. All files are in the system's cache: no disk is measured.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from paired import one_thread, paired, report

from vitmods import data
from vitmods.data.pack import pack
from vitmods.data.read import decode
from vitmods.data.records import Source
from vitmods.data.sources import open_source
from vitmods.recipes import default

SIZE, BATCH, BATCHES = 160, 64, 8


def packing(dataset: Path, out: Path) -> Callable[[], None]:
    def run() -> None:
        shutil.rmtree(out, ignore_errors=True)
        pack(dataset, out, shard_mb=10, workers=1)

    return run


def reading(source: Source, use: Callable[[Any], Any]) -> Callable[[], None]:
    def run() -> None:
        for records in source.splits.values():
            for key in records.keys.tolist():
                use(records.fetch(key))

    return run


def batches(spec: Path | str) -> Callable[[], None]:
    dataset = replace(data.load(spec, img_size=SIZE, augment=default().augment), workers=0)

    def run() -> None:
        for _ in islice(dataset.train_batches(seed=0, epoch=0, batch_size=BATCH), BATCHES):
            pass

    return run


def rates(variants: dict[str, Callable[[], None]], reference: str, dataset: int, rounds: int) -> dict[str, Any]:
    rows = paired(variants, reference, rounds)
    return {
        name: {"images_per_s": dataset / row["seconds"], "factor": 1 / row["ratio"]}
        | {"factor_low": 1 / row["ratio_high"], "factor_high": 1 / row["ratio_low"]}
        for name, row in rows.items()
    }


def measure(dataset: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    shards = scratch / "shards"
    source = open_source(dataset)
    count = sum(map(len, source.splits.values()))
    decoding = {"read and decode": reading(source, lambda raw: decode(raw, 3)), "pack": packing(dataset, shards)}
    packed = rates(
        decoding | {"pack again": lambda: pack(dataset, shards, shard_mb=10, workers=1)},
        "read and decode",
        count,
        rounds,
    )
    pack(dataset, shards, shard_mb=10)
    opening = {"folder": lambda: open_source(dataset), "shards": lambda: open_source(shards)}
    bytes_only = {"folder": reading(source, len), "shards, checksums compared": reading(open_source(shards), len)}
    streams = {
        "kept": batches(dataset),
        "folder": batches(f"{dataset}?stream=1"),
        "shards": batches(f"{shards}?stream=1"),
    }
    return {
        "packing": packed,
        "opening": rates(opening, "folder", count, rounds),
        "reading": rates(bytes_only, "folder", count, rounds),
        f"batches at {SIZE} px": rates(streams, "kept", BATCH * BATCHES, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    one_thread()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        report("shards", measure(options.images, Path(scratch), options.rounds), options.out)


if __name__ == "__main__":
    main()
