"""`vitmods export`: a model as a file for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitmods.cli.options import parse, rows_and_columns
from vitmods.util.errors import UserError
from vitmods.util.remote import download


@dataclass(frozen=True)
class Export:
    """Write a model to a file, read it back, and compare what it computes.

    Images keep the size of the model, or of the preprocessor beside it; their number is open unless --batch fixes it.

    examples:
      vitmods export runs/digits-mu3-2/trials/dpn/seed0 --to onnx --precision int8
      vitmods export model.safetensors --to torch --optimize --batch 1 --out model.pt2
      vitmods export runs/digits-mu3-2/trials/dpn/seed0 --to hub --out pets-dpn
      vitmods export runs/digits-mu3-2/trials/dpn/seed0 --to hub --push me/pets-dpn --license apache-2.0
    """

    model: Annotated[str, tyro.conf.Positional]
    """a trial's folder or address, a file of weights (.safetensors, .pth, .npz), or a timm model with published
    weights"""
    to: Literal["torch", "onnx", "safetensors", "timm", "hf", "hub"] = "onnx"
    """torch (torch.export, .pt2), onnx (needs the extra onnx), safetensors (weights and config), timm or hf (a folder
    that timm or transformers opens without vitmods), hub (a folder that opens wherever it can: docs/sharing.md)"""
    out: Path | None = None
    """the file, or the folder of timm, hf and hub; None: model.pt2, model.onnx, model.safetensors or model here"""
    batch: int | None = None
    """images at a time; None: any number"""
    img_size: tuple[int, ...] | Literal["any"] | None = None
    """another image side, or rows and columns: positions are resampled and baked in; any: the graph resamples them"""
    precision: Literal["float32", "float16", "int8"] | None = None
    """of the weights: float32, float16, int8 (onnx, for ONNX Runtime); None: the model's own"""
    optimize: bool = False
    """fold norms' gains, LayerScale and BatchNorm into the linear maps first"""
    temperature: Literal["val"] | None = None
    """divide the head by a temperature that is fitted on the trial's val images: probabilities are then calibrated"""
    push: str | None = None
    """folders: USER/NAME on Hugging Face's Hub, which gets it instead of a folder here"""
    study: Path | None = None
    """folders: the study, or its address, whose result the card reports; None: the study that contains the trial"""
    license: str | None = None
    """folders: license of the weights, as the Hub spells it; None: not in the card"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Export, arguments, "export")
    hub = options.to in ("timm", "hf", "hub")
    of_files = ("batch", "img_size", "precision", "optimize", "temperature")
    unread = dict.fromkeys(of_files, hub) | dict.fromkeys(("push", "study", "license"), not hub)
    for name, is_unread in unread.items():
        if is_unread and getattr(options, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} does not apply to --to {options.to}: leave it out.")
    if options.push and options.out:
        raise UserError("--push uploads, --out writes a folder here: give one of the two.")
    source = download(options.model)
    if hub:
        from vitmods.report.hub import push_to_hub, save_pretrained

        how: Any = {"study": options.study, "license": options.license}
        how["library"] = None if options.to == "hub" else options.to
        if options.push is not None:
            print(push_to_hub(source, options.push, **how))
            return 0
        folder = save_pretrained(source, options.out or "model", **how)
        print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
        return 0
    import torch

    from vitmods.fast import ENDINGS, export, optimize_for_inference
    from vitmods.study.checkpoints import Checkpoint, Graph
    from vitmods.study.evaluate import temperature_of
    from vitmods.tasks.features import check_head

    checkpoint = Checkpoint.open(source)
    if isinstance(checkpoint.model, Graph):
        raise UserError(f"{options.model} is a graph, whose weights are fixed in it: export from the trial or weights.")
    model: Any = checkpoint.as_seen().backbone
    if options.to != "safetensors" and model is not checkpoint.model:
        raise UserError(
            f"{options.model} contains modules of its task besides its ViT, which a graph would lack: write the ViT's "
            "weights alone (--to safetensors), or use the trial as it is (vitmods predict)."
        )
    if options.temperature is not None:
        temperature = temperature_of(checkpoint)
        head = check_head(model)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.div_(temperature)
        print(f"The logits are divided by {temperature:.3g}, fitted on val.")
    if options.optimize:
        model = optimize_for_inference(model)
    out = options.out or Path("model" + ENDINGS[options.to])
    size = rows_and_columns(options.img_size) if isinstance(options.img_size, tuple) else options.img_size
    if size is None and not hasattr(model, "vit_config"):
        size = tuple(checkpoint.settings["img_size"])
    difference = export(model, out, options.to, options.batch, size, options.precision)  # type: ignore[arg-type]
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; read back, outputs differ by {difference:.1e} of the largest")
    return 0
