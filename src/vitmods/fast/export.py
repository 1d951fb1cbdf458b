"""Export a ViT to other programs: as torch.export's program, as ONNX, or as weights with their config."""

import contextlib
import io
import json
import os
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vitmods.adapters import load, save
from vitmods.adapters.apply import as_vit
from vitmods.adapters.own import preparation
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, nearest, needs
from vitmods.util.files import disk_errors, make_folder

Format = Literal["torch", "onnx", "safetensors"]
ENDINGS: dict[str, str] = {"torch": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}
EXTRA = "metadata.json"  # beside the program of torch.export
TOLERANCE = 1e-4
DYNAMIC = 3  # images to trace with when the batch is left open: 0 and 1 would be taken as constants


def export(model: nn.Module, path: str | Path, to: Format | None = None, batch: int | None = None) -> float:
    """Write a model to a file, read it back and compare: the largest difference of outputs, relative to the largest.

    The graphs take images (batch, in_chans, height, width) named ``images``, of the model's one size, since its
    positions are baked in, and give ``logits``. ``metadata`` goes with them: as metadata_props of ONNX, each value as
    JSON, and as the extra file ``metadata.json`` of torch.export. ``safetensors`` holds the weights with their config
    and the same metadata; ``vitmods.adapters.load`` reads it.

    Args:
        model: a vitmods ViT, or one of timm, Hugging Face or torchvision (imported exactly).
        path: the file; one that is there is replaced when the new one is whole and right.
        to: "torch", "onnx" (needs the extra ``onnx``) or "safetensors"; None: by the ending.
        batch: images at a time, or None for any number.

    Raises UserError when the format is unknown, a library is missing, the disk refuses, the model cannot be written so,
    or what was written differs by more than 1e-4. Nothing is overwritten then.
    """
    path = Path(path)
    kind: str | None = to or next((kind for kind, ending in ENDINGS.items() if path.suffix == ending), None)
    if kind is None:
        endings = ", ".join(ENDINGS.values())
        raise UserError(f"{path.name}: give the format ({', '.join(ENDINGS)}), or end the name in {endings}.")
    if kind not in ENDINGS:
        raise UserError(f"The format '{kind}' is unknown. {nearest(kind, ENDINGS)}")
    if batch is not None and batch < 1:
        raise UserError(f"batch is a number of images, at least 1, or None for any, got {batch}.")
    vit = as_vit(model)
    if vit.vit_config.reads_tokens and kind != "safetensors":
        raise UserError(
            f"Graphs are only for models that read images: export sequence models as safetensors, not {kind}."
        )
    if vit.training:
        raise UserError("The model is in training mode, where norms and dropout differ: call model.eval() first.")
    make_folder(path.parent)
    temporary = path.with_name(f".{path.stem}.part{ENDINGS[kind]}")
    write = {"torch": _write_torch, "onnx": _write_onnx, "safetensors": _write_safetensors}[kind]
    try:
        with disk_errors(path):
            difference = write(vit, temporary, batch)
            exact = next(vit.parameters()).dtype in (torch.float32, torch.float64)
            if not difference <= (TOLERANCE if exact else 5e-2):
                raise UserError(f"The {kind} outputs differ by {difference:.1e} of the largest output: not written.")
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return difference


def metadata(model: ViT) -> dict[str, Any]:
    """Return what another program needs to prepare images and name outputs, under timm's names: ``input_size``
    (channels, rows, columns), ``mean`` and ``std`` of pixels in [0, 1], ``crop_pct``, ``interpolation``, and where
    known ``label_names`` and the ``task``."""
    config = model.vit_config
    return {"input_size": (config.in_chans, *config.img_size), **preparation(model)}


def _images(model: ViT, count: int) -> Tensor:
    p, images = next(model.parameters()), model.patch_embed.example(count, torch.Generator().manual_seed(0))
    return images.to(p.device, p.dtype if images.is_floating_point() else None)


def _shapes(batch: int | None) -> Any:
    return ({0: torch.export.Dim("batch", min=1)},) if batch is None else None


@torch.no_grad()
def _difference(model: ViT, run: Any, batch: int | None) -> float:
    worst = 0.0
    for count in (1, DYNAMIC + 2) if batch is None else (batch,):
        images = _images(model, count)
        expected = model(images).double().cpu()
        moved = (run(images).double().cpu() - expected).abs().max()
        worst = max(worst, float(moved / expected.abs().max().clamp_min(1e-12)))
    return worst


def _write_torch(model: ViT, path: Path, batch: int | None) -> float:
    with torch.no_grad():
        program = torch.export.export(model, (_images(model, batch or DYNAMIC),), dynamic_shapes=_shapes(batch))
    torch.export.save(program, path, extra_files={EXTRA: json.dumps(metadata(model))})
    return _difference(model, torch.export.load(path).module(), batch)


def _write_onnx(model: ViT, path: Path, batch: int | None) -> float:
    with needs("Writing ONNX needs onnxruntime and onnxscript", "onnx"):
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it, and says so late)
    dtype = next(model.parameters()).dtype
    if dtype != torch.float32:
        raise UserError(f"ONNX is written in float32, and the model is in {dtype}: call model.float() first.")
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (_images(model, batch or DYNAMIC),),
            dynamo=True,
            dynamic_shapes=_shapes(batch),
            input_names=["images"],
            output_names=["logits"],
            external_data=False,
        )
    assert program is not None
    program.model.metadata_props.update({name: json.dumps(value) for name, value in metadata(model).items()})
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        logits: np.ndarray = session.run(None, {"images": images.cpu().numpy()})[0]
        return torch.from_numpy(logits)

    return _difference(model, run, batch)


def _write_safetensors(model: ViT, path: Path, batch: int | None) -> float:
    if batch is not None:
        raise UserError("safetensors holds only weights, which fit any batch: leave batch out.")
    save(model, path)
    return _difference(model, load(path).to(next(model.parameters())), None)
