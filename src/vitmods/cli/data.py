"""`vitmods data`: what a folder of images holds; `vitmods data pack`: the same as shards."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitmods.cli.options import parse
from vitmods.data.splits import SplitOptions

UNFIT = 1


@dataclass(frozen=True)
class Data:
    """Read every image and report classes, splits, sizes and problems. Nothing is trained.

    Exit code: 0 if a study could train on it as it is, 1 if not, 2 for an error.

    examples:
      vitmods data path/to/images
      vitmods data "torchvision:CIFAR10?root=data" --out runs/check
      vitmods data path/to/shards
      vitmods data pack path/to/images path/to/shards      (with --help: --shard-mb, --split, --workers, --unreadable)
    """

    source: Annotated[str, tyro.conf.Positional]
    """digits, a folder of class folders or of shards, torchvision:NAME?root=FOLDER, hf:NAME, or wds:SHARDS"""
    split: SplitOptions = field(default_factory=SplitOptions)
    out: Path | None = None
    """also write all of it, every unreadable image included, to data.json in this folder"""


@dataclass(frozen=True)
class Pack:
    """Write the images of a folder as shards: WebDataset's tar files, with checksums. Their bytes stay as they are.

    Re-running the command resumes. A folder called pack is checked with `vitmods data ./pack`.

    examples:
      vitmods data pack path/to/images path/to/shards
      vitmods compare --data path/to/shards
    """

    folder: Annotated[str, tyro.conf.Positional]
    """a folder of class folders, with or without train, val and test above them"""
    out: Annotated[Path, tyro.conf.Positional]
    """the folder for the shards"""
    shard_mb: float = 100
    """largest size of a shard, in megabytes; it is put together in memory"""
    split: tuple[str, ...] = ()
    """train, val or test: pack these alone; none: all"""
    unreadable: Literal["stop", "skip"] = "stop"
    """images that cannot be read are named and stop the packing, or are left out and listed"""
    workers: int = 0
    """threads that read and check images; 0: one per core"""
    quiet: bool = False
    """no progress on the error stream"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments and arguments[0] == "pack":
        return _pack(parse(Pack, arguments[1:], "data pack"))
    options = parse(Data, arguments, "data")
    if os.path.exists(re.sub(r"^\w+:|\?.*", "", options.source)):  # else an error comes at once
        print(f"Reading {options.source} ...", file=sys.stderr, flush=True)
    from vitmods.data import check

    checked = check(options.source, **asdict(options.split))
    for line in checked.text.splitlines():  # tables have columns of blanks, and stay
        kept = re.sub(r"(?<= )'[^']*'", lambda quoted: quoted[0].replace(" ", "\0"), line)  # an argument stays whole
        filled = textwrap.fill(kept, 80, break_long_words=False, break_on_hyphens=False).replace("\0", " ")
        print(line if "  " in line.strip() else filled)
    if options.out is not None:
        from vitmods.util.files import make_folder, write_json

        write_json(make_folder(options.out) / "data.json", checked.summary)
    return 0 if checked.fit else UNFIT


def _pack(options: Pack) -> int:
    from vitmods.data.pack import pack

    packed = pack(
        options.folder, options.out, shard_mb=options.shard_mb, splits=options.split, unreadable=options.unreadable,
        workers=options.workers, progress=not options.quiet,
    )  # fmt: skip
    print(packed)
    return 0
