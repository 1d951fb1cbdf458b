"""`vitmods diff`: what an arm alters in a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from vitmods.cli.options import parse, rows_and_columns


@dataclass(frozen=True)
class Diff:
    """Show what changes alter in a model: modules, parameters, FLOPs, what is preserved, papers. Nothing is trained.

    examples:
      vitmods diff --base S/16 --arm dpn+rms
      vitmods diff --base Ti/4 --img-size 32 --num-classes 10 --arm "placement(attn=post,mlp=post)"
    """

    arm: Annotated[str, tyro.conf.arg(name="arm")]
    """changes, joined by +; `vitmods changes` lists them"""
    base: str = "S/16"
    """the model that is changed: Ti/16, S/16, B/16, S36/16 (36 deep), or timm:NAME, torchvision:NAME, hf:FOLDER
    with their own classes"""
    img_size: tuple[int, ...] = (224,)
    """image side, or rows and columns, in pixels"""
    in_chans: int = 3
    """channels of an image"""
    num_classes: int = 1000
    """classes of the head"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Diff, arguments, "diff")
    import torch

    from vitmods.adapters.apply import apply
    from vitmods.adapters.diff import diff
    from vitmods.adapters.files import LIBRARIES, open_model
    from vitmods.changes import parse_changes
    from vitmods.model.vit import vit
    from vitmods.study.line_ups import refuse_line_ups

    refuse_line_ups(options.arm)
    changes = parse_changes(options.arm)
    torch.manual_seed(0)
    size = rows_and_columns(options.img_size)
    if options.base.partition(":")[0] in LIBRARIES:
        base = open_model(options.base, size)
    else:
        base = vit(options.base, img_size=size, in_chans=options.in_chans, num_classes=options.num_classes)
    print(diff(base, apply(base, *changes)))
    return 0
