"""`vitmods bench`: models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitmods.cli.options import parse, rows_and_columns
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Bench:
    """Time models against the first one: paired, interleaved, after a warm-up, on one CPU thread or a GPU.

    A model is a size with changes or none (S/16, S/16+dpn), timm:NAME, torchvision:NAME, hf:FOLDER, or a trial's
    folder or a file of weights. With fast: in front (fast:S/16) it is optimized for inference first; with apart: too,
    but its parallel branches stay one after another (apart:S18x2/16 fast:S18x2/16).

    examples:
      vitmods bench --models S/16 fast:S/16 timm:vit_small_patch16_224 --batch 1 8
      vitmods bench --models Ti/4 Ti/4+dtn --img-size 32 --batch 64 --kind training
    """

    models: tuple[str, ...] = ("S/16", "timm:vit_small_patch16_224")
    """models to measure; the others are compared with the first"""
    batch: tuple[int, ...] = (1, 8)
    """images at a time"""
    kind: tuple[Literal["inference", "training"], ...] = ("inference", "training")
    """training is forward, backward and a step of AdamW"""
    img_size: tuple[int, ...] = (224,)
    """image side, or rows and columns, in pixels"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    bf16: bool = False
    """run under bfloat16 autocast"""
    compile: bool = False
    """compile the models with torch.compile"""
    seconds: float = 30.0
    """time limit for each batch and kind, in seconds; at least seven rounds run"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """also write bench.json and bench.png into this folder"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Bench, arguments, "bench")
    if len(set(options.models)) < len(options.models):
        raise UserError("--models names a model twice: each can be measured once.")
    if min(options.batch, default=0) < 1:
        raise UserError(f"--batch is a number of images from 1 on, got {options.batch}.")
    import shutil

    from vitmods.bench import bench, plot, table
    from vitmods.train.device import resolve
    from vitmods.util.files import make_folder, write_json

    size = rows_and_columns(options.img_size)
    timings = bench(
        {name: _open(name, size) for name in options.models}, size, batches=options.batch, kinds=options.kind,
        device=resolve(options.device), bf16=options.bf16, compiled=options.compile, budget_s=options.seconds,
    )  # fmt: skip
    print(table(timings, shutil.get_terminal_size().columns))
    if options.out is not None:
        folder = make_folder(options.out)
        write_json(folder / "bench.json", timings)
        plot(timings, folder / "bench.png")
        print(f"Wrote {folder}/bench.json and bench.png")
    return 0


def _open(name: str, size: tuple[int, int]) -> nn.Module:
    from vitmods.adapters import open_model
    from vitmods.fast import optimize_for_inference
    from vitmods.model.vit import ViT
    from vitmods.study.checkpoints import Checkpoint

    way = next((prefix for prefix in ("fast", "apart") if name.startswith(f"{prefix}:")), "")
    source = name.removeprefix(f"{way}:")
    if not Path(source).exists():
        model = open_model(source, size)
    elif isinstance(model := Checkpoint.open(source).model, ViT):
        model.set_input_size(size)
    if not way:
        return model
    if way == "apart" and getattr(getattr(model, "vit_config", None), "parallel", 1) == 1:
        raise UserError(
            f"{name}: this model does not have parallel branches to leave apart. Write fast: in front instead."
        )
    return optimize_for_inference(model, join_branches=way == "fast")
