"""`vitmods data`: what a folder of pictures holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitmods.cli.options import parse

UNFIT = 1


@dataclass(frozen=True)
class Data:
    """Read every picture and show what was found: classes, splits, sizes, and whatever is wrong. Nothing is trained.

    Exit code: 0 if a study could train on it as it is, 1 if not, 2 for an error.

    examples:
      vitmods data path/to/pictures
      vitmods data "torchvision:CIFAR10?root=data" --out runs/check
    """

    source: Annotated[str, tyro.conf.Positional]
    """digits, a folder of class folders, torchvision:NAME?root=FOLDER, or hf:NAME"""
    split_seed: int = 0
    """for pictures that are not split yet: which split is made"""
    val_fraction: float = 0.1
    """share of the pictures for validation, where there is no such split"""
    test_fraction: float = 0.2
    """share of the pictures for the test, where there is no such split"""
    out: Path | None = None
    """also write all of it, every unreadable picture included, to data.json in this folder"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Data, arguments, "data")
    from vitmods.data import check

    checked = check(
        options.source,
        split_seed=options.split_seed,
        val_fraction=options.val_fraction,
        test_fraction=options.test_fraction,
    )
    print(checked.text)
    if options.out is not None:
        from vitmods.files import make_folder, write_json

        write_json(make_folder(options.out) / "data.json", checked.summary)
    return 0 if checked.fit else UNFIT
