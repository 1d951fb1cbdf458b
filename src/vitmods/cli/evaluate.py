"""`vitmods evaluate`: a finished trial's weights on a split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitmods.cli.options import parse


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the weights of a trial and print the metrics as JSON.

    examples:
      vitmods evaluate runs/digits-mu3-2/trials/dpn/seed0
      vitmods evaluate runs/digits-mu3-2/trials/dpn/seed0 --split val --out val.json
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """a trial: a folder with config.json and model.safetensors"""
    split: str | None = None
    """train, val or test; None: the split that the trial was judged by"""
    data: str | None = None
    """other pictures with the same classes; None: the trial's own"""
    batch_size: int = 64
    """pictures at a time"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    out: Path | None = None
    """also write the JSON to this file"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Evaluate, arguments, "evaluate")
    from vitmods.files import make_folder, write_json
    from vitmods.study.evaluate import evaluate_trial

    found = evaluate_trial(
        options.folder, split=options.split, data=options.data, batch_size=options.batch_size, device=options.device
    )
    print(json.dumps(found, indent=1))
    if options.out is not None:
        make_folder(options.out.parent)
        write_json(options.out, found)
    return 0
