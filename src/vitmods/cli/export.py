"""`vitmods export`: a model as a file for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitmods.cli.options import parse, rows_and_columns
from vitmods.util.remote import brought


@dataclass(frozen=True)
class Export:
    """Write a model to a file, read it back, and compare what it computes.

    Images keep the size that the model is made for; the number of them at a time is open unless --batch fixes it.

    examples:
      vitmods export runs/digits-mu3-2/trials/dpn/seed0 --to onnx
      vitmods export model.safetensors --to torch --optimize --batch 1 --out model.pt2
    """

    model: Annotated[str, tyro.conf.Positional]
    """a trial's folder or address, a file of weights (.safetensors, .pth, .npz), or a timm model with published
    weights"""
    to: Literal["torch", "onnx", "safetensors"] = "onnx"
    """torch (torch.export, .pt2), onnx (needs the extra onnx), safetensors (weights and config)"""
    out: Path | None = None
    """the file; None: model.pt2, model.onnx or model.safetensors here"""
    batch: int | None = None
    """images at a time; None: any number"""
    img_size: tuple[int, ...] | None = None
    """another image side, or rows and columns: positions are resampled and baked in"""
    optimize: bool = False
    """fold norms' gains, LayerScale and BatchNorm into the linear maps first"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Export, arguments, "export")
    from vitmods.adapters import open_checkpoint
    from vitmods.fast import ENDINGS, export, optimize_for_inference
    from vitmods.train.trial import MODULES
    from vitmods.util.errors import UserError

    name = brought(options.model)
    if options.to != "safetensors" and (Path(name) / MODULES).exists():
        raise UserError(
            f"{options.model} has modules beside its ViT, which a graph would lack: write the ViT's weights alone "
            "(--to safetensors), or use the trial as it is (vitmods predict)."
        )
    model = open_checkpoint(name)
    if options.img_size is not None:
        model.set_input_size(rows_and_columns(options.img_size))
    if options.optimize:
        model = optimize_for_inference(model)
    out = options.out or Path("model" + ENDINGS[options.to])
    difference = export(model, out, options.to, options.batch)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; read back, outputs differ by {difference:.1e} of the largest")
    return 0
